// From torch's dtypes to the core's.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/dtype.h"

namespace bmtrain {

/// The core's name of `dtype`. TypeError, naming `what`, for anything but fp32, fp16, bf16 and fp64.
[[nodiscard]] DType dtype_of(at::ScalarType dtype, const char* what);

}  // namespace bmtrain
