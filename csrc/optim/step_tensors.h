// What every optimizer's step over tensors has: weights, their roundings, gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace bmtrain {

/// Contiguous tensors of one device in parallel lists; `rounded` may be empty.
struct StepTensors {
  at::TensorList weights;  // fp32
  at::TensorList rounded;  // fp16 or bf16: receives the rounded weight
  at::TensorList grads;    // fp32, fp16 or bf16
};

/// The slice of tensor number `index`. TypeError or ValueError, beginning with the name of the operation
/// `op`, if a tensor does not fit.
[[nodiscard]] cpu::StepSlice step_slice(const char* op, const StepTensors& tensors, std::size_t index);

/// Checks a tensor of the optimizer's state, number `index` of `list`, against its weight; any dtype.
void check_state(const char* op, const at::Tensor& tensor, const char* list, std::size_t index,
                 const StepTensors& tensors);

/// TypeError unless `allowed`.
void check_dtype(const char* op, const at::Tensor& tensor, const char* list, std::size_t index, bool allowed,
                 const char* expected);

/// Whether `next` is where n elements after `begin` end.
[[nodiscard]] bool follows(const void* begin, std::int64_t n, DType dtype, const void* next);

/// Whether `next` begins where `slice` ends, in the arrays that all steps have.
[[nodiscard]] bool continues(const cpu::StepSlice& slice, const cpu::StepSlice& next);

/// What holds for the parameter groups of a step: the first sizes[0] tensors have options[0], and so on.
template <typename Options>
struct Groups {
  std::vector<std::int64_t> sizes;
  std::vector<Options> options;
};

/// ValueError unless groups of these sizes are all of the tensors.
void check_groups(const char* op, at::IntArrayRef sizes, std::size_t num_groups, std::size_t num_tensors);

/// What gradients are multiplied by, or divided where a reciprocal would not be exact.
struct GradientFactor {
  float factor = 1;
  bool divide = false;
};
[[nodiscard]] GradientFactor gradient_factor(double scale, bool maximize);

/// Multiplies elements [offset, offset + n) of a gradient, with the bits of clipping: in fp32 and rounded
/// once.
void scale_gradient(void* grad, DType dtype, double factor, std::int64_t offset, std::int64_t n);

}  // namespace bmtrain
