#include "optim/adam.h"

#include <cmath>
#include <vector>

#include "common/check.h"
#include "common/tensor_dtype.h"
#include "cpu/torch_sqrt.h"

namespace bmtrain {
namespace {

using cpu::AdamFactors;
using cpu::AdamSlice;

void check_tensor(const at::Tensor& tensor, const char* list, std::size_t index, std::int64_t numel,
                  c10::Device device) {
  BMT_CHECK(TypeError, tensor.device() == device, "adam: ", list, "[", index, "]: expected a tensor on ",
            device, ", got one on ", tensor.device());
  BMT_CHECK(TypeError, tensor.is_contiguous(), "adam: ", list, "[", index,
            "]: expected a contiguous tensor, got strides ", tensor.strides(), " for shape ", tensor.sizes());
  BMT_CHECK(ValueError, tensor.numel() == numel, "adam: ", list, "[", index, "]: expected ", numel,
            " elements like weights, got ", tensor.numel());
}

void check_dtype(const at::Tensor& tensor, const char* list, std::size_t index, bool allowed,
                 const char* expected) {
  BMT_CHECK(TypeError, allowed, "adam: ", list, "[", index, "]: expected ", expected, ", got ",
            tensor.scalar_type());
}

bool is_16_bit(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

void check_lengths(const AdamTensors& tensors) {
  const std::size_t expected = tensors.weights.size();
  const bool fits = tensors.grads.size() == expected && tensors.exp_avgs.size() == expected &&
                    tensors.exp_avg_sqs.size() == expected && tensors.steps.size() == expected &&
                    (tensors.rounded.empty() || tensors.rounded.size() == expected);
  BMT_CHECK(ValueError, fits, "adam: expected lists of one length, got weights ", expected, ", rounded ",
            tensors.rounded.size(), ", grads ", tensors.grads.size(), ", exp_avgs ", tensors.exp_avgs.size(),
            ", exp_avg_sqs ", tensors.exp_avg_sqs.size(), ", steps ", tensors.steps.size());
}

AdamSlice slice_of(const AdamTensors& tensors, std::size_t i) {
  const at::Tensor& weight = tensors.weights[i];
  const at::Tensor& grad = tensors.grads[i];
  const std::int64_t numel = weight.numel();
  const c10::Device device = tensors.weights[0].device();
  check_tensor(weight, "weights", i, numel, device);
  check_tensor(grad, "grads", i, numel, device);
  check_tensor(tensors.exp_avgs[i], "exp_avgs", i, numel, device);
  check_tensor(tensors.exp_avg_sqs[i], "exp_avg_sqs", i, numel, device);
  const auto is_float32 = [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat; };
  check_dtype(weight, "weights", i, is_float32(weight), "float32");
  check_dtype(grad, "grads", i, is_float32(grad) || is_16_bit(grad), "float32, float16 or bfloat16");
  const bool bf16_moments = tensors.exp_avgs[i].scalar_type() == at::kBFloat16;
  check_dtype(tensors.exp_avgs[i], "exp_avgs", i, bf16_moments || is_float32(tensors.exp_avgs[i]),
              "float32 or bfloat16");
  check_dtype(tensors.exp_avg_sqs[i], "exp_avg_sqs", i,
              tensors.exp_avg_sqs[i].scalar_type() == tensors.exp_avgs[i].scalar_type(),
              bf16_moments ? "bfloat16 like exp_avgs" : "float32 like exp_avgs");
  BMT_CHECK(ValueError, tensors.steps[i] >= 1, "adam: steps[", i, "]: expected 1 or more, got ",
            tensors.steps[i]);
  AdamSlice slice;
  slice.weight = weight.mutable_data_ptr<float>();
  slice.grad = grad.const_data_ptr();
  slice.grad_dtype = dtype_of(grad.scalar_type(), "grads");
  if (bf16_moments) {
    slice.bf16_exp_avg = tensors.exp_avgs[i].mutable_data_ptr();
    slice.bf16_exp_avg_sq = tensors.exp_avg_sqs[i].mutable_data_ptr();
  } else {
    slice.exp_avg = tensors.exp_avgs[i].mutable_data_ptr<float>();
    slice.exp_avg_sq = tensors.exp_avg_sqs[i].mutable_data_ptr<float>();
  }
  slice.n = numel;
  if (!tensors.rounded.empty()) {
    const at::Tensor& rounded = tensors.rounded[i];
    check_tensor(rounded, "rounded", i, numel, device);
    check_dtype(rounded, "rounded", i, is_16_bit(rounded), "float16 or bfloat16");
    slice.rounded = rounded.mutable_data_ptr();
    slice.rounded_dtype = dtype_of(rounded.scalar_type(), "rounded");
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
  const auto follows = [&](const void* begin, DType dtype, const void* next_begin) {
    return static_cast<const char*>(begin) + slice.n * size_of(dtype) == next_begin;
  };
  const bool both = (slice.rounded == nullptr) == (next.rounded == nullptr);
  return both && slice.grad_dtype == next.grad_dtype && follows(slice.weight, DType::kFloat32, next.weight) &&
         follows(slice.grad, slice.grad_dtype, next.grad) &&
         (slice.bf16_exp_avg == nullptr
              ? follows(slice.exp_avg, DType::kFloat32, next.exp_avg) &&
                    follows(slice.exp_avg_sq, DType::kFloat32, next.exp_avg_sq)
              : follows(slice.bf16_exp_avg, DType::kBFloat16, next.bf16_exp_avg) &&
                    follows(slice.bf16_exp_avg_sq, DType::kBFloat16, next.bf16_exp_avg_sq)) &&
         (slice.rounded == nullptr || (slice.rounded_dtype == next.rounded_dtype &&
                                       follows(slice.rounded, slice.rounded_dtype, next.rounded)));
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
  const auto scale = static_cast<float>(options.maximize ? -options.scale : options.scale);
  int exponent = 0;
  const bool power_of_two = std::fabs(std::frexp(scale, &exponent)) == 0.5f && std::abs(exponent) < 120;
  factors.grad_divide = !power_of_two;
  factors.grad_factor = power_of_two ? 1 / scale : scale;
  const auto lerp_weight = static_cast<float>(1 - options.beta1);
  factors.lerp_from_grad = std::fabs(lerp_weight) >= 0.5f;
  factors.lerp_weight = factors.lerp_from_grad ? lerp_weight - 1 : lerp_weight;
  factors.beta2 = static_cast<float>(options.beta2);
  factors.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  factors.bias_correction2_sqrt = divisor(static_cast<float>(std::pow(bias_correction2, 0.5)));
  factors.eps = static_cast<float>(options.eps);
  factors.negative_step_size = static_cast<float>(-(lr / bias_correction1));
  if (options.weight_decay != 0) {
    factors.decay_kind = options.decoupled ? cpu::WeightDecay::kDecoupled : cpu::WeightDecay::kL2;
    factors.decay =
        static_cast<float>(options.decoupled ? 1 - lr * options.weight_decay : options.weight_decay);
  }
  factors.sqrt = options.torch_sqrt ? cpu::torch_sqrt() : nullptr;
  factors.dither_seed = static_cast<std::uint32_t>(step) * 0x9e3779b1u;
  factors.bias_correction1 = static_cast<float>(bias_correction1);
  factors.weight_decay = static_cast<float>(options.weight_decay);
  return factors;
}

std::vector<AdamSlice> adam_slices(const AdamTensors& tensors, const AdamOptions& options) {
  check_lengths(tensors);
  std::vector<AdamSlice> slices;
  slices.reserve(tensors.weights.size());
  std::int64_t last_step = 0;
  for (std::size_t i = 0; i < tensors.weights.size(); ++i) {
    AdamSlice next = slice_of(tensors, i);
    if (next.n == 0) continue;
    const std::int64_t step = tensors.steps[i];
    if (!slices.empty() && step == last_step && continues(slices.back(), next)) {
      slices.back().n += next.n;
      continue;
    }
    next.factors = !slices.empty() && step == last_step ? slices.back().factors : adam_factors(options, step);
    last_step = step;
    slices.push_back(next);
  }
  return slices;
}

cpu::DeltaSums adam_step(const AdamTensors& tensors, const AdamOptions& options, bool with_delta) {
  BMT_CHECK(ValueError, !(with_delta && options.torch_sqrt), "adam: expected no delta with torch_sqrt");
  BMT_CHECK(ValueError, options.torch_sqrt ? tensors.rounded.empty() : true,
            "adam: expected fp32 weights only with torch_sqrt, got rounded ones");
  BMT_CHECK(TypeError, tensors.weights.empty() || tensors.weights[0].is_cpu(),
            "adam: weights[0]: expected a CPU tensor, got one on ", tensors.weights[0].device());
  const std::vector<AdamSlice> slices = adam_slices(tensors, options);
  for (const AdamSlice& slice : slices) {
    BMT_CHECK(TypeError, slice.bf16_exp_avg == nullptr || !options.torch_sqrt,
              "adam: expected float32 moments with torch_sqrt, got bfloat16");
  }
  cpu::DeltaSums sums;
  cpu::adam(slices.data(), static_cast<std::int64_t>(slices.size()), with_delta ? &sums : nullptr);
  return sums;
}

}  // namespace bmtrain
