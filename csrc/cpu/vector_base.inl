// What vectors of 16 lanes take of plain C++.

static inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
static inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }

// Conversions of one element. A NaN becomes 0x7fc0 in bf16 (other levels may keep its sign and payload), and
// in fp16 keeps its sign and upper payload and becomes quiet, as the processor's own conversion has it.

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
  float lane[16];
  for (int i = 0; i < 16; ++i) {
    T x;
    __builtin_memcpy(&x, p + i, sizeof(T));
    lane[i] = to_float(x);
  }
  return load(lane);
}

template <typename T>
static inline void store(T* p, F32x16 x) {
  float lane[16];
  store(lane, x);
  for (int i = 0; i < 16; ++i) {
    T y;
    from_float(lane[i], &y);
    __builtin_memcpy(p + i, &y, sizeof(T));
  }
}

static inline void store_upper_halves(Bf16* p, F32x16 x) {
  std::uint32_t lane[16];
  store(reinterpret_cast<float*>(lane), x);
  for (int i = 0; i < 16; ++i) p[i].bits = static_cast<std::uint16_t>(lane[i] >> 16);
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
  std::uint32_t lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = static_cast<std::uint32_t>(from[word_of(i)]) << 16;
  x[0] = load(reinterpret_cast<const float*>(lane));
}
static inline void join_words(Words& words, const F32x16 (&x)[1]) {
  std::uint32_t lane[16];
  store(reinterpret_cast<float*>(lane), x[0]);
  std::uint16_t to[16];
  for (int i = 0; i < 16; ++i) to[word_of(i)] = static_cast<std::uint16_t>(lane[i] >> 16);
  __builtin_memcpy(&words, to, sizeof words);
}
// x - y, or 0 where that is less.
static inline void subtract_to_0(Words::Part& x, const Words::Part& y) { x = (x > y ? x : y) - y; }
// 0 where y has no bit of the mask.
static inline void clear_where_0(Words::Part& x, const Words::Part& y, const Words::Part& mask) {
  x = (y & mask) == 0 ? y & mask : x;
}
// The largest word of each block.
static inline void max_of_words(U16x8& largest, const Words (&words)[8]) {
  for (int i = 0; i < 8; ++i) {
    std::uint16_t from[16];
    __builtin_memcpy(from, &words[i], sizeof from);
    largest[i] = 0;
    for (const std::uint16_t word : from) largest[i] = word > largest[i] ? word : largest[i];
  }
}

#define BMT_LANES(Vector, expression)                                                           \
  Vector out;                                                                                   \
  for (int i = 0; i < 16; ++i) out.part[i / Vector::kLanes][i % Vector::kLanes] = (expression); \
  return out

static inline float lane_of(const F32x16& x, int i) { return x.part[i / F32x16::kLanes][i % F32x16::kLanes]; }
static inline F32x16 div_by(F32x16 x, const Divisor& d) { return div(x, broadcast(d.value)); }
static inline F32x16 sqrt(F32x16 a) { BMT_LANES(F32x16, __builtin_sqrtf(lane_of(a, i))); }
// a if that is less, else b, also if a is NaN.
static inline F32x16 min_of(F32x16 a, F32x16 b) {
  BMT_PARTS(F32x16, a.part[i] < b.part[i] ? a.part[i] : b.part[i]);
}
// a * b + c with one rounding.
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  BMT_LANES(F32x16, __builtin_fmaf(lane_of(a, i), lane_of(b, i), lane_of(c, i)));
}

using TwoFloats [[gnu::vector_size(8)]] = float;
static inline F64x16 widen(F32x16 x) {
  BMT_PARTS(F64x16,
            __builtin_convertvector((TwoFloats{lane_of(x, 2 * i), lane_of(x, 2 * i + 1)}), WideRegister));
}
#undef BMT_LANES
// total + x * x, lane by lane in fp64, where the square of an fp32 number is exact.
static inline F64x16 add_squares(F64x16 total, F32x16 x) {
  const F64x16 wide = widen(x);
  return add(total, mul(wide, wide));
}

// The larger of |a| and |b| by their bits, so that a NaN is larger than infinity. `a` is not negative.
static inline F32x16 max_magnitude(F32x16 a, F32x16 b) {
  for (int i = 0; i < kRegisters; ++i) {
    const Words::Bits magnitude = bits_at(b, i) & 0x7fffffffu, largest = bits_at(a, i);
    set_bits(a, i, magnitude > largest ? magnitude : largest);
  }
  return a;
}
