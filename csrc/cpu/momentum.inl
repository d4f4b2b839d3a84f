// One SGD or Lion step over a contiguous range, in one pass. See [Note: SGD in torch's operation order].

enum class MomentumStep : std::uint8_t {
  kPlain,  // SGD without momentum
  kSgd,
  kLion,
};

struct MomentumVectors {
  F32x16 grad_factor, keep, take, ahead_keep, ahead_take, negative_lr, decay;
};

static inline MomentumVectors vectors_of(const MomentumFactors& f) {
  return {
      .grad_factor = broadcast(f.grad_factor),
      .keep = broadcast(f.keep),
      .take = broadcast(f.take),
      .ahead_keep = broadcast(f.ahead_keep),
      .ahead_take = broadcast(f.ahead_take),
      .negative_lr = broadcast(f.negative_lr),
      .decay = broadcast(f.decay),
  };
}

// 1 or -1; 0 for zeros and, as torch has it, for NaN.
static inline F32x16 sign_of(const F32x16& x) {
  const U32x16 bits = __builtin_bit_cast(U32x16, x);
  const U32x16 magnitude = bits & 0x7fffffffu;
  const U32x16 one = (bits & 0x80000000u) | 0x3f800000u;
  // Bits of a sign, and not comparisons, which compilers take apart for AVX2.
  const auto has_none = (U32x16)((S32x16)((0x7f800000u - magnitude) | (magnitude - 1u)) >> 31);
  return __builtin_bit_cast(F32x16, one & ~has_none);
}

struct WeightAndMomentum {
  F32x16 weight, momentum;
};

template <MomentumStep kStep>
static inline WeightAndMomentum momentum_step(const MomentumFactors& f, const MomentumVectors& c, F32x16 g,
                                              F32x16 w, F32x16 b) {
  g = f.grad_divide ? div(g, c.grad_factor) : mul(g, c.grad_factor);
  if (f.decay_kind == WeightDecay::kL2) g = fma(w, c.decay, g);
  if (f.decay_kind == WeightDecay::kDecoupled) w = mul(w, c.decay);
  F32x16 direction = g;
  if constexpr (kStep == MomentumStep::kLion) {
    direction = sign_of(fma(c.ahead_take, g, mul(c.ahead_keep, b)));
    b = fma(c.take, g, mul(c.keep, b));
  } else if constexpr (kStep == MomentumStep::kSgd) {
    b = f.starts ? g : fma(c.take, g, mul(c.keep, b));
    direction = f.nesterov ? fma(c.keep, b, g) : b;
  }
  return {fma(c.negative_lr, direction, w), b};
}

// `Rounded` is float if the rounded weight goes nowhere.
template <typename Grad, typename Rounded, MomentumStep kStep>
static void momentum_one_pass(const MomentumSlice& slice, std::int64_t begin, std::int64_t end) {
  constexpr bool kRounded = sizeof(Rounded) == 2;
  constexpr bool kMomentum = kStep != MomentumStep::kPlain;
  const MomentumFactors f = slice.factors;
  const MomentumVectors c = vectors_of(f);
  const Grad* grad = static_cast<const Grad*>(slice.grad);
  Rounded* rounded = static_cast<Rounded*>(slice.rounded);
  float* const weight = slice.weight;
  float* const momentum = slice.momentum;
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    __builtin_prefetch(weight + i + kAhead, 1);
    if constexpr (kMomentum) __builtin_prefetch(momentum + i + kAhead, 1);
    __builtin_prefetch(grad + i + kAhead);
    if constexpr (kRounded) __builtin_prefetch(rounded + i + kAhead, 1);
    F32x16 b = broadcast(0.0f);
    if constexpr (kMomentum) b = load(momentum + i);
    const WeightAndMomentum updated = momentum_step<kStep>(f, c, load(grad + i), load(weight + i), b);
    if constexpr (kMomentum) store(momentum + i, updated.momentum);
    store(weight + i, updated.weight);
    if constexpr (kRounded) store(rounded + i, updated.weight);
  }
  if (const std::int64_t rest = end - i; rest > 0) {
    F32x16 b = broadcast(0.0f);
    if constexpr (kMomentum) b = load_part(momentum + i, rest);
    const WeightAndMomentum updated =
        momentum_step<kStep>(f, c, load_part(grad + i, rest), load_part(weight + i, rest), b);
    if constexpr (kMomentum) store_part(momentum + i, updated.momentum, rest);
    store_part(weight + i, updated.weight, rest);
    if constexpr (kRounded) store_part(rounded + i, updated.weight, rest);
  }
}

template <typename Grad, typename Rounded>
static void momentum_rounded_to(const MomentumSlice& slice, std::int64_t begin, std::int64_t end) {
  if (slice.factors.rule == MomentumRule::kLion) {
    return momentum_one_pass<Grad, Rounded, MomentumStep::kLion>(slice, begin, end);
  }
  if (slice.momentum != nullptr) {
    return momentum_one_pass<Grad, Rounded, MomentumStep::kSgd>(slice, begin, end);
  }
  return momentum_one_pass<Grad, Rounded, MomentumStep::kPlain>(slice, begin, end);
}

template <typename Grad>
static void momentum_from(const MomentumSlice& slice, std::int64_t begin, std::int64_t end) {
  if (slice.rounded == nullptr) return momentum_rounded_to<Grad, float>(slice, begin, end);
  if (slice.rounded_dtype == DType::kBFloat16) return momentum_rounded_to<Grad, Bf16>(slice, begin, end);
  return momentum_rounded_to<Grad, Half>(slice, begin, end);
}

static void momentum(const MomentumSlice& slice, std::int64_t offset, std::int64_t n) {
  switch (slice.grad_dtype) {
    case DType::kFloat32:
      return momentum_from<float>(slice, offset, offset + n);
    case DType::kFloat16:
      return momentum_from<Half>(slice, offset, offset + n);
    case DType::kBFloat16:
      return momentum_from<Bf16>(slice, offset, offset + n);
    case DType::kFloat64:
      return;
  }
}
