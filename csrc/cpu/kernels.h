// The CPU kernels as the rest of the core sees them: plain functions over raw memory.
//
// Every function is parallel over the pool of common/thread_pool.h, accepts any alignment and any size
// from 0 up, gives the same bits at every instruction set level and every number of threads, and does not
// allocate per element. None of them touches Python or tensors. See [Note: One body, several levels].
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace bmtrain::cpu {

/// dst[i] = factor * (srcs[0][i] + srcs[1][i] + ...), summed in the order of `srcs`, plus the old dst[i] if
/// `accumulate`. 16-bit values are summed in fp32 (where `factor` is rounded to fp32 too) and rounded once,
/// to nearest even. `dst` may be one of the sources if they have its dtype. With no source the sum is 0. fp64
/// goes with itself alone.
void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t n, DType dtype,
                 DType src_dtype, bool accumulate, double factor);

/// The sum of x[i]^2 in fp64. Finite if and only if every element is: not even 2^63 squares of the largest
/// fp32 overflow fp64. fp32, fp16 and bf16 only, here and below.
[[nodiscard]] double squared_sum(const void* x, std::int64_t n, DType dtype);

/// The largest |x[i]|, NaN if any element is; 0 if there is none.
[[nodiscard]] float abs_max(const void* x, std::int64_t n, DType dtype);

/// The sum of |x[i]|^p in fp64, for a general p > 0. Much slower than squared_sum.
[[nodiscard]] double abs_power_sum(const void* x, std::int64_t n, DType dtype, double p);

/// Sets n elements to 0. The thread that touches a page is the one in whose share of a later step over the
/// same range, with as many threads, it lies: the system places a page in the memory near that thread.
void zero(void* x, std::int64_t n, DType dtype);

/// A contiguous range that a step updates: what every optimizer has.
struct StepSlice {
  float* weight = nullptr;  // the fp32 parameter, or the fp32 master of a 16-bit one
  void* rounded = nullptr;  // where the rounded weight goes as well; nullptr: nowhere
  DType rounded_dtype = DType::kBFloat16;
  const void* grad = nullptr;
  DType grad_dtype = DType::kFloat32;
  std::int64_t n = 0;
};

/// What weight decay does.
enum class WeightDecay : std::uint8_t {
  kNone,
  kL2,         // decay * w is added to the gradient
  kDecoupled,  // w is multiplied by `decay` (1 - lr * weight_decay) before the update
};

/// Square roots of n floats, as torch computes them (see optim/torch_sqrt.h).
using SqrtFunction = void (*)(std::int64_t n, const float* x, float* out);

/// A positive number that many others are divided by.
///
/// [Note: Division by a known number]
/// x / value, correctly rounded, costs four multiplications instead of a slow division if the reciprocal is
/// known: q = x * (reciprocal + reciprocal_rest), both parts used, is the quotient or a neighbour of it;
/// x - q * value is exact in an fma; and q plus that rest times the reciprocal then rounds to the quotient
/// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). It holds
/// while nothing underflows, and square roots of fp32 numbers are far from that; infinity is left alone.
struct Divisor {
  float value = 1;
  float reciprocal = 1;
  float reciprocal_rest = 0;  // 1 / value - reciprocal
};

/// One Adam step's numbers, in the precision in which they meet the elements.
///
/// [Note: Adam in torch's operation order]
/// torch.optim.Adam is a sequence of tensor operations, and its vectorised ones round like this (found by
/// comparing bits; tails and threads make no difference):
///   g = fma(w, weight_decay, g)                 add with alpha
///   m = fma(1 - beta1, g - m, m)                lerp; from g's side where 1 - beta1 >= 0.5
///   v = fma((1 - beta2) * g, g, beta2 * v)      mul, addcmul
///   d = sqrt(v) / sqrt(bias_correction2) + eps
///   w = w + (-step_size * m) / d                addcdiv
/// We do the same in one pass, so that an fp32 step has torch's bits. The square root is IEEE's except in
/// torch builds with MKL, whose own is not always correctly rounded; `sqrt` stands for it.
/// Moments in 8 bits take the form that divides by no bias correction (Kingma & Ba, "Adam: A Method for
/// Stochastic Optimization", 2015, end of section 2): sqrt(bias_correction2) is a factor of step_size and
/// eps, the factors are folded, and bias_correction2_sqrt is 1.
struct AdamFactors {
  float grad_factor = 1;     // g = grad * grad_factor, or
  bool grad_divide = false;  // g = grad / grad_factor, where a reciprocal would not be exact
  bool lerp_from_grad = false;
  float lerp_weight = 0;  // 1 - beta1, less 1 if lerp_from_grad
  float beta2 = 0;
  float one_minus_beta2 = 0;
  Divisor bias_correction2_sqrt;
  float eps = 0;
  float negative_step_size = 0;  // -lr / bias_correction1
  WeightDecay decay_kind = WeightDecay::kNone;
  float decay = 0;
  bool as_multi_tensor = false;   // of the kernel for GPUs, see cuda/adam_math.h
  SqrtFunction sqrt = nullptr;    // nullptr: correctly rounded, and faster
  std::uint32_t dither_seed = 0;  // see [Note: Moments in bf16]; another one in each step
  // For DeltaSums only.
  float bias_correction1 = 1;
  float weight_decay = 0;
};

/// [Note: Moments in bf16]
/// A second moment decays by 1 - beta2, a thousandth, in a step: less than half of what separates neighbours
/// in bf16, so that rounding to nearest would never let it shrink. Instead a moment goes to the neighbour
/// above with the probability of its distance from the one below, so that it is right on the average. The
/// random number is a hash of the weight, the first moment and the step: the same for every number of ranks
/// and threads; a NaN counts as one, whatever its bits. The weight is updated from the moments before they
/// are rounded.
///
/// [Note: Moments in 8 bits]
/// Blocks of 32 elements share an exponent (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
/// 2022; OCP Microscaling Formats 1.0, 2023): that of the power of two at or above their rounded magnitudes.
/// Relative to it an element is a float with 3 bits of mantissa: the first moment with a sign and 4 bits of
/// exponent, the second moment, whose range is the square of the first one's, with 5 (FP8 moments with
/// scales: Xi et al., "COAT", 2024). The largest code is that power of two, and a code less is the next fp32
/// number with 3 bits of mantissa below; code 0 is 0, which no second moment of 2^-126 or more is rounded to,
/// as it would be divided by. All values are exact in bf16, and encoding them again changes none: so files
/// have bf16 moments. They are rounded at random as above, both by one random number. A block with an inf, a
/// NaN or a magnitude above 2^127 becomes NaN, with the exponent 255. Shards begin at multiples of 128 bytes
/// of a parameter (see [Note: Aligned slices]), 32 elements of fp32: so no number of ranks cuts a block, and
/// no rank needs to know the elements of another one.
constexpr std::int64_t kMomentBlock = 32;

/// A moment in 8 bits: a code for each element, then an exponent, biased as fp32's, for each block.
struct CodedArray {
  std::uint8_t* codes = nullptr;
  std::uint8_t* exponents = nullptr;
};

/// Bytes of both for n elements.
constexpr std::int64_t coded_bytes(std::int64_t n) { return n + (n + kMomentBlock - 1) / kMomentBlock; }

struct AdamSlice : StepSlice {
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  void* bf16_exp_avg = nullptr;  // moments in bf16, which then are these two; else nullptr
  void* bf16_exp_avg_sq = nullptr;
  CodedArray coded_exp_avg;  // moments in 8 bits, likewise; the slice is a whole tensor
  CodedArray coded_exp_avg_sq;
  AdamFactors factors;
};

/// Sums over elements of delta = (m / bias_correction1) / d + weight_decay * w, w before the step.
struct DeltaSums {
  double sum = 0;
  double sum_of_squares = 0;
};

/// Which formula a step with at most one momentum per weight follows.
enum class MomentumRule : std::uint8_t {
  kSgd,   // as torch.optim.SGD
  kLion,  // Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2
};

/// One SGD or Lion step's numbers, in the precision in which they meet the elements.
///
/// [Note: SGD in torch's operation order]
/// The operations of torch.optim.SGD round like this (see [Note: Adam in torch's operation order]):
///   g = fma(w, weight_decay, g)               add with alpha
///   b = fma(1 - dampening, g, momentum * b)   mul, add with alpha; a momentum that starts is the gradient
///   d = fma(momentum, b, g)                   add with alpha; without Nesterov's step d = b
///   w = fma(-lr, d, w)                        add with alpha
/// And Lion, written with the same operations:
///   d = sign(fma(1 - beta1, g, beta1 * m));  m = fma(1 - beta2, g, beta2 * m)
///   w = fma(-lr, d, w * (1 - lr * weight_decay))
struct MomentumFactors {
  MomentumRule rule = MomentumRule::kSgd;
  float grad_factor = 1;     // g = grad * grad_factor, or
  bool grad_divide = false;  // g = grad / grad_factor, where a reciprocal would not be exact
  bool starts = false;       // the momentum is written, and not read
  bool nesterov = false;
  float keep = 0;        // the momentum is multiplied by it
  float take = 1;        // and this times the gradient added
  float ahead_keep = 0;  // the same two for the direction of Lion
  float ahead_take = 1;
  float negative_lr = 0;
  WeightDecay decay_kind = WeightDecay::kNone;
  float decay = 0;
};

struct MomentumSlice : StepSlice {
  float* momentum = nullptr;  // nullptr: SGD without
  MomentumFactors factors;
};

/// One SGD or Lion step over all slices, which must not overlap.
void momentum(const MomentumSlice* slices, std::int64_t num_slices);

/// One Adam step over all slices, which must not overlap. Fills `sums` unless it is nullptr.
void adam(const AdamSlice* slices, std::int64_t num_slices, DeltaSums* sums);

/// Moves the bytes of a step with 16-bit gradients and rounded weights without computing: what `bench adam`
/// compares with. Weights and moments stay as they are; rounded weights receive the gradients.
void adam_move(const AdamSlice* slices, std::int64_t num_slices);

}  // namespace bmtrain::cpu
