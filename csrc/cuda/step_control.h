// What holds for all ranges of an optimizer's step.
#pragma once

namespace bmtrain::cuda {

/// Read on the device, so that the host does not wait for it.
struct StepControl {
  const float* grad_scale = nullptr;  // the gradients are multiplied by it as well (clipping); nullptr: 1
  const float* found_inf =
      nullptr;             // not 0: nothing is updated, but gradients are zeroed if asked; nullptr: 0
  bool zero_grad = false;  // the gradients are left zero
};

}  // namespace bmtrain::cuda
