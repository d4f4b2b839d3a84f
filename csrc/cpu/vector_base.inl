// Vectors of 16 lanes in plain C++. See [Note: One body, several levels] for what must agree between the
// levels.

struct F32x16 {
  float lane[16];
};

struct F64x16 {
  double lane[16];
};

static inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
static inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }

// Conversions of one element. A NaN becomes 0x7fc0 in bf16, and in fp16 keeps its sign and upper payload and
// becomes quiet, as the processor's own conversion has it.

static inline float to_float(float x) { return x; }

static inline float to_float(Bf16 x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }

static inline float to_float(Half x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude > 0x7c00u) return float_of(sign | 0x7fc00000u | (magnitude << 13));
  if (magnitude == 0x7c00u) return float_of(sign | 0x7f800000u);
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + (112u << 23)));
  // Denormal or zero: exact in fp32.
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
}

static inline void from_float(float x, float* out) { *out = x; }

static inline void from_float(float x, Bf16* out) {
  const std::uint32_t bits = bits_of(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = nan ? 0x7fc0u : static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void from_float(float x, Half* out) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 2^16 or more
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal in fp16
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude < 0x33000000u) {  // below half of the smallest denormal
    half = 0;
  } else {
    const std::uint32_t shift = 126u - (magnitude >> 23);  // 14 to 24
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
    const std::uint32_t tie = 1u << (shift - 1u);
    half = mantissa >> shift;
    half += rest > tie || (rest == tie && (half & 1u) != 0u) ? 1u : 0u;
  }
  out->bits = static_cast<std::uint16_t>(sign | half);
}

template <typename T>
static inline F32x16 load(const T* p) {
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    T x;
    __builtin_memcpy(&x, p + i, sizeof(T));
    out.lane[i] = to_float(x);
  }
  return out;
}

template <typename T>
static inline void store(T* p, F32x16 x) {
  for (int i = 0; i < 16; ++i) {
    T y;
    from_float(x.lane[i], &y);
    __builtin_memcpy(p + i, &y, sizeof(T));
  }
}

static inline void store_upper_halves(Bf16* p, F32x16 x) {
  for (int i = 0; i < 16; ++i) p[i].bits = static_cast<std::uint16_t>(bits_of(x.lane[i]) >> 16);
}

// Words of some elements, see [Note: Words of a block].
struct Words {
  static constexpr int kElements = 16;
  static constexpr int kParts = 2;
  using Part [[gnu::vector_size(16)]] = std::uint16_t;
  using SignedPart [[gnu::vector_size(16)]] = std::int16_t;
  using Bits [[gnu::vector_size(16)]] = std::uint32_t;
  Part part[kParts];
};
static constexpr int kRegisters = 4;
static inline Words::Bits bits_at(const F32x16& x, int i) {
  Words::Bits bits;
  __builtin_memcpy(&bits, x.lane + 4 * i, sizeof bits);
  return bits;
}
static inline void set_bits(F32x16& x, int i, Words::Bits bits) {
  __builtin_memcpy(x.lane + 4 * i, &bits, sizeof bits);
}

// The place of the word of element i.
static inline int word_of(int i) { return i / 8 * 8 + 2 * (i % 4) + i / 4 % 2; }
// Codes in the upper bytes of words.
static inline void load_codes(Words& codes, const std::uint8_t* p) {
  std::uint16_t words[16];
  for (int i = 0; i < 16; ++i) words[word_of(i)] = static_cast<std::uint16_t>(p[i] << 8);
  __builtin_memcpy(&codes, words, sizeof codes);
}
static inline void store_codes(std::uint8_t* p, const Words (&codes)[2]) {
  std::uint16_t words[32];
  __builtin_memcpy(words, codes, sizeof codes);
  for (int i = 0; i < 32; ++i) p[i] = static_cast<std::uint8_t>(words[word_of(i)] >> 8);
}
static inline void split_words(F32x16 (&x)[1], const Words& words) {
  std::uint16_t from[16];
  __builtin_memcpy(from, &words, sizeof words);
  for (int i = 0; i < 16; ++i) x[0].lane[i] = float_of(static_cast<std::uint32_t>(from[word_of(i)]) << 16);
}
static inline void join_words(Words& words, const F32x16 (&x)[1]) {
  std::uint16_t to[16];
  for (int i = 0; i < 16; ++i) to[word_of(i)] = static_cast<std::uint16_t>(bits_of(x[0].lane[i]) >> 16);
  __builtin_memcpy(&words, to, sizeof words);
}
// x - y, or 0 where that is less.
static inline void subtract_to_0(Words::Part& x, const Words::Part& y) { x = (x > y ? x : y) - y; }
// 0 where y is 0.
static inline void clear_where_0(Words::Part& x, const Words::Part& y) { x = y == 0 ? y : x; }
// The largest word of each block.
static inline void max_of_words(U16x8& largest, const Words (&words)[8]) {
  for (int i = 0; i < 8; ++i) {
    std::uint16_t from[16];
    __builtin_memcpy(from, &words[i], sizeof from);
    largest[i] = 0;
    for (const std::uint16_t word : from) largest[i] = word > largest[i] ? word : largest[i];
  }
}

#define BMT_LANEWISE(expression)                           \
  F32x16 out;                                              \
  for (int i = 0; i < 16; ++i) out.lane[i] = (expression); \
  return out

static inline F32x16 broadcast(float x) { BMT_LANEWISE(x); }
static inline F32x16 add(F32x16 a, F32x16 b) { BMT_LANEWISE(a.lane[i] + b.lane[i]); }
static inline F32x16 sub(F32x16 a, F32x16 b) { BMT_LANEWISE(a.lane[i] - b.lane[i]); }
static inline F32x16 mul(F32x16 a, F32x16 b) { BMT_LANEWISE(a.lane[i] * b.lane[i]); }
static inline F32x16 div(F32x16 a, F32x16 b) { BMT_LANEWISE(a.lane[i] / b.lane[i]); }
static inline F32x16 div_by(F32x16 x, const Divisor& d) { BMT_LANEWISE(x.lane[i] / d.value); }
static inline F32x16 sqrt(F32x16 a) { BMT_LANEWISE(__builtin_sqrtf(a.lane[i])); }
// a if that is less, else b, also if a is NaN.
static inline F32x16 min_of(F32x16 a, F32x16 b) {
  BMT_LANEWISE(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]);
}
// a * b + c with one rounding.
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  BMT_LANEWISE(__builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]));
}
#undef BMT_LANEWISE

static inline F64x16 load(const double* p) {
  F64x16 out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}
static inline void store(double* p, F64x16 x) { __builtin_memcpy(p, &x, sizeof x); }

static inline F64x16 broadcast(double x) {
  F64x16 out;
  for (int i = 0; i < 16; ++i) out.lane[i] = x;
  return out;
}
static inline F64x16 add(F64x16 a, F64x16 b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
static inline F64x16 mul(F64x16 a, F64x16 b) {
  for (int i = 0; i < 16; ++i) a.lane[i] *= b.lane[i];
  return a;
}

// total + x and total + x * x, lane by lane in fp64, where the square of an fp32 number is exact.
static inline F64x16 add_lanes(F64x16 total, F32x16 x) {
  for (int i = 0; i < 16; ++i) total.lane[i] += static_cast<double>(x.lane[i]);
  return total;
}
static inline F64x16 add_squares(F64x16 total, F32x16 x) {
  for (int i = 0; i < 16; ++i)
    total.lane[i] += static_cast<double>(x.lane[i]) * static_cast<double>(x.lane[i]);
  return total;
}
static inline double sum_of_lanes(F64x16 x) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x.lane[i] += x.lane[i + width];
  }
  return x.lane[0];
}

// The larger of |a| and |b| by their bits, so that a NaN is larger than infinity. `a` is not negative.
static inline F32x16 max_magnitude(F32x16 a, F32x16 b) {
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t magnitude = bits_of(b.lane[i]) & 0x7fffffffu;
    const std::uint32_t largest = bits_of(a.lane[i]);
    a.lane[i] = float_of(magnitude > largest ? magnitude : largest);
  }
  return a;
}
