#include "optim/momentum.h"

#include "common/check.h"

namespace bmtrain {
namespace {

using cpu::MomentumFactors;
using cpu::MomentumSlice;

void check_lengths(const char* op, const MomentumTensors& tensors, bool needs_momenta) {
  const std::size_t expected = tensors.step.weights.size();
  const auto fits = [&](std::size_t length, bool optional) {
    return length == expected || (optional && length == 0);
  };
  BMT_CHECK(ValueError,
            fits(tensors.step.grads.size(), false) && fits(tensors.step.rounded.size(), true) &&
                fits(tensors.momenta.size(), !needs_momenta) && fits(tensors.fresh.size(), true),
            op, ": expected lists of one length, got weights ", expected, ", rounded ",
            tensors.step.rounded.size(), ", grads ", tensors.step.grads.size(), ", momenta ",
            tensors.momenta.size(), ", fresh ", tensors.fresh.size());
}

bool continues(const MomentumSlice& slice, const MomentumSlice& next) {
  return slice.factors.starts == next.factors.starts &&
         bmtrain::continues(slice, static_cast<const cpu::StepSlice&>(next)) &&
         (slice.momentum == nullptr || follows(slice.momentum, slice.n, DType::kFloat32, next.momentum));
}

std::vector<MomentumSlice> slices_of(const char* op, const MomentumTensors& tensors,
                                     const MomentumFactors& factors) {
  check_lengths(op, tensors, factors.rule == cpu::MomentumRule::kLion);
  std::vector<MomentumSlice> slices;
  slices.reserve(tensors.step.weights.size());
  for (std::size_t i = 0; i < tensors.step.weights.size(); ++i) {
    MomentumSlice next;
    static_cast<cpu::StepSlice&>(next) = step_slice(op, tensors.step, i);
    next.factors = factors;
    if (!tensors.momenta.empty()) {
      const at::Tensor& momentum = tensors.momenta[i];
      check_state(op, momentum, "momenta", i, tensors.step);
      check_dtype(op, momentum, "momenta", i, momentum.scalar_type() == at::kFloat, "float32");
      next.momentum = momentum.mutable_data_ptr<float>();
      next.factors.starts = !tensors.fresh.empty() && tensors.fresh[i] != 0;
    }
    if (next.n == 0) continue;
    if (!slices.empty() && continues(slices.back(), next)) {
      slices.back().n += next.n;
    } else {
      slices.push_back(next);
    }
  }
  return slices;
}

MomentumFactors gradient_factors(double scale, bool maximize) {
  const GradientFactor gradient = gradient_factor(scale, maximize);
  MomentumFactors factors;
  factors.grad_factor = gradient.factor;
  factors.grad_divide = gradient.divide;
  return factors;
}

}  // namespace

// In fp64 as Python computes it; each number is rounded to fp32 once, when it meets a tensor.

std::vector<MomentumSlice> sgd_slices(const MomentumTensors& tensors, const SgdOptions& options) {
  MomentumFactors factors = gradient_factors(options.scale, options.maximize);
  factors.keep = static_cast<float>(options.momentum);
  factors.take = static_cast<float>(1 - options.dampening);
  factors.nesterov = options.nesterov;
  factors.negative_lr = static_cast<float>(-options.lr);
  if (options.weight_decay != 0) {
    factors.decay_kind = cpu::WeightDecay::kL2;
    factors.decay = static_cast<float>(options.weight_decay);
  }
  return slices_of("sgd", tensors, factors);
}

std::vector<MomentumSlice> lion_slices(const MomentumTensors& tensors, const LionOptions& options) {
  MomentumFactors factors = gradient_factors(options.scale, options.maximize);
  factors.rule = cpu::MomentumRule::kLion;
  factors.ahead_keep = static_cast<float>(options.beta1);
  factors.ahead_take = static_cast<float>(1 - options.beta1);
  factors.keep = static_cast<float>(options.beta2);
  factors.take = static_cast<float>(1 - options.beta2);
  factors.negative_lr = static_cast<float>(-options.lr);
  if (options.weight_decay != 0) {
    factors.decay_kind = cpu::WeightDecay::kDecoupled;
    factors.decay = static_cast<float>(1 - options.lr * options.weight_decay);
  }
  return slices_of("lion", tensors, factors);
}

}  // namespace bmtrain
