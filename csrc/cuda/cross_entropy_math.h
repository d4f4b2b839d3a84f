// What a pass over a row of logits collects, and a logit's gradient; compiled for the device and for the
// host.
#pragma once

#include <cmath>

#include "cuda/element.h"

namespace bmtrain::cuda {

/// Of a part of a row. Parts are merged in any order, so one pass over memory is enough: sums are kept
/// relative to the maximum so far, and corrected when it grows.
struct RowPart {
  float maximum = -INFINITY;
  float exp_sum = 0;     // of exp(x - maximum)
  float smooth = 0;      // of weight * (x - maximum)
  float weight_sum = 0;  // of the weights in `smooth`
};

constexpr float kLog2e = 1.44269504f;

/// 2^x by the processor's own instruction: a few units in the last place off, and 0 where the result would be
/// subnormal. Errors that 16-bit logits do not notice.
BMT_HOST_DEVICE float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

/// exp(x - shift). The difference comes first: between large logits it is exact.
template <bool kFast = false>
BMT_HOST_DEVICE float exp_of(float x, float shift = 0) {
  return kFast ? fast_exp2((x - shift) * kLog2e) : expf(x - shift);
}

// The part's sums relative to a maximum that is not smaller (NaN wins).
BMT_HOST_DEVICE RowPart rebased(RowPart part, float maximum) {
  if (part.maximum == maximum || (part.exp_sum == 0 && part.weight_sum == 0)) {
    part.maximum = maximum;
    return part;
  }
  const float shift = part.maximum - maximum;
  part.exp_sum = part.exp_sum == 0 ? 0 : part.exp_sum * exp_of(shift);
  if (part.weight_sum != 0) part.smooth += part.weight_sum * shift;
  part.maximum = maximum;
  return part;
}

BMT_HOST_DEVICE RowPart merged(const RowPart& a, const RowPart& b) {
  const float maximum = a.maximum > b.maximum || a.maximum != a.maximum ? a.maximum : b.maximum;
  const RowPart x = rebased(a, maximum), y = rebased(b, maximum);
  return {maximum, x.exp_sum + y.exp_sum, x.smooth + y.smooth, x.weight_sum + y.weight_sum};
}

/// Adds one logit. `weight` is that of its class where smoothing is on, else 0.
BMT_HOST_DEVICE void add_logit(RowPart& part, float x, float weight) {
  if (x > part.maximum || x != x) part = rebased(part, x);
  if (x != -INFINITY) part.exp_sum += exp_of(x, part.maximum);
  if (weight != 0) {
    part.smooth += x == part.maximum ? 0 : weight * (x - part.maximum);
    part.weight_sum += weight;
  }
}

/// Adds several logits without smoothing: one correction for all of them.
template <bool kFast, int kCount>
BMT_HOST_DEVICE void add_logits(RowPart& part, const float (&x)[kCount]) {
  float maximum = part.maximum;
  for (int k = 0; k < kCount; ++k) maximum = fmaxf(maximum, x[k]);  // passes over NaN, which the sum keeps
  if (maximum > part.maximum) {
    part.exp_sum *= exp_of<kFast>(part.maximum, maximum);
    part.maximum = maximum;
  }
  const float base = maximum == -INFINITY ? 0 : maximum;
  for (int k = 0; k < kCount; ++k) part.exp_sum += exp_of<kFast>(x[k], base);
}

/// What backward knows of a row: d loss / d x[c] = scale * p[c] - hit * [c == target] - spread * weight[c].
struct RowGradient {
  float maximum, log_sum;
  float scale, hit, spread;
};

/// Its first term.
template <bool kFast = false>
BMT_HOST_DEVICE float logit_gradient(const RowGradient& row, float x) {
  const float p = kFast ? fast_exp2(fmaf(x - row.maximum, kLog2e, -kLog2e * row.log_sum))
                        : expf(x - row.maximum - row.log_sum);
  return row.scale * p;
}

}  // namespace bmtrain::cuda
