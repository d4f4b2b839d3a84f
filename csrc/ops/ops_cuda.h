// The operators that other parts of the core call on CUDA tensors. What each one computes is said in
// bmtrain/_ops. Null in builds without, whose other files are the same.
#pragma once

#include <ATen/core/Tensor.h>

namespace bmtrain::ops {

/// Lets the operators of ops.cpp take CUDA tensors. Not done when the core is loaded, because the running
/// torch may be built without CUDA, or with another one than the kernels.
[[gnu::weak]] void register_cuda_kernels();
[[nodiscard]] [[gnu::weak]] bool has_cuda_kernels();

[[gnu::weak]] void ordered_sum_cuda(at::Tensor out, at::TensorList sources, bool accumulate, double factor);

}  // namespace bmtrain::ops
