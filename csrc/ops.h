// The CPU implementations of the operators in ops.cpp. What each one computes is said in bmtrain/_ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace bmtrain::ops {

void cast(at::Tensor out, const at::Tensor& source);
void ordered_sum(at::Tensor out, at::TensorList sources, bool accumulate, double factor);
void scale(at::TensorList tensors, const at::Tensor& factor);
[[nodiscard]] at::Tensor squared_sum(at::TensorList tensors);
[[nodiscard]] at::Tensor abs_max(at::TensorList tensors);
[[nodiscard]] at::Tensor abs_power_sum(at::TensorList tensors, double p);
[[nodiscard]] at::Tensor has_inf_nan(at::TensorList tensors);
std::tuple<double, double> adam(at::TensorList weights, at::TensorList rounded, at::TensorList grads,
                                at::TensorList exp_avgs, at::TensorList exp_avg_sqs, at::IntArrayRef steps,
                                double lr, double beta1, double beta2, double eps, double weight_decay,
                                double scale, bool decoupled, bool maximize, std::int64_t hold_steps,
                                bool torch_sqrt, bool with_delta);
void sgd(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList momenta,
         at::IntArrayRef fresh, double lr, double momentum, double dampening, double weight_decay,
         double scale, bool nesterov, bool maximize);
void lion(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList momenta,
          double lr, double beta1, double beta2, double weight_decay, double scale, bool maximize);
void adam_move(at::TensorList weights, at::TensorList rounded, at::TensorList grads, at::TensorList exp_avgs,
               at::TensorList exp_avg_sqs);

}  // namespace bmtrain::ops
