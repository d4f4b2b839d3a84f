// One Adam step over a contiguous range, in one pass. See [Note: Adam in torch's operation order].

struct AdamVectors {
  F32x16 grad_factor, lerp_weight, beta2, one_minus_beta2, eps, negative_step_size, decay;
};

static inline AdamVectors vectors_of(const AdamFactors& f) {
  return {
      .grad_factor = broadcast(f.grad_factor),
      .lerp_weight = broadcast(f.lerp_weight),
      .beta2 = broadcast(f.beta2),
      .one_minus_beta2 = broadcast(f.one_minus_beta2),
      .eps = broadcast(f.eps),
      .negative_step_size = broadcast(f.negative_step_size),
      .decay = broadcast(f.decay),
  };
}

struct Moments {
  F32x16 exp_avg, exp_avg_sq;
};

// The first half: gradient and moments. `w` is the weight before the step.
static inline Moments update_moments(const AdamFactors& f, const AdamVectors& c, F32x16 g, F32x16 m, F32x16 v,
                                     F32x16 w) {
  g = f.grad_divide ? div(g, c.grad_factor) : mul(g, c.grad_factor);
  if (f.decay_kind == WeightDecay::kL2) g = fma(w, c.decay, g);
  // Two operations, and not one of a chosen operand, which the compiler would choose in memory.
  const F32x16 difference = sub(g, m);
  m = f.lerp_from_grad ? fma(c.lerp_weight, difference, g) : fma(c.lerp_weight, difference, m);
  v = fma(mul(c.one_minus_beta2, g), g, mul(c.beta2, v));
  return {m, v};
}

static inline F32x16 denominator(const AdamFactors& f, const AdamVectors& c, F32x16 root) {
  return add(div_by(root, f.bias_correction2_sqrt), c.eps);
}

// The second half: the weight.
static inline F32x16 updated_weight(const AdamFactors& f, const AdamVectors& c, F32x16 step, F32x16 d,
                                    F32x16 w) {
  if (f.decay_kind == WeightDecay::kDecoupled) w = mul(w, c.decay);
  return add(w, div(step, d));
}
static inline F32x16 update_weight(const AdamFactors& f, const AdamVectors& c, F32x16 m, F32x16 d, F32x16 w) {
  return updated_weight(f, c, mul(c.negative_step_size, m), d, w);
}

// What DeltaSums collects, lane by lane.
struct DeltaLanes {
  F64x16 sum, sum_of_squares;
};

static inline F32x16 delta_of(const AdamFactors& f, F32x16 m, F32x16 d, F32x16 w) {
  const F32x16 u = div(div(m, broadcast(f.bias_correction1)), d);
  return fma(broadcast(f.weight_decay), w, u);
}

// The bits of numbers, every NaN with those of one: which an operation gives it is up to the compiler. (Such
// vectors cannot be returned at every level.)
static inline void take_bits(U32x16& bits, const F32x16& x) {
  bits = __builtin_bit_cast(U32x16, x);
  // Bits of a sign, and not a comparison, which compilers take apart for AVX2.
  const auto is_nan = (U32x16)((S32x16)(0x7f800000u - (bits & 0x7fffffffu)) >> 31);
  bits = (bits & ~is_nan) | (is_nan & 0x7fc00000u);
}

// Rounds to one of the two neighbours in bf16: up if the part that is cut off and `noise`, below 2^16, carry.
static inline void store_dithered(Bf16* p, const U32x16& bits, const U32x16& noise) {
  store_upper_halves(p, __builtin_bit_cast(F32x16, bits + noise));
}

constexpr std::uint32_t kHash = 0x85ebca77u;

// Random numbers of 16 bits for the rounding of either moment, from the weight before the step and the first
// moment after it, in which every NaN has the same bits.
static inline void noise_of(U32x16 (&noise)[2], const AdamFactors& f, const F32x16& w,
                            const F32x16& exp_avg) {
  const F32x16 number = min_of(w, broadcast(__builtin_inff()));
  U32x16 hash = __builtin_bit_cast(U32x16, number) ^ __builtin_bit_cast(U32x16, exp_avg) ^ f.dither_seed;
  hash *= kHash;
  noise[0] = hash >> 16;
  noise[1] = (hash ^ noise[0]) & 0xffffu;
}

// Stores moments in either type.
template <typename Moment, typename Group>
static inline void store_moments(const AdamFactors& f, const F32x16& w, const Moments& moments,
                                 Moment* exp_avg, Moment* exp_avg_sq, Group group) {
  if constexpr (sizeof(Moment) == 4) {
    store(exp_avg, moments.exp_avg, group);
    store(exp_avg_sq, moments.exp_avg_sq, group);
  } else {
    U32x16 first;
    U32x16 second;
    take_bits(first, moments.exp_avg);
    take_bits(second, moments.exp_avg_sq);
    U32x16 noise[2];
    noise_of(noise, f, w, __builtin_bit_cast(F32x16, first));
    Bf16 m[16];
    Bf16 v[16];
    store_dithered(m, first, noise[0]);
    store_dithered(v, second, noise[1]);
    __builtin_memcpy(exp_avg, m, group.count * sizeof(Bf16));
    __builtin_memcpy(exp_avg_sq, v, group.count * sizeof(Bf16));
  }
}

template <typename Moment>
struct MomentArrays {
  Moment* exp_avg;
  Moment* exp_avg_sq;
};

template <typename Moment>
static MomentArrays<Moment> moment_arrays(const AdamSlice& slice) {
  if constexpr (sizeof(Moment) == 4) {
    return {slice.exp_avg, slice.exp_avg_sq};
  } else {
    return {static_cast<Bf16*>(slice.bf16_exp_avg), static_cast<Bf16*>(slice.bf16_exp_avg_sq)};
  }
}

// Whether a step divides no gradient and interpolates no moment from the gradient's side, as nearly all do.
static inline bool is_usual(const AdamFactors& f) { return !f.grad_divide && !f.lerp_from_grad; }

// `Rounded` is float if the rounded weight goes nowhere. With `kUsual` the loop, whose factors is_usual()
// knows, has no branches for other steps: in the caches they take a twentieth of the time.
template <typename Grad, typename Rounded, typename Moment, bool kDelta, bool kUsual>
static void adam_one_pass(const AdamSlice& slice, std::int64_t begin, std::int64_t end, DeltaSums* sums) {
  constexpr bool kRounded = sizeof(Rounded) == 2;
  AdamFactors f = slice.factors;
  if constexpr (kUsual) f.grad_divide = f.lerp_from_grad = false;
  const AdamVectors c = vectors_of(f);
  const Grad* grad = static_cast<const Grad*>(slice.grad);
  Rounded* rounded = static_cast<Rounded*>(slice.rounded);
  float* const weight = slice.weight;
  const auto [exp_avg, exp_avg_sq] = moment_arrays<Moment>(slice);
  DeltaLanes lanes = {broadcast(0.0), broadcast(0.0)};
  for_groups(
      begin, end, BMT_BODY(i, group) {
        fetch_to_write(weight + i, group);
        fetch_to_write(exp_avg + i, group);
        fetch_to_write(exp_avg_sq + i, group);
        fetch(grad + i, group);
        if constexpr (kRounded) fetch_to_write(rounded + i, group);
        const F32x16 w = load(weight + i, group);
        const Moments moments = update_moments(f, c, load(grad + i, group), load(exp_avg + i, group),
                                               load(exp_avg_sq + i, group), w);
        const F32x16 d = denominator(f, c, sqrt(moments.exp_avg_sq));
        const F32x16 updated = update_weight(f, c, moments.exp_avg, d, w);
        store_moments(f, w, moments, exp_avg + i, exp_avg_sq + i, group);
        store(weight + i, updated, group);
        if constexpr (kRounded) store(rounded + i, updated, group);
        if constexpr (kDelta) {
          float deltas[16];
          store(deltas, delta_of(f, moments.exp_avg, d, w));
          const F32x16 delta = load(deltas, group);  // with eps = 0 the lanes beyond are 0 / 0
          lanes = {add_lanes(lanes.sum, delta), add_squares(lanes.sum_of_squares, delta)};
        }
      });
  if constexpr (kDelta) *sums = {sum_of_lanes(lanes.sum), sum_of_lanes(lanes.sum_of_squares)};
}

#include "cpu/adam8.inl"

// The same with somebody else's square root: blocks small enough for the first cache, in three sweeps. Only
// fp32 parameters come here, whose weight is the parameter.
template <typename Grad>
static void adam_in_blocks(const AdamSlice& slice, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kBlock = 1024;
  const AdamFactors f = slice.factors;
  const AdamVectors c = vectors_of(f);
  const Grad* grad = static_cast<const Grad*>(slice.grad);
  alignas(64) float roots[kBlock];
  for (std::int64_t first = begin; first < end; first += kBlock) {
    const std::int64_t n = end - first < kBlock ? end - first : kBlock;
    float* const w = slice.weight + first;
    float* const m = slice.exp_avg + first;
    float* const v = slice.exp_avg_sq + first;
    const Grad* const g = grad + first;
    for_groups(
        0, n, BMT_BODY(i, group) {
          const Moments moments = update_moments(f, c, load(g + i, group), load(m + i, group),
                                                 load(v + i, group), load(w + i, group));
          store(m + i, moments.exp_avg, group);
          store(v + i, moments.exp_avg_sq, group);
        });
    f.sqrt(n, v, roots);
    for_groups(
        0, n, BMT_BODY(i, group) {
          const F32x16 d = denominator(f, c, load(roots + i, group));
          store(w + i, update_weight(f, c, load(m + i, group), d, load(w + i, group)), group);
        });
  }
}

template <typename Grad, typename Rounded, typename Moment>
static void adam_with_moments(const AdamSlice& slice, std::int64_t begin, std::int64_t end, DeltaSums* sums) {
  if (sums != nullptr) return adam_one_pass<Grad, Rounded, Moment, true, false>(slice, begin, end, sums);
  if (!is_usual(slice.factors))
    return adam_one_pass<Grad, Rounded, Moment, false, false>(slice, begin, end, sums);
  return adam_one_pass<Grad, Rounded, Moment, false, true>(slice, begin, end, sums);
}

template <typename Grad, typename Rounded>
static void adam_rounded_to(const AdamSlice& slice, std::int64_t begin, std::int64_t end, DeltaSums* sums) {
  if (slice.coded_exp_avg.codes != nullptr) return adam_coded<Grad, Rounded>(slice, begin, end);
  if (slice.bf16_exp_avg != nullptr) return adam_with_moments<Grad, Rounded, Bf16>(slice, begin, end, sums);
  return adam_with_moments<Grad, Rounded, float>(slice, begin, end, sums);
}

// The loads and stores of a 16-bit step and nothing else: its ceiling. It leaves weights and moments as they
// are.
static void adam_move(const AdamSlice& slice, std::int64_t offset, std::int64_t n) {
  if (slice.coded_exp_avg.codes != nullptr) return move_coded(slice, offset, n);
  const Bf16* const grad = static_cast<const Bf16*>(slice.grad);
  Bf16* const rounded = static_cast<Bf16*>(slice.rounded);
  float* const weight = slice.weight;
  float* const exp_avg = slice.exp_avg;
  float* const exp_avg_sq = slice.exp_avg_sq;
  std::int64_t i = offset;
  for (; i + 16 <= offset + n; i += 16) {
    __builtin_prefetch(weight + i + kAhead, 1);
    __builtin_prefetch(exp_avg + i + kAhead, 1);
    __builtin_prefetch(exp_avg_sq + i + kAhead, 1);
    __builtin_prefetch(grad + i + kAhead);
    __builtin_prefetch(rounded + i + kAhead, 1);
    const F32x16 w = load(weight + i);
    const F32x16 m = load(exp_avg + i);
    const F32x16 v = load(exp_avg_sq + i);
    __asm__ volatile("" ::: "memory");  // might have written there: no store can be left out
    store(weight + i, w);
    store(exp_avg + i, m);
    store(exp_avg_sq + i, v);
    __builtin_memcpy(rounded + i, grad + i, 16 * sizeof(Bf16));
  }
  for (; i < offset + n; ++i) rounded[i] = grad[i];
}

static void adam(const AdamSlice& slice, std::int64_t offset, std::int64_t n, DeltaSums* sums) {
  const std::int64_t end = offset + n;
  with_type(slice.grad_dtype, [&](auto grad) {
    using Grad = decltype(grad);
    if (slice.factors.sqrt != nullptr) return adam_in_blocks<Grad>(slice, offset, end);
    with_type(slice.rounded == nullptr ? DType::kFloat32 : slice.rounded_dtype,
              [&](auto rounded) { adam_rounded_to<Grad, decltype(rounded)>(slice, offset, end, sums); });
  });
}
