// One Adam step over moments in 8 bits. See [Note: Moments in 8 bits].

using I32x16 [[gnu::vector_size(64)]] = std::int32_t;

// Codes of one moment and the exponents of their blocks. A signed code has its sign in the highest bit.
struct SignedCodes {
  static constexpr std::uint32_t kTop = 127;
  std::uint8_t* codes;
  std::uint8_t* exponents;
};
struct UnsignedCodes {
  static constexpr std::uint32_t kTop = 255;
  std::uint8_t* codes;
  std::uint8_t* exponents;
};

// Bits of fp32 below those that a code has, and the place of fp32's exponent.
constexpr int kBelowCode = 20;
constexpr int kExponent = 23;
constexpr std::uint32_t kNotFinite = 255;

// Decodes 16 elements of a block.
template <typename Codes>
static inline F32x16 decode(const std::uint8_t* codes, std::uint32_t exponent) {
  if (exponent == kNotFinite) return broadcast(__builtin_nanf(""));
  const std::uint32_t zero_code = (exponent << kExponent) - (Codes::kTop << kBelowCode);
  const U32x16 code = __builtin_bit_cast(U32x16, load_bytes(codes));
  const U32x16 magnitude = code & Codes::kTop;
  U32x16 bits = (magnitude << kBelowCode) + zero_code;
  bits |= (code & ~Codes::kTop) << 24;
  bits = magnitude == 0 ? U32x16{} : bits;
  return __builtin_bit_cast(F32x16, bits);
}

// Random bits for the rounding of 16 elements of a block that becomes no NaN: 20 for each moment, of one
// hash. (Half of the work of dither_of(), which costs as much as what is saved of memory.)
static inline void dither_codes_of(U32x16& hash, const AdamFactors& f, const F32x16& w,
                                   const F32x16& exp_avg) {
  const I32x16 magnitude = __builtin_bit_cast(I32x16, w) & 0x7fffffff;
  const I32x16 nan = I32x16{} + 0x7fc00000;
  const I32x16 same_nan = magnitude < nan ? magnitude : nan;
  hash = (__builtin_bit_cast(U32x16, same_nan) + f.dither_seed) ^ __builtin_bit_cast(U32x16, exp_avg);
  hash *= 0x9e3779b1u;
  hash ^= hash >> 15;
}

// Encodes 16 elements of a block, rounded by `noise`, below 2^20.
template <typename Codes>
static inline void encode(std::uint8_t* codes, std::uint32_t exponent, const F32x16& x, const U32x16& noise) {
  const std::uint32_t offset = (Codes::kTop << kBelowCode) - (exponent << kExponent);
  const U32x16 bits = __builtin_bit_cast(U32x16, x);
  const U32x16 magnitude = Codes::kTop == 127 ? bits & 0x7fffffffu : bits;
  I32x16 code = __builtin_bit_cast(I32x16, magnitude + noise + offset) >> kBelowCode;
  // Only an unsigned code is kept above that of zero, as a divisor.
  const I32x16 least = __builtin_bit_cast(I32x16, magnitude);
  const I32x16 lowest = Codes::kTop == 127 ? I32x16{} : (least > 1 ? I32x16{} + 1 : least);
  code = code < lowest ? lowest : code;
  if constexpr (Codes::kTop == 127) code |= __builtin_bit_cast(I32x16, (bits >> 24) & 0x80u);
  store_bytes(codes, __builtin_bit_cast(F32x16, code));
}

// The exponent of a block: that of the power of two at or above all magnitudes, at least 2^-94, so that codes
// of zeros are 0.
static inline std::uint32_t exponent_of(const F32x16& low, const F32x16& high) {
  float lanes[16];
  store(lanes, max_magnitude(max_magnitude(broadcast(0.0f), low), high));
  std::uint32_t bits[16];
  __builtin_memcpy(bits, lanes, sizeof bits);
  std::uint32_t largest = 0;
  for (const std::uint32_t one : bits) largest = one > largest ? one : largest;
  const std::uint32_t exponent = (largest + ((1u << kExponent) - 1u)) >> kExponent;
  return exponent < 33 ? 33 : exponent > kNotFinite ? kNotFinite : exponent;
}

template <typename Codes>
static inline void encode_block(const Codes& codes, const F32x16& low, const F32x16& high,
                                const U32x16& low_noise, const U32x16& high_noise) {
  const std::uint32_t exponent = exponent_of(low, high);
  *codes.exponents = static_cast<std::uint8_t>(exponent);
  if (exponent == kNotFinite) {
    __builtin_memset(codes.codes, 0, kMomentBlock);
    return;
  }
  encode<Codes>(codes.codes, exponent, low, low_noise);
  encode<Codes>(codes.codes + 16, exponent, high, high_noise);
}

// Updates one block.
template <typename Grad, typename Rounded>
static inline void adam_block(const AdamFactors& f, const AdamVectors& c, const Grad* grad, float* weight,
                              Rounded* rounded, const SignedCodes& exp_avg, const UnsignedCodes& exp_avg_sq) {
  Moments moments[2];
  U32x16 noise[2];
  for (int half = 0; half < 2; ++half) {
    const int i = 16 * half;
    const F32x16 w = load(weight + i);
    moments[half] =
        update_moments(f, c, load(grad + i), decode<SignedCodes>(exp_avg.codes + i, *exp_avg.exponents),
                       decode<UnsignedCodes>(exp_avg_sq.codes + i, *exp_avg_sq.exponents), w);
    dither_codes_of(noise[half], f, w, moments[half].exp_avg);
    const F32x16 d = denominator(f, c, sqrt(moments[half].exp_avg_sq));
    const F32x16 updated = update_weight(f, c, moments[half].exp_avg, d, w);
    store(weight + i, updated);
    if constexpr (sizeof(Rounded) == 2) store(rounded + i, updated);
  }
  encode_block(exp_avg, moments[0].exp_avg, moments[1].exp_avg, noise[0] >> 12, noise[1] >> 12);
  encode_block(exp_avg_sq, moments[0].exp_avg_sq, moments[1].exp_avg_sq, noise[0] & 0xfffffu,
               noise[1] & 0xfffffu);
}

template <typename Grad, typename Rounded, bool kUsual>
static void adam_coded_pass(const AdamSlice& slice, std::int64_t begin, std::int64_t end) {
  constexpr bool kRounded = sizeof(Rounded) == 2;
  constexpr std::int64_t kAhead = 512;
  AdamFactors f = slice.factors;
  if constexpr (kUsual) f.grad_divide = f.lerp_from_grad = false;
  const AdamVectors c = vectors_of(f);
  const Grad* const grad = static_cast<const Grad*>(slice.grad);
  Rounded* const rounded = static_cast<Rounded*>(slice.rounded);
  const auto exp_avg = [&](std::int64_t i) {
    return SignedCodes{slice.coded_exp_avg.codes + i, slice.coded_exp_avg.exponents + i / kMomentBlock};
  };
  const auto exp_avg_sq = [&](std::int64_t i) {
    return UnsignedCodes{slice.coded_exp_avg_sq.codes + i,
                         slice.coded_exp_avg_sq.exponents + i / kMomentBlock};
  };
  std::int64_t i = begin;
  for (; i + kMomentBlock <= end; i += kMomentBlock) {
    for (int half = 0; half < 2; ++half) {
      __builtin_prefetch(slice.weight + i + 16 * half + kAhead, 1);
    }
    __builtin_prefetch(slice.coded_exp_avg.codes + i + kAhead, 1);
    __builtin_prefetch(slice.coded_exp_avg_sq.codes + i + kAhead, 1);
    __builtin_prefetch(grad + i + kAhead);
    if constexpr (kRounded) __builtin_prefetch(rounded + i + kAhead, 1);
    adam_block<Grad, Rounded>(f, c, grad + i, slice.weight + i, kRounded ? rounded + i : nullptr, exp_avg(i),
                              exp_avg_sq(i));
  }
  const std::int64_t rest = end - i;
  if (rest == 0) return;
  // A last, partial block goes through a whole one, whose other elements are 0.
  Grad last_grad[kMomentBlock] = {};
  float last_weight[kMomentBlock] = {};
  Rounded last_rounded[kMomentBlock] = {};
  std::uint8_t last_codes[2][kMomentBlock] = {};
  const auto bytes = static_cast<std::size_t>(rest);
  __builtin_memcpy(last_grad, grad + i, bytes * sizeof(Grad));
  __builtin_memcpy(last_weight, slice.weight + i, bytes * sizeof(float));
  __builtin_memcpy(last_codes[0], exp_avg(i).codes, bytes);
  __builtin_memcpy(last_codes[1], exp_avg_sq(i).codes, bytes);
  adam_block<Grad, Rounded>(f, c, last_grad, last_weight, last_rounded,
                            SignedCodes{last_codes[0], exp_avg(i).exponents},
                            UnsignedCodes{last_codes[1], exp_avg_sq(i).exponents});
  __builtin_memcpy(slice.weight + i, last_weight, bytes * sizeof(float));
  if constexpr (kRounded) __builtin_memcpy(rounded + i, last_rounded, bytes * sizeof(Rounded));
  __builtin_memcpy(exp_avg(i).codes, last_codes[0], bytes);
  __builtin_memcpy(exp_avg_sq(i).codes, last_codes[1], bytes);
}

template <typename Grad, typename Rounded>
static void adam_coded(const AdamSlice& slice, std::int64_t begin, std::int64_t end) {
  if (is_usual(slice.factors)) return adam_coded_pass<Grad, Rounded, true>(slice, begin, end);
  return adam_coded_pass<Grad, Rounded, false>(slice, begin, end);
}

// The loads and stores of a 16-bit step and nothing else.
static void move_coded(const AdamSlice& slice, std::int64_t offset, std::int64_t n) {
  constexpr std::int64_t kAhead = 512;
  const Bf16* const grad = static_cast<const Bf16*>(slice.grad);
  Bf16* const rounded = static_cast<Bf16*>(slice.rounded);
  const CodedArray* const arrays[2] = {&slice.coded_exp_avg, &slice.coded_exp_avg_sq};
  std::int64_t i = offset;
  for (; i + kMomentBlock <= offset + n; i += kMomentBlock) {
    __builtin_prefetch(slice.weight + i + kAhead, 1);
    __builtin_prefetch(slice.weight + i + 16 + kAhead, 1);
    __builtin_prefetch(grad + i + kAhead);
    __builtin_prefetch(rounded + i + kAhead, 1);
    const F32x16 w[2] = {load(slice.weight + i), load(slice.weight + i + 16)};
    std::uint8_t codes[2][kMomentBlock];
    std::uint8_t exponents[2];
    for (int k = 0; k < 2; ++k) {
      __builtin_prefetch(arrays[k]->codes + i + kAhead, 1);
      __builtin_memcpy(codes[k], arrays[k]->codes + i, kMomentBlock);
      exponents[k] = arrays[k]->exponents[i / kMomentBlock];
    }
    __asm__ volatile("" ::: "memory");  // might have written there: no store can be left out
    store(slice.weight + i, w[0]);
    store(slice.weight + i + 16, w[1]);
    for (int k = 0; k < 2; ++k) {
      __builtin_memcpy(arrays[k]->codes + i, codes[k], kMomentBlock);
      arrays[k]->exponents[i / kMomentBlock] = exponents[k];
    }
    __builtin_memcpy(rounded + i, grad + i, kMomentBlock * sizeof(Bf16));
  }
  for (; i < offset + n; ++i) rounded[i] = grad[i];
}
