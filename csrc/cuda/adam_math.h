// One element of one Adam step; compiled for the device and for the host. See [Note: Adam in torch's
// operation order] in cpu/kernels.h: the same operations, each rounded as there, so that GPU and CPU steps
// have the same bits. With `as_multi_tensor` they have the bits of torch's multi-tensor Adam on GPUs, which
// rounds two of its products elsewhere: in addcmul the square, in addcdiv the quotient.
#pragma once

#include <cmath>

#include "cpu/kernels.h"
#include "cuda/element.h"

namespace bmtrain::cuda {

struct AdamElement {
  float weight, exp_avg, exp_avg_sq;
};

/// `g`: the gradient, not yet multiplied or divided by `factors.grad_factor`.
BMT_HOST_DEVICE AdamElement adam_element(const cpu::AdamFactors& f, float g, AdamElement old) {
  g = f.grad_divide ? g / f.grad_factor : g * f.grad_factor;
  if (f.decay_kind == cpu::WeightDecay::kL2) g = fmaf(old.weight, f.decay, g);
  const float m = fmaf(f.lerp_weight, g - old.exp_avg, f.lerp_from_grad ? g : old.exp_avg);
  const float kept = f.beta2 * old.exp_avg_sq;
  const float v =
      f.as_multi_tensor ? fmaf(f.one_minus_beta2, g * g, kept) : fmaf(f.one_minus_beta2 * g, g, kept);
  const float d = sqrtf(v) / f.bias_correction2_sqrt.value + f.eps;
  const float w = f.decay_kind == cpu::WeightDecay::kDecoupled ? old.weight * f.decay : old.weight;
  return {f.as_multi_tensor ? fmaf(f.negative_step_size, m / d, w) : w + (f.negative_step_size * m) / d, m,
          v};
}

}  // namespace bmtrain::cuda
