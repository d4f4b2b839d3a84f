// Every operator of torch.ops.bmtrain. Python calls them through bmtrain/_ops, which also says what they
// do to fake tensors; C++ calls cpu/kernels.h and optim/adam.h.
#include "ops/ops.h"

#include <torch/library.h>

#include "common/typed.h"

TORCH_LIBRARY(bmtrain, m) {
  m.def("cast_(Tensor(a!) out, Tensor source) -> ()");
  m.def("ordered_sum_(Tensor(a!) out, Tensor[] sources, bool accumulate=False, float factor=1.0) -> ()");
  m.def("scale_(Tensor(a!)[] tensors, Tensor factor) -> ()");
  m.def("squared_sum(Tensor[] tensors) -> Tensor");
  m.def("abs_max(Tensor[] tensors) -> Tensor");
  m.def("abs_power_sum(Tensor[] tensors, float p) -> Tensor");
  m.def("has_inf_nan(Tensor[] tensors) -> Tensor");
  m.def(
      "adam_(Tensor(a!)[] weights, Tensor(b!)[] rounded, Tensor[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs, int[] steps, *, int[] sizes, float[] lr, float[] beta1, float[] beta2, "
      "float[] eps, float[] weight_decay, float[] scale, int[] decoupled, int[] maximize, int[] folded, "
      "int[] hold_steps, bool as_torch=False, bool with_delta=False) -> (float, float)");
  m.def(
      "sgd_(Tensor(a!)[] weights, Tensor(b!)[] rounded, Tensor[] grads, Tensor(c!)[] momenta, int[] fresh, "
      "*, int[] sizes, float[] lr, float[] momentum, float[] dampening, float[] weight_decay, float[] scale, "
      "int[] nesterov, int[] maximize) -> ()");
  m.def(
      "lion_(Tensor(a!)[] weights, Tensor(b!)[] rounded, Tensor[] grads, Tensor(c!)[] momenta, *, "
      "int[] sizes, float[] lr, float[] beta1, float[] beta2, float[] weight_decay, float[] scale, "
      "int[] maximize) -> ()");
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
  m.impl("cast_", &Typed<cast>::call);
  m.impl("ordered_sum_", &Typed<ordered_sum>::call);
  m.impl("scale_", &Typed<scale>::call);
  m.impl("squared_sum", &Typed<squared_sum>::call);
  m.impl("abs_max", &Typed<abs_max>::call);
  m.impl("abs_power_sum", &Typed<abs_power_sum>::call);
  m.impl("has_inf_nan", &Typed<has_inf_nan>::call);
  m.impl("adam_", &Typed<adam>::call);
  m.impl("sgd_", &Typed<sgd>::call);
  m.impl("lion_", &Typed<lion>::call);
  m.impl("adam_move_", &Typed<adam_move>::call);
}
