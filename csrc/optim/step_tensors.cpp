#include "optim/step_tensors.h"

#include <cmath>
#include <cstdlib>

#include "common/check.h"
#include "common/tensor_dtype.h"
#include "cpu/isa.h"

namespace bmtrain {
namespace {

bool is_16_bit(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

}  // namespace

void check_state(const char* op, const at::Tensor& tensor, const char* list, std::size_t index,
                 const StepTensors& tensors) {
  const c10::Device device = tensors.weights[0].device();
  const std::int64_t numel = tensors.weights[index].numel();
  BMT_CHECK(TypeError, tensor.device() == device, op, ": ", list, "[", index, "]: expected a tensor on ",
            device, ", got one on ", tensor.device());
  BMT_CHECK(TypeError, tensor.is_contiguous(), op, ": ", list, "[", index,
            "]: expected a contiguous tensor, got strides ", tensor.strides(), " for shape ", tensor.sizes());
  BMT_CHECK(ValueError, tensor.numel() == numel, op, ": ", list, "[", index, "]: expected ", numel,
            " elements like weights, got ", tensor.numel());
}

void check_dtype(const char* op, const at::Tensor& tensor, const char* list, std::size_t index, bool allowed,
                 const char* expected) {
  BMT_CHECK(TypeError, allowed, op, ": ", list, "[", index, "]: expected ", expected, ", got ",
            tensor.scalar_type());
}

cpu::StepSlice step_slice(const char* op, const StepTensors& tensors, std::size_t index) {
  const at::Tensor& weight = tensors.weights[index];
  const at::Tensor& grad = tensors.grads[index];
  check_state(op, weight, "weights", index, tensors);
  check_state(op, grad, "grads", index, tensors);
  check_dtype(op, weight, "weights", index, weight.scalar_type() == at::kFloat, "float32");
  check_dtype(op, grad, "grads", index, grad.scalar_type() == at::kFloat || is_16_bit(grad),
              "float32, float16 or bfloat16");
  cpu::StepSlice slice;
  slice.weight = weight.mutable_data_ptr<float>();
  slice.grad = grad.const_data_ptr();
  slice.grad_dtype = dtype_of(grad.scalar_type(), "grads");
  slice.n = weight.numel();
  if (!tensors.rounded.empty()) {
    const at::Tensor& rounded = tensors.rounded[index];
    check_state(op, rounded, "rounded", index, tensors);
    check_dtype(op, rounded, "rounded", index, is_16_bit(rounded), "float16 or bfloat16");
    slice.rounded = rounded.mutable_data_ptr();
    slice.rounded_dtype = dtype_of(rounded.scalar_type(), "rounded");
  }
  return slice;
}

bool follows(const void* begin, std::int64_t n, DType dtype, const void* next) {
  return static_cast<const char*>(begin) + n * size_of(dtype) == next;
}

bool continues(const cpu::StepSlice& slice, const cpu::StepSlice& next) {
  const std::int64_t n = slice.n;
  const bool both = (slice.rounded == nullptr) == (next.rounded == nullptr);
  return both && slice.grad_dtype == next.grad_dtype &&
         follows(slice.weight, n, DType::kFloat32, next.weight) &&
         follows(slice.grad, n, slice.grad_dtype, next.grad) &&
         (slice.rounded == nullptr || (slice.rounded_dtype == next.rounded_dtype &&
                                       follows(slice.rounded, n, slice.rounded_dtype, next.rounded)));
}

void check_groups(const char* op, at::IntArrayRef sizes, std::size_t num_groups, std::size_t num_tensors) {
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) {
    BMT_CHECK(ValueError, size >= 0 && size <= static_cast<std::int64_t>(num_tensors), op,
              ": sizes: expected numbers from 0 to ", num_tensors, ", got ", size);
    total += size;
  }
  BMT_CHECK(ValueError, sizes.size() == num_groups && total == static_cast<std::int64_t>(num_tensors), op,
            ": sizes: expected ", num_groups, " that add up to ", num_tensors, " tensors, got ", sizes);
}

GradientFactor gradient_factor(double scale, bool maximize) {
  const auto divisor = static_cast<float>(maximize ? -scale : scale);
  int exponent = 0;
  const bool power_of_two = std::fabs(std::frexp(divisor, &exponent)) == 0.5f && std::abs(exponent) < 120;
  return {.factor = power_of_two ? 1 / divisor : divisor, .divide = !power_of_two};
}

void scale_gradient(void* grad, DType dtype, double factor, std::int64_t offset, std::int64_t n) {
  if (factor == 1) return;
  const void* const source = grad;
  cpu::kernel_table().ordered_sum(grad, &source, 1, offset, n, dtype, dtype, /*accumulate=*/false, factor);
}

}  // namespace bmtrain
