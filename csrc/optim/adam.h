// The Adam step over tensors: from hyper-parameters and lists of tensors to slices of memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "optim/step_check.h"
#include "optim/step_tensors.h"

namespace bmtrain {

/// The hyper-parameters of a parameter group, as the user gave them.
struct AdamOptions {
  static constexpr const char* kOperator = "adam";

  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  double scale = 1;        // gradients are divided by it
  bool decoupled = false;  // weight decay of AdamW, else L2
  bool maximize = false;
  bool folded = false;          // see [Note: Adam in torch's operation order]
  std::int64_t hold_steps = 0;  // updates of a parameter that move its moments only
  bool as_torch = false;        // torch.sqrt's bits, see [Note: torch's square root]

  /// Calls visit(name, member) for each option of a group.
  template <typename Visit>
  static void each_option(const Visit& visit) {
    visit("lr", &AdamOptions::lr);
    visit("beta1", &AdamOptions::beta1);
    visit("beta2", &AdamOptions::beta2);
    visit("eps", &AdamOptions::eps);
    visit("weight_decay", &AdamOptions::weight_decay);
    visit("scale", &AdamOptions::scale);
    visit("decoupled", &AdamOptions::decoupled);
    visit("maximize", &AdamOptions::maximize);
    visit("folded", &AdamOptions::folded);
    visit("hold_steps", &AdamOptions::hold_steps);
  }
};

using AdamGroups = Groups<AdamOptions>;

/// The numbers of update number `step` (1 for the first).
[[nodiscard]] cpu::AdamFactors adam_factors(const AdamOptions& options, std::int64_t step);

/// What one call updates, as parallel lists of contiguous tensors of one device.
struct AdamTensors {
  StepTensors step;
  at::TensorList exp_avgs;     // fp32, bf16, or bytes: codes and exponents, see cpu::CodedArray
  at::TensorList exp_avg_sqs;  // of the same dtype
  at::IntArrayRef steps;       // the number of each tensor's update, 1 for the first
};

/// What one step updates. Tensors of a group that follow each other in memory, in every list, and have the
/// same number of steps are one slice. TypeError or ValueError if the tensors or the numbers do not fit.
[[nodiscard]] std::vector<cpu::AdamSlice> slices_of(const AdamTensors& tensors, const AdamGroups& groups);

/// One step on the CPU, with `check` a checked one. Errors as of the slices, before anything is written.
cpu::DeltaSums step_on_cpu(const AdamTensors& tensors, const AdamGroups& groups, bool with_delta,
                           StepCheck* check = nullptr);

}  // namespace bmtrain
