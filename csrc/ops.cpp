// Every operator of torch.ops.bmtrain. Python calls them through bmtrain/_ops.py, which also says what they
// do to fake tensors; C++ calls cpu/kernels.h and optim/adam.h.
#include "ops.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <utility>

#include "common/check.h"

namespace {

// An implementation whose errors torch knows: through an operator, only torch's own classes keep their type.
template <auto kFunction>
struct Typed;

template <typename Result, typename... Arguments, Result (*kFunction)(Arguments...)>
struct Typed<kFunction> {
  static Result call(Arguments... arguments) {
    try {
      return kFunction(std::forward<Arguments>(arguments)...);
    } catch (const bmtrain::TypeError& error) {
      C10_THROW_ERROR(TypeError, error.what());
    } catch (const bmtrain::ValueError& error) {
      C10_THROW_ERROR(ValueError, error.what());
    }
  }
};

}  // namespace

TORCH_LIBRARY(bmtrain, m) {
  m.def("cast_(Tensor(a!) out, Tensor source) -> ()");
  m.def("ordered_sum_(Tensor(a!) out, Tensor[] sources, bool accumulate=False, float factor=1.0) -> ()");
  m.def("squared_sum(Tensor[] tensors) -> Tensor");
  m.def("abs_max(Tensor[] tensors) -> Tensor");
  m.def("abs_power_sum(Tensor[] tensors, float p) -> Tensor");
  m.def("has_inf_nan(Tensor[] tensors) -> Tensor");
  m.def(
      "adam_(Tensor(a!)[] weights, Tensor(b!)[] rounded, Tensor[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs, int[] steps, *, float lr, float beta1, float beta2, float eps, "
      "float weight_decay, float scale, bool decoupled, bool maximize, int hold_steps, bool torch_sqrt, "
      "bool with_delta) -> (float, float)");
  m.def(
      "adam_move_(Tensor(a!)[] weights, Tensor(b!)[] rounded, Tensor[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs) -> ()");
}

TORCH_LIBRARY_IMPL(bmtrain, CPU, m) {
  using namespace bmtrain::ops;  // NOLINT(google-build-using-namespace)
  m.impl("cast_", &Typed<cast>::call);
  m.impl("ordered_sum_", &Typed<ordered_sum>::call);
  m.impl("squared_sum", &Typed<squared_sum>::call);
  m.impl("abs_max", &Typed<abs_max>::call);
  m.impl("abs_power_sum", &Typed<abs_power_sum>::call);
  m.impl("has_inf_nan", &Typed<has_inf_nan>::call);
  m.impl("adam_", &Typed<adam>::call);
  m.impl("adam_move_", &Typed<adam_move>::call);
}
