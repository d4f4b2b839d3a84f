#include "optim/momentum.h"

#include <utility>

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

MomentumSlice slice_of(const char* op, const MomentumTensors& tensors, std::size_t i,
                       const MomentumFactors& factors) {
  MomentumSlice slice;
  static_cast<cpu::StepSlice&>(slice) = step_slice(op, tensors.step, i);
  slice.factors = factors;
  if (!tensors.momenta.empty()) {
    const at::Tensor& momentum = tensors.momenta[i];
    check_state(op, momentum, "momenta", i, tensors.step);
    check_dtype(op, momentum, "momenta", i, momentum.scalar_type() == at::kFloat, "float32");
    slice.momentum = momentum.mutable_data_ptr<float>();
    slice.factors.starts = !tensors.fresh.empty() && tensors.fresh[i] != 0;
  }
  return slice;
}

std::vector<MomentumSlice> slices_with(const char* op, const MomentumTensors& tensors,
                                       at::ArrayRef<MomentumFactors> factors, at::IntArrayRef sizes) {
  const std::size_t num_tensors = tensors.step.weights.size();
  const bool is_lion = !factors.empty() && factors[0].rule == cpu::MomentumRule::kLion;
  check_lengths(op, tensors, is_lion);
  check_groups(op, sizes, factors.size(), num_tensors);
  std::vector<MomentumSlice> slices;
  slices.reserve(num_tensors);
  std::size_t end = 0;
  for (std::size_t group = 0; group < sizes.size(); ++group) {
    const std::size_t first_slice = slices.size();
    for (std::size_t i = std::exchange(end, end + sizes[group]); i < end; ++i) {
      const MomentumSlice next = slice_of(op, tensors, i, factors[group]);
      if (next.n == 0) continue;
      if (slices.size() > first_slice && continues(slices.back(), next)) {
        slices.back().n += next.n;
      } else {
        slices.push_back(next);
      }
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

// In fp64 as Python computes it; each number is rounded to fp32 once, when it meets a tensor.

MomentumFactors factors_of(const SgdOptions& options) {
  MomentumFactors factors = gradient_factors(options.scale, options.maximize);
  factors.keep = static_cast<float>(options.momentum);
  factors.take = static_cast<float>(1 - options.dampening);
  factors.nesterov = options.nesterov;
  factors.negative_lr = static_cast<float>(-options.lr);
  if (options.weight_decay != 0) {
    factors.decay_kind = cpu::WeightDecay::kL2;
    factors.decay = static_cast<float>(options.weight_decay);
  }
  return factors;
}

MomentumFactors factors_of(const LionOptions& options) {
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
  return factors;
}

}  // namespace

template <typename Options>
std::vector<MomentumSlice> slices_of(const MomentumTensors& tensors, const Groups<Options>& groups) {
  std::vector<MomentumFactors> factors;
  for (const Options& options : groups.options) factors.push_back(factors_of(options));
  return slices_with(Options::kOperator, tensors, factors, groups.sizes);
}
template std::vector<MomentumSlice> slices_of(const MomentumTensors&, const SgdGroups&);
template std::vector<MomentumSlice> slices_of(const MomentumTensors&, const LionGroups&);

template <typename Options>
void step_on_cpu(const MomentumTensors& tensors, const Groups<Options>& groups, StepCheck* check) {
  const std::vector<MomentumSlice> slices = slices_of(tensors, groups);
  const at::TensorList weights = tensors.step.weights;
  BMT_CHECK(TypeError, weights.empty() || weights[0].is_cpu(), Options::kOperator,
            ": weights[0]: expected a CPU tensor, got one on ", weights[0].device());
  if (check != nullptr) {
    check->step(slices, tensors.step.grads);
  } else {
    cpu::momentum(slices.data(), static_cast<std::int64_t>(slices.size()));
  }
}
template void step_on_cpu(const MomentumTensors&, const SgdGroups&, StepCheck*);
template void step_on_cpu(const MomentumTensors&, const LionGroups&, StepCheck*);

}  // namespace bmtrain
