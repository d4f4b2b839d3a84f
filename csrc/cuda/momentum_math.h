// One element of an SGD or Lion step; compiled for the device and for the host. See [Note: SGD in torch's
// operation order] in cpu/kernels.h: the same operations, each rounded as there, so that GPU and CPU steps
// have the same bits.
#pragma once

#include <cmath>

#include "cpu/kernels.h"
#include "cuda/element.h"

namespace bmtrain::cuda {

struct MomentumElement {
  float weight, momentum;
};

/// 1 or -1; 0 for zeros and NaN.
BMT_HOST_DEVICE float sign_of(float x) { return static_cast<float>((x > 0) - (x < 0)); }

/// `g`: the gradient, not yet multiplied or divided by `factors.grad_factor`.
BMT_HOST_DEVICE MomentumElement momentum_element(const cpu::MomentumFactors& f, bool has_momentum, float g,
                                                 MomentumElement old) {
  g = f.grad_divide ? g / f.grad_factor : g * f.grad_factor;
  if (f.decay_kind == cpu::WeightDecay::kL2) g = fmaf(old.weight, f.decay, g);
  const float w = f.decay_kind == cpu::WeightDecay::kDecoupled ? old.weight * f.decay : old.weight;
  float direction = g;
  float b = old.momentum;
  if (f.rule == cpu::MomentumRule::kLion) {
    direction = sign_of(fmaf(f.ahead_take, g, f.ahead_keep * b));
    b = fmaf(f.take, g, f.keep * b);
  } else if (has_momentum) {
    b = f.starts ? g : fmaf(f.take, g, f.keep * b);
    direction = f.nesterov ? fmaf(f.keep, b, g) : b;
  }
  return {fmaf(f.negative_lr, direction, w), b};
}

}  // namespace bmtrain::cuda
