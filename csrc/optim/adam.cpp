#include "optim/adam.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "common/check.h"
#include "optim/torch_sqrt.h"

namespace bmtrain {
namespace {

using cpu::AdamFactors;
using cpu::AdamSlice;

constexpr const char* kName = AdamOptions::kOperator;

void check_lengths(const AdamTensors& tensors) {
  const std::size_t expected = tensors.step.weights.size();
  const bool fits = tensors.step.grads.size() == expected && tensors.exp_avgs.size() == expected &&
                    tensors.exp_avg_sqs.size() == expected && tensors.steps.size() == expected &&
                    (tensors.step.rounded.empty() || tensors.step.rounded.size() == expected);
  BMT_CHECK(ValueError, fits, "adam: expected lists of one length, got weights ", expected, ", rounded ",
            tensors.step.rounded.size(), ", grads ", tensors.step.grads.size(), ", exp_avgs ",
            tensors.exp_avgs.size(), ", exp_avg_sqs ", tensors.exp_avg_sqs.size(), ", steps ",
            tensors.steps.size());
}

cpu::CodedArray coded(const at::Tensor& tensor, const char* list, std::size_t i, std::int64_t numel) {
  BMT_CHECK(ValueError, tensor.is_contiguous() && tensor.numel() == cpu::coded_bytes(numel), "adam: ", list,
            "[", i, "]: expected ", cpu::coded_bytes(numel), " contiguous bytes for ", numel,
            " weights, got ", tensor.numel());
  auto* const codes = tensor.mutable_data_ptr<std::uint8_t>();
  return {codes, codes + numel};
}

AdamSlice slice_of(const AdamTensors& tensors, std::size_t i) {
  const at::Tensor& exp_avg = tensors.exp_avgs[i];
  const at::Tensor& exp_avg_sq = tensors.exp_avg_sqs[i];
  AdamSlice slice;
  static_cast<cpu::StepSlice&>(slice) = step_slice(kName, tensors.step, i);
  BMT_CHECK(ValueError, tensors.steps[i] >= 1, "adam: steps[", i, "]: expected 1 or more, got ",
            tensors.steps[i]);
  if (exp_avg.scalar_type() == at::kByte) {
    const at::Device device = tensors.step.weights[i].device();
    BMT_CHECK(TypeError, exp_avg.device() == device && exp_avg_sq.device() == device, "adam: exp_avgs[", i,
              "]: expected moments on ", device);
    check_dtype(kName, exp_avg_sq, "exp_avg_sqs", i, exp_avg_sq.scalar_type() == at::kByte,
                "uint8 like exp_avgs");
    slice.coded_exp_avg = coded(exp_avg, "exp_avgs", i, slice.n);
    slice.coded_exp_avg_sq = coded(exp_avg_sq, "exp_avg_sqs", i, slice.n);
    return slice;
  }
  check_state(kName, exp_avg, "exp_avgs", i, tensors.step);
  check_state(kName, exp_avg_sq, "exp_avg_sqs", i, tensors.step);
  const bool bf16 = exp_avg.scalar_type() == at::kBFloat16;
  check_dtype(kName, exp_avg, "exp_avgs", i, bf16 || exp_avg.scalar_type() == at::kFloat,
              "float32, bfloat16 or uint8");
  check_dtype(kName, exp_avg_sq, "exp_avg_sqs", i, exp_avg_sq.scalar_type() == exp_avg.scalar_type(),
              bf16 ? "bfloat16 like exp_avgs" : "float32 like exp_avgs");
  if (bf16) {
    slice.bf16_exp_avg = exp_avg.mutable_data_ptr();
    slice.bf16_exp_avg_sq = exp_avg_sq.mutable_data_ptr();
  } else {
    slice.exp_avg = exp_avg.mutable_data_ptr<float>();
    slice.exp_avg_sq = exp_avg_sq.mutable_data_ptr<float>();
  }
  return slice;
}

cpu::Divisor divisor(float value) {
  const double exact = 1 / static_cast<double>(value);
  const auto reciprocal = static_cast<float>(exact);
  return {value, reciprocal, static_cast<float>(exact - static_cast<double>(reciprocal))};
}

// Whether `next` begins where `slice` ends, in every array.
bool continues(const AdamSlice& slice, const AdamSlice& next) {
  const auto moment_follows = [&](const void* begin, DType dtype, const void* next_begin) {
    return follows(begin, slice.n, dtype, next_begin);
  };
  return slice.coded_exp_avg.codes == nullptr && next.coded_exp_avg.codes == nullptr &&
         bmtrain::continues(slice, static_cast<const cpu::StepSlice&>(next)) &&
         (slice.bf16_exp_avg == nullptr
              ? moment_follows(slice.exp_avg, DType::kFloat32, next.exp_avg) &&
                    moment_follows(slice.exp_avg_sq, DType::kFloat32, next.exp_avg_sq)
              : moment_follows(slice.bf16_exp_avg, DType::kBFloat16, next.bf16_exp_avg) &&
                    moment_follows(slice.bf16_exp_avg_sq, DType::kBFloat16, next.bf16_exp_avg_sq));
}

}  // namespace

AdamFactors adam_factors(const AdamOptions& options, std::int64_t step) {
  // In fp64 and in the order of torch.optim.Adam; each number is rounded to fp32 once, when it meets a
  // tensor.
  const auto t = static_cast<double>(step);
  const double lr = step <= options.hold_steps ? 0.0 : options.lr;
  const double bias_correction1 = 1 - std::pow(options.beta1, t);
  const double bias_correction2 = 1 - std::pow(options.beta2, t);
  AdamFactors factors;
  const GradientFactor gradient = gradient_factor(options.scale, options.maximize);
  factors.grad_divide = gradient.divide;
  factors.grad_factor = gradient.factor;
  const auto lerp_weight = static_cast<float>(1 - options.beta1);
  factors.lerp_from_grad = std::fabs(lerp_weight) >= 0.5f;
  factors.lerp_weight = factors.lerp_from_grad ? lerp_weight - 1 : lerp_weight;
  factors.beta2 = static_cast<float>(options.beta2);
  factors.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  const double root = std::pow(bias_correction2, 0.5);
  const double folded = options.folded ? root : 1.0;
  factors.bias_correction2_sqrt = divisor(static_cast<float>(root / folded));
  factors.eps = static_cast<float>(options.eps * folded);
  factors.negative_step_size = static_cast<float>(-(lr / bias_correction1 * folded));
  if (options.weight_decay != 0) {
    factors.decay_kind = options.decoupled ? cpu::WeightDecay::kDecoupled : cpu::WeightDecay::kL2;
    factors.decay =
        static_cast<float>(options.decoupled ? 1 - lr * options.weight_decay : options.weight_decay);
  }
  factors.sqrt = options.as_torch ? torch_sqrt() : nullptr;
  factors.dither_seed = static_cast<std::uint32_t>(step) * 0x9e3779b1u;
  factors.bias_correction1 = static_cast<float>(bias_correction1);
  factors.weight_decay = static_cast<float>(options.weight_decay);
  return factors;
}

std::vector<AdamSlice> slices_of(const AdamTensors& tensors, const AdamGroups& groups) {
  const std::size_t num_tensors = tensors.step.weights.size();
  check_lengths(tensors);
  check_groups(kName, groups.sizes, groups.options.size(), num_tensors);
  std::vector<AdamSlice> slices;
  slices.reserve(num_tensors);
  std::size_t end = 0;
  for (std::size_t group = 0; group < groups.sizes.size(); ++group) {
    std::int64_t last_step = 0;  // no tensor has it, so that no slice is of two groups
    for (std::size_t i = std::exchange(end, end + groups.sizes[group]); i < end; ++i) {
      AdamSlice next = slice_of(tensors, i);
      if (next.n == 0) continue;
      const bool is_coded = next.coded_exp_avg.codes != nullptr;
      const bool same_factors =
          tensors.steps[i] == last_step && is_coded == (slices.back().coded_exp_avg.codes != nullptr);
      if (same_factors && continues(slices.back(), next)) {
        slices.back().n += next.n;
        continue;
      }
      last_step = tensors.steps[i];
      AdamOptions options = groups.options[group];
      options.folded |= is_coded;
      next.factors = same_factors ? slices.back().factors : adam_factors(options, last_step);
      slices.push_back(next);
    }
  }
  return slices;
}

cpu::DeltaSums step_on_cpu(const AdamTensors& tensors, const AdamGroups& groups, bool with_delta,
                           StepCheck* check) {
  BMT_CHECK(TypeError, tensors.step.weights.empty() || tensors.step.weights[0].is_cpu(),
            "adam: weights[0]: expected a CPU tensor, got one on ", tensors.step.weights[0].device());
  const bool as_torch = std::any_of(groups.options.begin(), groups.options.end(),
                                    [](const AdamOptions& options) { return options.as_torch; });
  BMT_CHECK(ValueError, !(with_delta && as_torch), "adam: expected no delta with as_torch");
  BMT_CHECK(ValueError, !as_torch || tensors.step.rounded.empty(),
            "adam: expected fp32 weights only with as_torch, got rounded ones");
  const std::vector<AdamSlice> slices = slices_of(tensors, groups);
  for (const AdamSlice& slice : slices) {
    BMT_CHECK(TypeError, slice.exp_avg != nullptr || !as_torch,
              "adam: expected float32 moments with as_torch, got narrower ones");
    BMT_CHECK(TypeError, slice.coded_exp_avg.codes == nullptr || !with_delta,
              "adam: expected no delta of moments in 8 bits");
  }
  cpu::DeltaSums sums;
  if (check != nullptr) {
    check->step(slices, tensors.step.grads);
    return sums;
  }
  cpu::adam(slices.data(), static_cast<std::int64_t>(slices.size()), with_delta ? &sums : nullptr);
  return sums;
}

}  // namespace bmtrain
