// The numbers of an optimizer's step as tests pass them: arrays of floats.
#pragma once

#include "cpu/kernels.h"

namespace bmtrain {

// grad_factor, grad_divide, lerp_from_grad, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps,
// negative_step_size, decay_kind, decay, step.
inline cpu::AdamFactors adam_factors(const float* factors) {
  cpu::AdamFactors f;
  f.grad_factor = factors[0];
  f.grad_divide = factors[1] != 0;
  f.lerp_from_grad = factors[2] != 0;
  f.lerp_weight = factors[3];
  f.beta2 = factors[4];
  f.one_minus_beta2 = factors[5];
  f.bias_correction2_sqrt.value = factors[6];
  f.eps = factors[7];
  f.negative_step_size = factors[8];
  f.decay_kind = static_cast<cpu::WeightDecay>(static_cast<int>(factors[9]));
  f.decay = factors[10];
  f.dither_seed = static_cast<std::uint32_t>(factors[11]) * 0x9e3779b1u;
  return f;
}

// lion, grad_factor, grad_divide, starts, nesterov, keep, take, ahead_keep, ahead_take, negative_lr,
// decay_kind, decay.
inline cpu::MomentumFactors momentum_factors(const float* factors) {
  cpu::MomentumFactors f;
  f.rule = factors[0] != 0 ? cpu::MomentumRule::kLion : cpu::MomentumRule::kSgd;
  f.grad_factor = factors[1];
  f.grad_divide = factors[2] != 0;
  f.starts = factors[3] != 0;
  f.nesterov = factors[4] != 0;
  f.keep = factors[5];
  f.take = factors[6];
  f.ahead_keep = factors[7];
  f.ahead_take = factors[8];
  f.negative_lr = factors[9];
  f.decay_kind = static_cast<cpu::WeightDecay>(static_cast<int>(factors[10]));
  f.decay = factors[11];
  return f;
}

}  // namespace bmtrain
