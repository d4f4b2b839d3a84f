// The CPU implementations of the operators in ops.cpp. What each one computes is said in bmtrain/_ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "common/dtype.h"

namespace bmtrain::ops {

/// One for each parameter group.
using Numbers = at::ArrayRef<double>;

/// The core's name of a tensor's dtype. TypeError, naming `what`, for anything but fp32, fp16 and bf16.
[[nodiscard]] DType narrow_dtype_of(const at::Tensor& tensor, const char* what);

void cast(at::Tensor out, const at::Tensor& source);
void ordered_sum(at::Tensor out, at::TensorList sources, bool accumulate, double factor);
void scale(at::TensorList tensors, const at::Tensor& factor);
[[nodiscard]] at::Tensor squared_sum(at::TensorList tensors);
[[nodiscard]] at::Tensor abs_max(at::TensorList tensors);
[[nodiscard]] at::Tensor abs_power_sum(at::TensorList tensors, double p);
[[nodiscard]] at::Tensor has_inf_nan(at::TensorList tensors);
std::tuple<double, double> adam(at::TensorList weights, at::TensorList rounded, at::TensorList grads,
                                at::TensorList exp_avgs, at::TensorList exp_avg_sqs, at::IntArrayRef steps,
                                at::IntArrayRef sizes, Numbers lr, Numbers beta1, Numbers beta2, Numbers eps,
                                Numbers weight_decay, Numbers scale, at::IntArrayRef decoupled,
                                at::IntArrayRef maximize, at::IntArrayRef folded, at::IntArrayRef hold_steps,
                                bool as_torch, bool with_delta);
void sgd(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList momenta,
         at::IntArrayRef fresh, at::IntArrayRef sizes, Numbers lr, Numbers momentum, Numbers dampening,
         Numbers weight_decay, Numbers scale, at::IntArrayRef nesterov, at::IntArrayRef maximize);
void lion(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList momenta,
          at::IntArrayRef sizes, Numbers lr, Numbers beta1, Numbers beta2, Numbers weight_decay,
          Numbers scale, at::IntArrayRef maximize);
void adam_move(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList exp_avgs,
               at::TensorList exp_avg_sqs);

}  // namespace bmtrain::ops
