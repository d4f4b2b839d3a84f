// One element of one Adam step; compiled for the device and for the host. See [Note: Adam in torch's
// operation order] in cpu/kernels.h: the same operations, each rounded as there, so that GPU and CPU steps
// have the same bits.
#pragma once

#include <cmath>

#include "cpu/kernels.h"
#include "cuda/element.h"

namespace bmtrain::cuda {

struct AdamElement {
  float weight, exp_avg, exp_avg_sq;
};

/// `g`: the gradient, unscaled and clipped but for `factors.grad_factor`.
BMT_HOST_DEVICE AdamElement adam_element(const cpu::AdamFactors& f, float g, AdamElement old) {
  g = f.grad_divide ? g / f.grad_factor : g * f.grad_factor;
  if (f.decay_kind == cpu::WeightDecay::kL2) g = fmaf(old.weight, f.decay, g);
  const float m = fmaf(f.lerp_weight, g - old.exp_avg, f.lerp_from_grad ? g : old.exp_avg);
  const float v = fmaf(f.one_minus_beta2 * g, g, f.beta2 * old.exp_avg_sq);
  const float d = sqrtf(v) / f.bias_correction2_sqrt.value + f.eps;
  const float w = f.decay_kind == cpu::WeightDecay::kDecoupled ? old.weight * f.decay : old.weight;
  return {w + (f.negative_step_size * m) / d, m, v};
}

}  // namespace bmtrain::cuda
