// One Adam step over moments in 8 bits. See [Note: Moments in 8 bits].

// Blocks that are computed together: first all updates, whose divisions take long, then all codes.
constexpr std::int64_t kTogether = 4;
constexpr std::int64_t kGroup = kTogether * kMomentBlock;

// Codes of one moment and the exponents of their blocks. A signed code has its sign in the highest bit.
struct SignedCodes {
  static constexpr bool kSigned = true;
  static constexpr int kTop = 127;
  std::uint8_t* codes;
  std::uint8_t* exponents;
};
struct UnsignedCodes {
  static constexpr bool kSigned = false;
  static constexpr int kTop = 255;
  std::uint8_t* codes;
  std::uint8_t* exponents;
};

constexpr int kNotFinite = 255;
// Bits of bf16 below those that a code has, and the place of bf16's exponent.
constexpr int kBelowCode = 4;
constexpr int kExponent = 7;
// Bits of fp32 below those that a code has.
constexpr int kNoiseOfCode = 16 + kBelowCode;

// Constants that the compiler is not to know: it would make them anew in each turn, where memory has them for
// nothing.
struct CodeMasks {
  U16x32 sign, magnitude, signed_code, unsigned_code, decoded, least;
};
static inline void fill(CodeMasks& masks) {
  masks = {.sign = U16x32{} + std::uint16_t{0x8000},
           .magnitude = U16x32{} + std::uint16_t{0x7fff},
           .signed_code = U16x32{} + std::uint16_t{0x7f00},
           .unsigned_code = U16x32{} + std::uint16_t{0xff00},
           .decoded = U16x32{} + std::uint16_t{0x87f0},
           .least = U16x32{} + std::uint16_t{1 << kBelowCode}};
  __asm__ volatile("" : "+m"(masks));
}

// What is added to a code in the place of a bf16 number to get that number, in each word.
template <typename Codes>
static inline void zero_code_of(U16x32& zero_code, int exponent) {
  zero_code = U16x32{} + static_cast<std::uint16_t>((exponent << kExponent) - (Codes::kTop << kBelowCode));
}

// Decodes a block. Its words, in bf16 or codes, are in this order: word 2k is of element k, word 2k + 1 of
// element 16 + k. So either half of the block has 16 lanes of 32 bits, and takes one operation out of the
// words.
template <typename Codes>
[[gnu::always_inline]] static inline void decode(F32x16& low, F32x16& high, const Codes& from,
                                                 const CodeMasks& masks) {
  const int exponent = *from.exponents;
  if (exponent == kNotFinite) {
    low = high = broadcast(__builtin_nanf(""));
    return;
  }
  U16x32 codes;  // in the upper bytes
  U16x32 zero_code;
  load_codes(codes, from.codes);
  zero_code_of<Codes>(zero_code, exponent);
  U16x32 words;
  if constexpr (Codes::kSigned) {
    words = __builtin_bit_cast(U16x32, __builtin_bit_cast(I16x32, codes) >> 4) & masks.decoded;
    words = (codes & masks.signed_code) == 0 ? U16x32{} : words + zero_code;
  } else {
    words = codes >> 4;
    words = (codes & masks.unsigned_code) == 0 ? U16x32{} : words + zero_code;
  }
  const U32x16 pairs = __builtin_bit_cast(U32x16, words);
  low = __builtin_bit_cast(F32x16, pairs << 16);
  high = __builtin_bit_cast(F32x16, pairs & 0xffff0000u);
}

// Encodes a block of magnitudes with signs, in words. See [Note: Moments in 8 bits].
template <typename Codes>
[[gnu::always_inline]] static inline void encode(const Codes& to, int exponent, const U16x32& words,
                                                 const CodeMasks& masks) {
  *to.exponents = static_cast<std::uint8_t>(exponent);
  if (exponent == kNotFinite) {
    __builtin_memset(to.codes, 0, kMomentBlock);
    return;
  }
  U16x32 zero_code;
  zero_code_of<Codes>(zero_code, exponent);
  U16x32 codes;
  if constexpr (Codes::kSigned) {
    const U16x32 magnitudes = words & masks.magnitude;
    codes = (magnitudes > zero_code ? magnitudes : zero_code) - zero_code;
    codes = ((codes << 4) & masks.magnitude) | (words & masks.sign);
  } else {
    const U16x32 divisor = words < masks.least ? words : masks.least;
    codes = (words > zero_code ? words : zero_code) - zero_code;
    codes = (codes > divisor ? codes : divisor) << 4;
  }
  store_codes(to.codes, codes);
}

// Updates 16 elements. Replaces the moments by their bits with the noise added.
template <typename Grad, typename Rounded>
[[gnu::always_inline]] static inline void adam_half_block(const AdamFactors& f, const AdamVectors& c,
                                                          const Grad* grad, float* weight, Rounded* rounded,
                                                          F32x16& exp_avg, F32x16& exp_avg_sq) {
  const F32x16 infinity = broadcast(__builtin_inff());
  const F32x16 w = load(weight);
  const Moments moments = update_moments(f, c, load(grad), exp_avg, exp_avg_sq, w);
  // A NaN, whose bits may be any, as infinity: both make the block NaN.
  const F32x16 first = min_of(moments.exp_avg, infinity);
  const F32x16 second = min_of(moments.exp_avg_sq, infinity);
  U32x16 noise[2];
  noise_of<kNoiseOfCode>(noise, f, w, first);
  exp_avg = __builtin_bit_cast(F32x16, __builtin_bit_cast(U32x16, first) + noise[0]);
  exp_avg_sq = __builtin_bit_cast(F32x16, __builtin_bit_cast(U32x16, second) + noise[1]);
  const F32x16 d = denominator(f, c, sqrt(moments.exp_avg_sq));
  const F32x16 updated = update_weight(f, c, moments.exp_avg, d, w);
  store(weight, updated);
  if constexpr (sizeof(Rounded) == 2) store(rounded, updated);
}

static inline void join_words(U16x32& words, const F32x16& low, const F32x16& high) {
  const U32x16 upper = __builtin_bit_cast(U32x16, high) & 0xffff0000u;
  words = __builtin_bit_cast(U16x32, (__builtin_bit_cast(U32x16, low) >> 16) | upper);
}

// Updates kTogether blocks.
template <typename Grad, typename Rounded>
[[gnu::always_inline]] static inline void adam_group(const AdamFactors& f, const AdamVectors& c,
                                                     const CodeMasks& masks, const Grad* grad, float* weight,
                                                     Rounded* rounded, const SignedCodes& exp_avg,
                                                     const UnsignedCodes& exp_avg_sq) {
  U16x32 words[2][kTogether];
  U16x32 magnitudes[2 * kTogether];
  for (std::int64_t k = 0; k < kTogether; ++k) {
    const std::int64_t i = k * kMomentBlock;
    F32x16 m[2];
    F32x16 v[2];
    decode(m[0], m[1], SignedCodes{exp_avg.codes + i, exp_avg.exponents + k}, masks);
    decode(v[0], v[1], UnsignedCodes{exp_avg_sq.codes + i, exp_avg_sq.exponents + k}, masks);
    adam_half_block(f, c, grad + i, weight + i, rounded + i, m[0], v[0]);
    adam_half_block(f, c, grad + i + 16, weight + i + 16, rounded + i + 16, m[1], v[1]);
    join_words(words[0][k], m[0], m[1]);
    join_words(words[1][k], v[0], v[1]);
    magnitudes[k] = words[0][k] & masks.magnitude;
    magnitudes[kTogether + k] = words[1][k];
  }
  // The exponent of a block is that of the power of two at or above all that is encoded, at least 2^-94, so
  // that codes of zeros are 0.
  std::uint16_t largest[2 * kTogether];
  max_of_words(largest, magnitudes);
  for (std::int64_t k = 0; k < kTogether; ++k) {
    int exponents[2];
    for (int which = 0; which < 2; ++which) {
      const int exponent = ((largest[which * kTogether + k] >> kBelowCode) + 7) >> (kExponent - kBelowCode);
      exponents[which] = exponent < 33 ? 33 : exponent > kNotFinite ? kNotFinite : exponent;
    }
    const std::int64_t i = k * kMomentBlock;
    encode(SignedCodes{exp_avg.codes + i, exp_avg.exponents + k}, exponents[0], words[0][k], masks);
    encode(UnsignedCodes{exp_avg_sq.codes + i, exp_avg_sq.exponents + k}, exponents[1], words[1][k], masks);
  }
}

template <typename Grad, typename Rounded, bool kUsual>
static void adam_coded_pass(const AdamSlice& slice, std::int64_t begin, std::int64_t end) {
  constexpr bool kRounded = sizeof(Rounded) == 2;
  constexpr std::int64_t kAhead = 512;
  AdamFactors f = slice.factors;
  if constexpr (kUsual) f.grad_divide = f.lerp_from_grad = false;
  const AdamVectors c = vectors_of(f);
  CodeMasks masks;
  fill(masks);
  const Grad* const grad = static_cast<const Grad*>(slice.grad);
  Rounded* const rounded = static_cast<Rounded*>(slice.rounded);
  float* const weight = slice.weight;
  const CodedArray exp_avg = slice.coded_exp_avg;
  const CodedArray exp_avg_sq = slice.coded_exp_avg_sq;
  std::int64_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    for (std::int64_t ahead = i + kAhead; ahead < i + kAhead + kGroup; ahead += kMomentBlock) {
      __builtin_prefetch(weight + ahead, 1);
      __builtin_prefetch(weight + ahead + 16, 1);
      __builtin_prefetch(grad + ahead);
      if constexpr (kRounded) __builtin_prefetch(rounded + ahead, 1);
    }
    for (std::int64_t ahead = i + kAhead; ahead < i + kAhead + kGroup; ahead += 64) {
      __builtin_prefetch(exp_avg.codes + ahead, 1);
      __builtin_prefetch(exp_avg_sq.codes + ahead, 1);
    }
    adam_group(f, c, masks, grad + i, weight + i, kRounded ? rounded + i : nullptr,
               SignedCodes{exp_avg.codes + i, exp_avg.exponents + i / kMomentBlock},
               UnsignedCodes{exp_avg_sq.codes + i, exp_avg_sq.exponents + i / kMomentBlock});
  }
  const std::int64_t rest = end - i;
  if (rest == 0) return;
  // The last blocks go through a whole group, whose other elements are 0.
  Grad last_grad[kGroup] = {};
  float last_weight[kGroup] = {};
  Rounded last_rounded[kGroup] = {};
  std::uint8_t last_codes[2][kGroup] = {};
  std::uint8_t last_exponents[2][kTogether] = {};
  const auto count = static_cast<std::size_t>(rest);
  const std::size_t blocks = (count + kMomentBlock - 1) / kMomentBlock;
  const CodedArray moments[2] = {exp_avg, exp_avg_sq};
  __builtin_memcpy(last_grad, grad + i, count * sizeof(Grad));
  __builtin_memcpy(last_weight, weight + i, count * sizeof(float));
  for (int k = 0; k < 2; ++k) {
    __builtin_memcpy(last_codes[k], moments[k].codes + i, count);
    __builtin_memcpy(last_exponents[k], moments[k].exponents + i / kMomentBlock, blocks);
  }
  AdamSlice last = slice;
  last.grad = last_grad;
  last.weight = last_weight;
  last.rounded = last_rounded;
  last.coded_exp_avg = {last_codes[0], last_exponents[0]};
  last.coded_exp_avg_sq = {last_codes[1], last_exponents[1]};
  adam_coded_pass<Grad, Rounded, kUsual>(last, 0, kGroup);
  __builtin_memcpy(weight + i, last_weight, count * sizeof(float));
  if constexpr (kRounded) __builtin_memcpy(rounded + i, last_rounded, count * sizeof(Rounded));
  for (int k = 0; k < 2; ++k) {
    __builtin_memcpy(moments[k].codes + i, last_codes[k], count);
    __builtin_memcpy(moments[k].exponents + i / kMomentBlock, last_exponents[k], blocks);
  }
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
