// SGD and Lion steps over tensors: from hyper-parameters and lists of tensors to slices of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "optim/step_check.h"
#include "optim/step_tensors.h"

namespace bmtrain {

/// The hyper-parameters of a parameter group, as torch.optim.SGD names them.
struct SgdOptions {
  static constexpr const char* kOperator = "sgd";

  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;  // added to the gradient (L2)
  double scale = 1;         // gradients are divided by it
  bool nesterov = false;
  bool maximize = false;

  /// Calls visit(name, member) for each option of a group.
  template <typename Visit>
  static void each_option(const Visit& visit) {
    visit("lr", &SgdOptions::lr);
    visit("momentum", &SgdOptions::momentum);
    visit("dampening", &SgdOptions::dampening);
    visit("weight_decay", &SgdOptions::weight_decay);
    visit("scale", &SgdOptions::scale);
    visit("nesterov", &SgdOptions::nesterov);
    visit("maximize", &SgdOptions::maximize);
  }
};

/// As the authors of Lion name them.
struct LionOptions {
  static constexpr const char* kOperator = "lion";

  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;  // decoupled
  double scale = 1;
  bool maximize = false;

  /// As of SgdOptions.
  template <typename Visit>
  static void each_option(const Visit& visit) {
    visit("lr", &LionOptions::lr);
    visit("beta1", &LionOptions::beta1);
    visit("beta2", &LionOptions::beta2);
    visit("weight_decay", &LionOptions::weight_decay);
    visit("scale", &LionOptions::scale);
    visit("maximize", &LionOptions::maximize);
  }
};

using SgdGroups = Groups<SgdOptions>;
using LionGroups = Groups<LionOptions>;

/// What one call updates, as lists of contiguous tensors of one device.
struct MomentumTensors {
  StepTensors step;
  at::TensorList momenta;  // fp32; empty for SGD without momentum
  at::IntArrayRef fresh;   // for SGD: not 0 where the momentum begins with this step; empty: nowhere
};

/// Tensors of a group that follow each other in memory, in every list, are one slice. TypeError or ValueError
/// if the tensors or the numbers do not fit.
template <typename Options>
[[nodiscard]] std::vector<cpu::MomentumSlice> slices_of(const MomentumTensors& tensors,
                                                        const Groups<Options>& groups);

/// One step on the CPU, with `check` a checked one. Errors as of the slices, before anything is written.
template <typename Options>
void step_on_cpu(const MomentumTensors& tensors, const Groups<Options>& groups, StepCheck* check = nullptr);

}  // namespace bmtrain
