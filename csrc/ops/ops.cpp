// Every operator of torch.ops.bmtrain, and the implementations for CPU tensors: checks, then the kernels.
// What each one computes is said in bmtrain/_ops, through which Python calls them, and which also says what
// they do to fake tensors; C++ calls cpu/kernels.h and optim/adam.h.
#include "ops/ops.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "common/check.h"
#include "common/tensor_dtype.h"
#include "common/typed.h"
#include "cpu/kernels.h"
#include "optim/adam.h"

namespace bmtrain::ops {

DType narrow_dtype_of(const at::Tensor& tensor, const char* what) {
  const DType dtype = dtype_of(tensor.scalar_type(), what);
  BMT_CHECK(TypeError, dtype != DType::kFloat64, what,
            ": expected float32, float16 or bfloat16, got float64");
  return dtype;
}

namespace {

void check_memory(const at::Tensor& tensor, const char* what) {
  BMT_CHECK(TypeError, tensor.device().is_cpu(), what, ": expected a CPU tensor, got ", tensor.device());
  BMT_CHECK(TypeError, tensor.is_contiguous(), what, ": expected a contiguous tensor, got strides ",
            tensor.strides(), " for shape ", tensor.sizes());
}

// Elements that lie densely in memory, in whatever order: what a sum does not care about.
at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

// Multiplies a floating-point tensor in place with one rounding, as the kernel for GPUs does: in fp32 for
// 16-bit values, by a factor that is not rounded to 16 bits.
void scale_exactly(const at::Tensor& tensor, double factor) {
  // The factor has to be the second operand and a "wrapped number": mul_(Scalar) makes it the first, and
  // rounds it.
  const at::Tensor number = at::scalar_tensor(factor, at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  tensor.mul_(number);
}

template <typename Number>
at::Tensor scalar(Number value, at::ScalarType dtype) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(dtype));
}

// Sums over all tensors, in their order.
template <typename Kernel>
at::Tensor sum_over(at::TensorList tensors, const char* what, const Kernel& kernel) {
  double total = 0;
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = narrow_dtype_of(tensor, what);
    const at::Tensor memory = dense(tensor);
    total += kernel(memory.const_data_ptr(), memory.numel(), dtype);
  }
  return scalar(total, at::kDouble);
}

void ordered_sum(at::Tensor out, at::TensorList sources, bool accumulate, double factor) {
  check_memory(out, "ordered_sum_: out");
  const at::Tensor& first = sources.empty() ? out : sources[0];
  std::vector<const void*> pointers;
  for (const at::Tensor& source : sources) {
    check_memory(source, "ordered_sum_: sources");
    BMT_CHECK(ValueError, source.numel() == out.numel(), "ordered_sum_: expected sources with ", out.numel(),
              " elements like out, got ", source.numel());
    BMT_CHECK(TypeError, source.scalar_type() == first.scalar_type(), "ordered_sum_: expected sources of ",
              first.scalar_type(), " like the first, got ", source.scalar_type());
    pointers.push_back(source.const_data_ptr());
  }
  const DType dtype = dtype_of(out.scalar_type(), "ordered_sum_: out");
  const DType from = dtype_of(first.scalar_type(), "ordered_sum_: sources");
  BMT_CHECK(TypeError, (dtype == DType::kFloat64) == (from == DType::kFloat64),
            "ordered_sum_: expected sources and out all of float64, or none, got ", first.scalar_type(),
            " and ", out.scalar_type());
  cpu::ordered_sum(out.mutable_data_ptr(), pointers.data(), static_cast<int>(pointers.size()), out.numel(),
                   dtype, from, accumulate, factor);
}

void scale(at::TensorList tensors, const at::Tensor& factor) {
  BMT_CHECK(ValueError, factor.numel() == 1, "scale_: factor: expected one number, got ", factor.numel());
  const double value = factor.item<double>();
  if (value == 1) {
    return;
  }
  for (const at::Tensor& tensor : tensors) {
    BMT_CHECK(TypeError, tensor.is_floating_point(), "scale_: tensors: expected floats, got ",
              tensor.scalar_type());
  }
  for (const at::Tensor& tensor : tensors) {
    scale_exactly(tensor, value);
  }
}

at::Tensor squared_sum(at::TensorList tensors) {
  return sum_over(tensors, "squared_sum: tensors", cpu::squared_sum);
}

at::Tensor abs_power_sum(at::TensorList tensors, double p) {
  BMT_CHECK(ValueError, p > 0 && std::isfinite(p), "abs_power_sum: p: expected a finite number above 0, got ",
            p);
  return sum_over(tensors, "abs_power_sum: tensors", [p](const void* x, std::int64_t n, DType dtype) {
    return cpu::abs_power_sum(x, n, dtype, p);
  });
}

at::Tensor abs_max(at::TensorList tensors) {
  float largest = 0;
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = narrow_dtype_of(tensor, "abs_max: tensors");
    const at::Tensor memory = dense(tensor);
    const float mine = cpu::abs_max(memory.const_data_ptr(), memory.numel(), dtype);
    if (std::isnan(mine) || mine > largest) largest = mine;
    if (std::isnan(largest)) break;
  }
  return scalar(largest, at::kFloat);
}

void adam_move(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList exp_avgs,
               at::TensorList exp_avg_sqs) {
  const std::vector<std::int64_t> steps(weights.size(), 1);
  const std::vector<cpu::AdamSlice> slices =
      slices_of({{weights, rounded, grads}, exp_avgs, exp_avg_sqs, steps},
                {{static_cast<std::int64_t>(weights.size())}, {AdamOptions{}}});
  for (const cpu::AdamSlice& slice : slices) {
    BMT_CHECK(TypeError,
              slice.rounded != nullptr && size_of(slice.grad_dtype) == 2 && slice.bf16_exp_avg == nullptr,
              "adam_move_: expected 16-bit grads and rounded weights, and moments in float32 or 8 bits");
  }
  cpu::adam_move(slices.data(), static_cast<std::int64_t>(slices.size()));
}

}  // namespace
}  // namespace bmtrain::ops

TORCH_LIBRARY(bmtrain, m) {
  m.def("ordered_sum_(Tensor(a!) out, Tensor[] sources, bool accumulate=False, float factor=1.0) -> ()");
  m.def("scale_(Tensor(a!)[] tensors, Tensor factor) -> ()");
  m.def("squared_sum(Tensor[] tensors) -> Tensor");
  m.def("abs_max(Tensor[] tensors) -> Tensor");
  m.def("abs_power_sum(Tensor[] tensors, float p) -> Tensor");
  m.def(
      "adam_move_(Tensor(a!)[] weights, Tensor(b!)[] rounded, Tensor[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs) -> ()");
  // For devices whose kernels make one pass of it; on the CPU torch's operations do.
  m.def(
      "cross_entropy_sums(Tensor logits, Tensor target, Tensor? weight, *, bool smooth, bool divided) "
      "-> (Tensor maximum, Tensor exp_sum, Tensor target_logit, Tensor smooth)");
  m.def(
      "cross_entropy_gradient_(Tensor(a!) out, Tensor logits, Tensor target, Tensor? weight, Tensor maximum, "
      "Tensor log_sum, Tensor scale, Tensor hit, Tensor spread, Tensor ignored) -> ()");
}

TORCH_LIBRARY_IMPL(bmtrain, CPU, m) {
  using bmtrain::Typed;
  using namespace bmtrain::ops;  // NOLINT(google-build-using-namespace)
  m.impl("ordered_sum_", &Typed<ordered_sum>::call);
  m.impl("scale_", &Typed<scale>::call);
  m.impl("squared_sum", &Typed<squared_sum>::call);
  m.impl("abs_max", &Typed<abs_max>::call);
  m.impl("abs_power_sum", &Typed<abs_power_sum>::call);
  m.impl("adam_move_", &Typed<adam_move>::call);
}
