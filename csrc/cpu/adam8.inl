// One Adam step over moments in 8 bits. See [Note: Moments in 8 bits].

#include "cpu/words.inl"

// Blocks that are computed together: first all updates, whose divisions take long, then all codes.
constexpr std::int64_t kTogether = 4;
constexpr std::int64_t kGroup = kTogether * kMomentBlock;

// As kAhead: a group takes less time than as many elements with moments in fp32.
constexpr std::int64_t kCodedAhead = 768;

// [Note: Words of a block]
// A block of 32 elements is decoded and encoded in 16-bit words, each the upper half of an fp32 number. The
// words are in registers of the level's size, two of fp32 numbers for one of words: word 2k is of element k
// of the first, word 2k + 1 of element k of the second, so that one operation takes either out of the words.

constexpr int kNotFinite = 255;
// Bits of bf16 below those that a code has, and the place of bf16's exponent.
constexpr int kBelowCode = 4;
constexpr int kExponent = 7;
// Bits of fp32 below those that a code has.
constexpr int kNoiseOfCode = 16 + kBelowCode;

// Codes of a moment. Signed ones have the sign in the highest bit.
enum class Codes : std::uint8_t { kSigned, kUnsigned };

static inline Words::Part word(std::uint16_t x) { return Words::Part{} + x; }

// Constants that the compiler is not to know: it would make them anew in each turn, where memory has them for
// nothing.
struct CodeMasks {
  U16x8 tops, least_exponents, not_finite;  // of the blocks of a group
  Words::Part sign, magnitude, decoded, decoded_magnitude, least;
};
static inline void fill(CodeMasks& masks) {
  constexpr std::uint16_t kSignedTop = 127 << kBelowCode;
  constexpr std::uint16_t kTop = 255 << kBelowCode;
  masks = {.tops = U16x8{kSignedTop, kSignedTop, kSignedTop, kSignedTop, kTop, kTop, kTop, kTop},
           .least_exponents = U16x8{} + std::uint16_t{33},
           .not_finite = U16x8{} + std::uint16_t{kNotFinite},
           .sign = word(0x8000),
           .magnitude = word(0x7fff),
           .decoded = word(0x87f0),
           .decoded_magnitude = word(0x07f0),
           .least = word(1 << kBelowCode)};
  __asm__ volatile("" : "+m"(masks));
}

// Both moments, from the same element on.
struct CodedMoments {
  CodedArray exp_avg, exp_avg_sq;

  [[nodiscard]] CodedMoments from(std::int64_t i) const {
    const std::int64_t block = i / kMomentBlock;
    return {{exp_avg.codes + i, exp_avg.exponents + block},
            {exp_avg_sq.codes + i, exp_avg_sq.exponents + block}};
  }
};

// Of the blocks of a group, first of the first moment, then of the second.
struct GroupExponents {
  std::uint64_t bytes;  // one for each, the first one lowest
  // What is added to a code in the place of a bf16 number to get that number, in both halves.
  alignas(16) std::uint32_t zero_codes[2 * kTogether];

  void load(const CodedMoments& moments, const CodeMasks& masks) {
    std::uint32_t parts[2];
    __builtin_memcpy(&parts[0], moments.exp_avg.exponents, kTogether);
    __builtin_memcpy(&parts[1], moments.exp_avg_sq.exponents, kTogether);
    bytes = parts[0] | std::uint64_t{parts[1]} << 32;
    U16x8 exponents;
    words_of_bytes(exponents, bytes);
    set_zero_codes(exponents, masks);
  }
  void store(const CodedMoments& moments) const {
    const std::uint32_t parts[2] = {static_cast<std::uint32_t>(bytes),
                                    static_cast<std::uint32_t>(bytes >> 32)};
    __builtin_memcpy(moments.exp_avg.exponents, &parts[0], kTogether);
    __builtin_memcpy(moments.exp_avg_sq.exponents, &parts[1], kTogether);
  }
  void set(const U16x8& exponents, const CodeMasks& masks) {
    bytes = bytes_of_words(exponents);
    set_zero_codes(exponents, masks);
  }
  [[nodiscard]] bool is_finite(int i) const { return (bytes >> 8 * i & 0xff) != kNotFinite; }
  // Whether none is kNotFinite: no byte of the complement is 0, so that subtracting 1 from all sets no upper
  // bit that was not set.
  [[nodiscard]] bool all_finite() const {
    constexpr std::uint64_t kOnes = 0x0101010101010101u;
    return ((~bytes - kOnes) & bytes & kOnes << 7) == 0;
  }

 private:
  void set_zero_codes(const U16x8& exponents, const CodeMasks& masks) {
    store_twice(zero_codes, (exponents << kExponent) - masks.tops);
  }
};

// Elements that are computed at once, and vectors of them.
constexpr int kUnit = Words::kElements;
constexpr int kVectors = kUnit / 16;
constexpr int kUnits = kMomentBlock / kUnit;

static inline void fill_part(Words::Part& part, std::uint32_t pair) {
  part = (Words::Part)(Words::Bits{} + pair);
}

template <Codes kCodes>
[[gnu::always_inline]] static inline void decode(F32x16 (&x)[kVectors], const std::uint8_t* codes,
                                                 std::uint32_t zero_code, const CodeMasks& masks) {
  Words words;
  load_codes(words, codes);
  Words::Part zero;
  fill_part(zero, zero_code);
  for (Words::Part& part : words.part) {
    if constexpr (kCodes == Codes::kSigned) {
      const auto code = (Words::Part)((Words::SignedPart)part >> kBelowCode);
      part = (code & masks.decoded) + zero;
      clear_where_0(part, code, masks.decoded_magnitude);
    } else {
      const Words::Part code = part >> kBelowCode;
      part = code + zero;
      clear_where_0(part, code, code);
    }
  }
  split_words(x, words);
}

// Encodes magnitudes with signs. See [Note: Moments in 8 bits].
template <Codes kCodes>
[[gnu::always_inline]] static inline void encode(std::uint8_t* codes, std::uint32_t zero_code,
                                                 const Words (&words)[kUnits], const CodeMasks& masks) {
  Words::Part zero;
  fill_part(zero, zero_code);
  Words out[kUnits];
  for (int unit = 0; unit < kUnits; ++unit) {
    for (int i = 0; i < Words::kParts; ++i) {
      const Words::Part& part = words[unit].part[i];
      Words::Part code;
      if constexpr (kCodes == Codes::kSigned) {
        code = part & masks.magnitude;
        subtract_to_0(code, zero);
        code = (code << kBelowCode) | (part & masks.sign);
      } else {
        const Words::Part least = part < masks.least ? part : masks.least;
        code = part;
        subtract_to_0(code, zero);
        code = (code > least ? code : least) << kBelowCode;
      }
      out[unit].part[i] = code;
    }
  }
  store_codes(codes, out);
}

// Adds the bits of the rounding to both moments, a hash of the weight before and the first moment after it.
[[gnu::always_inline]] static inline void add_noise(const AdamFactors& f, const F32x16& w, F32x16& exp_avg,
                                                    F32x16& exp_avg_sq) {
  for (int i = 0; i < kRegisters; ++i) {
    const Words::Bits first = bits_at(exp_avg, i);
    const Words::Bits hash = (bits_at(w, i) ^ first ^ f.dither_seed) * kHash;
    const Words::Bits noise = hash >> (32 - kNoiseOfCode);
    set_bits(exp_avg, i, first + noise);
    set_bits(exp_avg_sq, i, bits_at(exp_avg_sq, i) + noise);
  }
}

// [Note: Two sweeps over a group]
// A weight waits for a root and a division, a code for the largest number of its block. A processor that
// takes all of an element before the next waits with them. So the first sweep over the blocks of a group ends
// at roots, and the second one has the divisions. While it waits for these, it makes the codes of the group
// before: the first sweep has more to compute than its roots take.
struct GroupScratch {
  alignas(64) float steps[kGroup];  // what is divided
  alignas(64) float roots[kGroup];
  Words words[2 * kTogether][kUnits];  // moments with their noise, first those of the first moment
  GroupExponents exponents;            // of these moments
};

// Makes the blocks that are not finite decode to NaN, by codes in memory that will be replaced.
static void decode_to_nan(GroupExponents& group, const CodedMoments& coded) {
  constexpr std::uint32_t kNan = 0x7fc0;
  const CodedArray* const arrays[2] = {&coded.exp_avg, &coded.exp_avg_sq};
  const std::uint32_t tops[2] = {127, 255};
  for (int i = 0; i < 2 * kTogether; ++i) {
    if (group.is_finite(i)) continue;
    const std::uint32_t top = tops[i / kTogether];
    __builtin_memset(arrays[i / kTogether]->codes + i % kTogether * kMomentBlock, static_cast<int>(top),
                     kMomentBlock);
    group.zero_codes[i] = (kNan - (top << kBelowCode)) * 0x10001u;
  }
}

// The first sweep over some elements of block k.
template <typename Grad>
[[gnu::always_inline]] static inline void take_moments(const AdamFactors& f, const AdamVectors& c,
                                                       const CodeMasks& masks, const GroupExponents& group,
                                                       int k, int unit, const Grad* grad, const float* weight,
                                                       const CodedMoments& coded, GroupScratch& scratch) {
  const std::int64_t begin = k * kMomentBlock + unit * kUnit;
  F32x16 m[kVectors];
  F32x16 v[kVectors];
  decode<Codes::kSigned>(m, coded.exp_avg.codes + begin, group.zero_codes[k], masks);
  decode<Codes::kUnsigned>(v, coded.exp_avg_sq.codes + begin, group.zero_codes[kTogether + k], masks);
  const F32x16 infinity = broadcast(__builtin_inff());
  for (int at = 0; at < kVectors; ++at) {
    const std::int64_t i = begin + 16 * at;
    const F32x16 w = load(weight + i);
    const Moments moments = update_moments(f, c, load(grad + i), m[at], v[at], w);
    store(scratch.steps + i, mul(c.negative_step_size, moments.exp_avg));
    store(scratch.roots + i, sqrt(moments.exp_avg_sq));
    // A NaN, whose bits may be any, as infinity: both make the block NaN.
    m[at] = min_of(moments.exp_avg, infinity);
    v[at] = min_of(moments.exp_avg_sq, infinity);
    add_noise(f, w, m[at], v[at]);
  }
  join_words(scratch.words[k][unit], m);
  join_words(scratch.words[kTogether + k][unit], v);
}

// The exponent of a block is that of the power of two at or above all that is encoded, at least 2^-94, so
// that codes of zeros are 0.
static inline void choose_exponents(GroupScratch& scratch, const CodeMasks& masks) {
  Words magnitudes[2 * kTogether];
  for (int k = 0; k < 2 * kTogether; ++k) {
    for (int i = 0; i < Words::kParts; ++i) {
      for (int unit = 0; unit < kUnits; ++unit) {
        Words::Part x = scratch.words[k][unit].part[i];
        if (k < kTogether) x &= masks.magnitude;
        Words::Part& largest = magnitudes[k].part[i];
        largest = unit == 0 ? x : x > largest ? x : largest;
      }
    }
  }
  U16x8 largest;
  max_of_words(largest, magnitudes);
  U16x8 exponents = ((largest >> kBelowCode) + 7) >> (kExponent - kBelowCode);
  exponents = exponents > masks.least_exponents ? exponents : masks.least_exponents;
  exponents = exponents < masks.not_finite ? exponents : masks.not_finite;
  scratch.exponents.set(exponents, masks);
}

[[gnu::always_inline]] static inline void encode_block(const GroupScratch& scratch, const CodeMasks& masks,
                                                       int k, const CodedMoments& coded) {
  const std::int64_t begin = k * kMomentBlock;
  const int second = kTogether + k;
  const std::uint32_t* const zero_codes = scratch.exponents.zero_codes;
  encode<Codes::kSigned>(coded.exp_avg.codes + begin, zero_codes[k], scratch.words[k], masks);
  encode<Codes::kUnsigned>(coded.exp_avg_sq.codes + begin, zero_codes[second], scratch.words[second], masks);
}

// Stores the exponents of a group whose blocks have been encoded.
static inline void store_exponents(const GroupExponents& group, const CodedMoments& coded) {
  group.store(coded);
  if (group.all_finite()) [[likely]]
    return;
  std::uint8_t* const codes[2] = {coded.exp_avg.codes, coded.exp_avg_sq.codes};
  for (int i = 0; i < 2 * kTogether; ++i) {
    if (!group.is_finite(i))
      __builtin_memset(codes[i / kTogether] + i % kTogether * kMomentBlock, 0, kMomentBlock);
  }
}

// Updates kTogether blocks, encodes those of the group before unless that is nullptr, and fetches as many
// ahead, a part in each sweep: a burst would be waited for.
template <typename Grad, typename Rounded>
[[gnu::always_inline]] static inline void adam_group(const AdamFactors& f, const AdamVectors& c,
                                                     const CodeMasks& masks, const Grad* grad, float* weight,
                                                     Rounded* rounded, const CodedMoments& coded,
                                                     GroupScratch& scratch, const GroupScratch* before) {
  GroupExponents group;
  group.load(coded, masks);
  if (!group.all_finite()) [[unlikely]]
    decode_to_nan(group, coded);
  for (int k = 0; k < kTogether; ++k) {
    const std::int64_t ahead = kCodedAhead + k * kMomentBlock;
    __builtin_prefetch(weight + ahead, 1);
    __builtin_prefetch(weight + ahead + 16, 1);
    for (int unit = 0; unit < kUnits; ++unit)
      take_moments(f, c, masks, group, k, unit, grad, weight, coded, scratch);
  }
#pragma GCC unroll 4
  for (int k = 0; k < kTogether; ++k) {
    const std::int64_t begin = k * kMomentBlock;
    __builtin_prefetch(grad + begin + kCodedAhead);
    if constexpr (sizeof(Rounded) == 2) __builtin_prefetch(rounded + begin + kCodedAhead, 1);
    __builtin_prefetch((k % 2 == 0 ? coded.exp_avg.codes : coded.exp_avg_sq.codes) + begin + kCodedAhead, 1);
    for (std::int64_t i = begin; i < begin + kMomentBlock; i += 16) {
      const F32x16 d = add(load(scratch.roots + i), c.eps);
      const F32x16 updated = updated_weight(f, c, load(scratch.steps + i), d, load(weight + i));
      store(weight + i, updated);
      if constexpr (sizeof(Rounded) == 2) store(rounded + i, updated);
    }
    if (before != nullptr) [[likely]]
      encode_block(*before, masks, k, coded.from(-kGroup));
  }
  if (before != nullptr) [[likely]]
    store_exponents(before->exponents, coded.from(-kGroup));
  choose_exponents(scratch, masks);
}

template <typename Grad, typename Rounded, bool kUsual>
static void adam_coded_pass(const AdamSlice& slice, std::int64_t begin, std::int64_t end) {
  constexpr bool kRounded = sizeof(Rounded) == 2;
  AdamFactors f = slice.factors;
  if constexpr (kUsual) f.grad_divide = f.lerp_from_grad = false;
  const AdamVectors c = vectors_of(f);
  CodeMasks masks;
  fill(masks);
  GroupScratch scratch[2];  // of a group, and of the one before it
  GroupScratch* now = &scratch[0];
  GroupScratch* before = nullptr;
  const Grad* const grad = static_cast<const Grad*>(slice.grad);
  Rounded* const rounded = static_cast<Rounded*>(slice.rounded);
  float* const weight = slice.weight;
  const CodedMoments coded = {slice.coded_exp_avg, slice.coded_exp_avg_sq};
  std::int64_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    adam_group(f, c, masks, grad + i, weight + i, kRounded ? rounded + i : nullptr, coded.from(i), *now,
               before);
    before = now;
    now = &scratch[now == &scratch[0] ? 1 : 0];
  }
  if (before != nullptr) {
    for (int k = 0; k < kTogether; ++k) encode_block(*before, masks, k, coded.from(i - kGroup));
    store_exponents(before->exponents, coded.from(i - kGroup));
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
  const CodedArray moments[2] = {coded.exp_avg, coded.exp_avg_sq};
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
