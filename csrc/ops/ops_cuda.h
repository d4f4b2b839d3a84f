// The operators that other parts of the core call on CUDA tensors. What each one computes is said in
// bmtrain/_ops.
#pragma once

#include <ATen/core/Tensor.h>

namespace bmtrain::ops {

void ordered_sum_cuda(at::Tensor out, at::TensorList sources, bool accumulate, double factor);

}  // namespace bmtrain::ops
