// The arithmetic of the CUDA kernels, compiled for the host: tests hold it against torch and against the CPU
// kernels.
#include <cstdint>

#include "cuda/adam_math.h"
#include "cuda/cross_entropy_math.h"
#include "cuda/element.h"
#include "cuda/momentum_math.h"

using namespace bmtrain;        // NOLINT(google-build-using-namespace)
using namespace bmtrain::cuda;  // NOLINT(google-build-using-namespace)

extern "C" {

void round_to_bf16(const float* x, std::uint16_t* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = from_float<Bf16>(x[i]).bits;
}
void round_to_half(const float* x, std::uint16_t* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = from_float<Half>(x[i]).bits;
}
void widen_bf16(const std::uint16_t* x, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_float(Bf16{x[i]});
}
void widen_half(const std::uint16_t* x, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = to_float(Half{x[i]});
}

// factors: grad_factor, grad_divide, lerp_from_grad, lerp_weight, beta2, one_minus_beta2,
// bias_correction2_sqrt, eps, negative_step_size, decay_kind, decay.
void adam_step(const float* factors, float* w, const float* g, float* m, float* v, std::int64_t n) {
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
  for (std::int64_t i = 0; i < n; ++i) {
    const AdamElement e = adam_element(f, g[i], {w[i], m[i], v[i]});
    w[i] = e.weight;
    m[i] = e.exp_avg;
    v[i] = e.exp_avg_sq;
  }
}

// factors: lion, grad_factor, grad_divide, starts, nesterov, keep, take, ahead_keep, ahead_take, negative_lr,
// decay_kind, decay.
void momentum_step(const float* factors, float* w, const float* g, float* b, std::int64_t n) {
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
  for (std::int64_t i = 0; i < n; ++i) {
    const MomentumElement e = momentum_element(f, b != nullptr, g[i], {w[i], b == nullptr ? 0 : b[i]});
    w[i] = e.weight;
    if (b != nullptr) b[i] = e.momentum;
  }
}

// One row in `num_parts` interleaved parts, as a block's threads take it. out: maximum, exp_sum, smooth.
void row_sums(const float* x, const float* weight, std::int64_t n, int num_parts, float* out) {
  RowPart total;
  for (int p = 0; p < num_parts; ++p) {
    RowPart part;
    for (std::int64_t c = p; c < n; c += num_parts) add_logit(part, x[c], weight == nullptr ? 0 : weight[c]);
    total = p % 2 == 0 ? merged(total, part) : merged(part, total);
  }
  out[0] = total.maximum;
  out[1] = total.exp_sum;
  out[2] = total.smooth;
}

// The same without smoothing, eight logits at a time; out: maximum, exp_sum.
void row_sums_packed(const float* x, std::int64_t n, float* out) {
  RowPart total;
  for (std::int64_t c = 0; c < n; c += 8) {
    float pack[8];
    for (int k = 0; k < 8; ++k) pack[k] = c + k < n ? x[c + k] : -INFINITY;
    RowPart part;
    RowPart& target = c % 16 == 0 ? total : part;
    add_logits<true>(target, pack);
    if (c % 16 != 0) total = merged(total, part);
  }
  out[0] = total.maximum;
  out[1] = total.exp_sum;
}

// factors: maximum, log_sum, scale, hit, spread.
void row_gradient(const float* x, const float* weight, const float* factors, std::int64_t target,
                  std::int64_t n, float* out) {
  const RowGradient row{factors[0], factors[1], factors[2], factors[3], factors[4]};
  for (std::int64_t c = 0; c < n; ++c) {
    out[c] = logit_gradient(row, x[c], c == target, weight == nullptr ? 1 : weight[c]);
  }
}

}  // extern "C"
