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
  for_groups(
      begin, end, BMT_BODY(i, group) {
        fetch_to_write(weight + i, group);
        if constexpr (kMomentum) fetch_to_write(momentum + i, group);
        fetch(grad + i, group);
        if constexpr (kRounded) fetch_to_write(rounded + i, group);
        F32x16 b = broadcast(0.0f);
        if constexpr (kMomentum) b = load(momentum + i, group);
        const WeightAndMomentum updated =
            momentum_step<kStep>(f, c, load(grad + i, group), load(weight + i, group), b);
        if constexpr (kMomentum) store(momentum + i, updated.momentum, group);
        store(weight + i, updated.weight, group);
        if constexpr (kRounded) store(rounded + i, updated.weight, group);
      });
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

static void momentum(const MomentumSlice& slice, std::int64_t offset, std::int64_t n) {
  with_type(slice.grad_dtype, [&](auto grad) {
    with_type(slice.rounded == nullptr ? DType::kFloat32 : slice.rounded_dtype, [&](auto rounded) {
      momentum_rounded_to<decltype(grad), decltype(rounded)>(slice, offset, offset + n);
    });
  });
}
