// Operators over CPU tensors: checks, then the kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/check.h"
#include "common/scale.h"
#include "common/tensor_dtype.h"
#include "cpu/kernels.h"
#include "ops/ops.h"
#include "optim/adam.h"
#include "optim/momentum.h"

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

}  // namespace

void cast(at::Tensor out, const at::Tensor& source) {
  check_memory(out, "cast_: out");
  check_memory(source, "cast_: source");
  BMT_CHECK(ValueError, out.numel() == source.numel(), "cast_: expected source with ", out.numel(),
            " elements like out, got ", source.numel());
  const DType out_dtype = narrow_dtype_of(out, "cast_: out");
  const DType source_dtype = narrow_dtype_of(source, "cast_: source");
  cpu::cast(out.mutable_data_ptr(), out_dtype, source.const_data_ptr(), source_dtype, out.numel());
}

void ordered_sum(at::Tensor out, at::TensorList sources, bool accumulate, double factor) {
  check_memory(out, "ordered_sum_: out");
  std::vector<const void*> pointers;
  for (const at::Tensor& source : sources) {
    check_memory(source, "ordered_sum_: sources");
    BMT_CHECK(ValueError, source.numel() == out.numel(), "ordered_sum_: expected sources with ", out.numel(),
              " elements like out, got ", source.numel());
    BMT_CHECK(TypeError, source.scalar_type() == out.scalar_type(), "ordered_sum_: expected sources of ",
              out.scalar_type(), " like out, got ", source.scalar_type());
    pointers.push_back(source.const_data_ptr());
  }
  const DType dtype = dtype_of(out.scalar_type(), "ordered_sum_: out");
  cpu::ordered_sum(out.mutable_data_ptr(), pointers.data(), static_cast<int>(pointers.size()), out.numel(),
                   dtype, dtype, accumulate, factor);
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

at::Tensor has_inf_nan(at::TensorList tensors) {
  const bool found = std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    const DType dtype = narrow_dtype_of(tensor, "has_inf_nan: tensors");
    const at::Tensor memory = dense(tensor);
    return cpu::has_inf_nan(memory.const_data_ptr(), memory.numel(), dtype);
  });
  return scalar(found, at::kBool);
}

std::tuple<double, double> adam(at::TensorList weights, at::TensorList rounded, at::TensorList grads,
                                at::TensorList exp_avgs, at::TensorList exp_avg_sqs, at::IntArrayRef steps,
                                at::IntArrayRef sizes, Numbers lr, Numbers beta1, Numbers beta2, Numbers eps,
                                Numbers weight_decay, Numbers scale, at::IntArrayRef decoupled,
                                at::IntArrayRef maximize, at::IntArrayRef folded, at::IntArrayRef hold_steps,
                                bool as_torch, bool with_delta) {
  AdamGroups groups = groups_of(
      AdamLists{sizes, lr, beta1, beta2, eps, weight_decay, scale, decoupled, maximize, folded, hold_steps});
  for (AdamOptions& options : groups.options) options.as_torch = as_torch;
  const cpu::DeltaSums sums =
      adam_step({{weights, rounded, grads}, exp_avgs, exp_avg_sqs, steps}, groups, with_delta);
  return {sums.sum, sums.sum_of_squares};
}

void sgd(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList momenta,
         at::IntArrayRef fresh, at::IntArrayRef sizes, Numbers lr, Numbers momentum, Numbers dampening,
         Numbers weight_decay, Numbers scale, at::IntArrayRef nesterov, at::IntArrayRef maximize) {
  const SgdGroups groups =
      groups_of(SgdLists{sizes, lr, momentum, dampening, weight_decay, scale, nesterov, maximize});
  sgd_step({{weights, rounded, grads}, momenta, fresh}, groups);
}

void lion(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList momenta,
          at::IntArrayRef sizes, Numbers lr, Numbers beta1, Numbers beta2, Numbers weight_decay,
          Numbers scale, at::IntArrayRef maximize) {
  const LionGroups groups = groups_of(LionLists{sizes, lr, beta1, beta2, weight_decay, scale, maximize});
  lion_step({{weights, rounded, grads}, momenta, {}}, groups);
}

void adam_move(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList exp_avgs,
               at::TensorList exp_avg_sqs) {
  const std::vector<std::int64_t> steps(weights.size(), 1);
  const std::vector<cpu::AdamSlice> slices =
      adam_slices({{weights, rounded, grads}, exp_avgs, exp_avg_sqs, steps},
                  {{static_cast<std::int64_t>(weights.size())}, {AdamOptions{}}});
  for (const cpu::AdamSlice& slice : slices) {
    BMT_CHECK(TypeError,
              slice.rounded != nullptr && size_of(slice.grad_dtype) == 2 && slice.bf16_exp_avg == nullptr,
              "adam_move_: expected 16-bit grads and rounded weights, and moments in float32 or 8 bits");
  }
  cpu::adam_move(slices.data(), static_cast<std::int64_t>(slices.size()));
}

}  // namespace bmtrain::ops
