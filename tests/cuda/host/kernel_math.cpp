// The arithmetic of the CUDA kernels, compiled for the host: tests hold it against torch and against the CPU
// kernels.
#include <cstdint>

#include "cuda/adam_math.h"
#include "cuda/cross_entropy_math.h"
#include "cuda/element.h"
#include "cuda/momentum_math.h"
#include "factors.h"

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

// factors: as in factors.h, here and below.
void adam_step(const float* factors, float* w, const float* g, float* m, float* v, std::int64_t n) {
  const cpu::AdamFactors f = adam_factors(factors);
  for (std::int64_t i = 0; i < n; ++i) {
    const AdamElement e = adam_element(f, g[i], {w[i], m[i], v[i]});
    w[i] = e.weight;
    m[i] = e.exp_avg;
    v[i] = e.exp_avg_sq;
  }
}

void momentum_step(const float* factors, float* w, const float* g, float* b, std::int64_t n) {
  const cpu::MomentumFactors f = momentum_factors(factors);
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
    out[c] = logit_gradient(row, x[c]) - row.spread * (weight == nullptr ? 1 : weight[c]);
    if (c == target) out[c] -= row.hit;
  }
}

}  // extern "C"
