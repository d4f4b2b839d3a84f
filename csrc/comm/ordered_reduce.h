// The local half of every reduction: combine one slice per rank, in rank order.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace bmtrain {

/// output[i] = inputs[0][i] op inputs[1][i] op ...: strictly in this order, so that the result does not
/// depend on who arrives first. float16 and bfloat16 accumulate in float32 and are rounded once; all others
/// in their own type; bool sums and maxima are "any", products and minima "all"; a NaN wins every maximum and
/// minimum. `output` may be one of the inputs.
void ordered_reduce(void* output, const std::vector<const void*>& inputs, std::int64_t numel,
                    at::ScalarType dtype, ReduceOp op);

}  // namespace bmtrain
