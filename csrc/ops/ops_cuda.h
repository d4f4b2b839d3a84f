// What other parts of the core call on CUDA tensors. What it computes is said in bmtrain/_ops. Null in builds
// without, whose other files are the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cpu/kernels.h"

namespace bmtrain::ops {

/// Lets the operators of ops.cpp take CUDA tensors. Not done when the core is loaded, because the running
/// torch may be built without CUDA, or with another one than the kernels.
[[gnu::weak]] void register_cuda_kernels();
[[nodiscard]] [[gnu::weak]] bool has_cuda_kernels();

[[gnu::weak]] void ordered_sum_cuda(at::Tensor out, at::TensorList sources, bool accumulate, double factor);

[[gnu::weak]] void step_on_cuda(const std::vector<cpu::AdamSlice>& slices, const c10::Device& device);
[[gnu::weak]] void step_on_cuda(const std::vector<cpu::MomentumSlice>& slices, const c10::Device& device);

}  // namespace bmtrain::ops
