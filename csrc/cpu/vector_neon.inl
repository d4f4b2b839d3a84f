// Vectors of 16 lanes on NEON, which every 64-bit Arm processor has.

struct F32x16 {
  float32x4_t quarter[4];
};

struct F64x16 {
  float64x2_t pair[8];
};

#define BMT_QUARTERS(expression)                             \
  F32x16 out;                                                \
  for (int i = 0; i < 4; ++i) out.quarter[i] = (expression); \
  return out

static inline F32x16 load(const float* p) { BMT_QUARTERS(vld1q_f32(p + 4 * i)); }
static inline void store(float* p, F32x16 x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.quarter[i]);
}

// Elements of 16 bits, four at a time; their addresses may be odd.
template <typename T>
static inline uint16x4_t load_four(const T* p) {
  uint16x4_t out;
  __builtin_memcpy(&out, p, sizeof out);
  return out;
}
template <typename T>
static inline void store_four(T* p, uint16x4_t x) {
  __builtin_memcpy(p, &x, sizeof x);
}

static inline F32x16 load(const Half* p) {
  BMT_QUARTERS(vcvt_f32_f16(vreinterpret_f16_u16(load_four(p + 4 * i))));
}
static inline void store(Half* p, F32x16 x) {
  for (int i = 0; i < 4; ++i) store_four(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.quarter[i])));
}

static inline F32x16 load(const Bf16* p) {
  BMT_QUARTERS(vreinterpretq_f32_u32(vshll_n_u16(load_four(p + 4 * i), 16)));
}
// The rounded upper halves.
static inline uint16x4_t narrow_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t number = vceqq_f32(x, x);
  return vshrn_n_u32(vbslq_u32(number, rounded, vdupq_n_u32(0x7fc00000)), 16);
}
static inline void store(Bf16* p, F32x16 x) {
  for (int i = 0; i < 4; ++i) store_four(p + 4 * i, narrow_bf16(x.quarter[i]));
}

// 32 bytes in the upper bytes of words, see U16x32: byte k in word 2k, byte 16 + k in word 2k + 1.
static inline void load_codes(U16x32& codes, const std::uint8_t* p) {
  const uint8x16x2_t mixed = vzipq_u8(vld1q_u8(p), vld1q_u8(p + 16));
  const uint8x16_t zero = vdupq_n_u8(0);
  const uint8x16x2_t words[2] = {vzipq_u8(zero, mixed.val[0]), vzipq_u8(zero, mixed.val[1])};
  __builtin_memcpy(&codes, words, sizeof codes);
}
static inline void store_codes(std::uint8_t* p, const U16x32& codes) {
  uint8x16_t quarter[4];
  __builtin_memcpy(quarter, &codes, sizeof codes);
  const uint8x16_t low = vuzp2q_u8(quarter[0], quarter[1]);
  const uint8x16_t high = vuzp2q_u8(quarter[2], quarter[3]);
  vst1q_u8(p, vuzp1q_u8(low, high));
  vst1q_u8(p + 16, vuzp2q_u8(low, high));
}
// The largest word of each vector.
static inline void max_of_words(std::uint16_t (&largest)[8], const U16x32 (&words)[8]) {
  for (int i = 0; i < 8; ++i) {
    uint16x8_t quarter[4];
    __builtin_memcpy(quarter, &words[i], sizeof quarter);
    largest[i] = vmaxvq_u16(vmaxq_u16(vmaxq_u16(quarter[0], quarter[1]), vmaxq_u16(quarter[2], quarter[3])));
  }
}

static inline F32x16 broadcast(float x) { BMT_QUARTERS(vdupq_n_f32(x)); }
static inline F32x16 add(F32x16 a, F32x16 b) { BMT_QUARTERS(vaddq_f32(a.quarter[i], b.quarter[i])); }
static inline F32x16 sub(F32x16 a, F32x16 b) { BMT_QUARTERS(vsubq_f32(a.quarter[i], b.quarter[i])); }
static inline F32x16 mul(F32x16 a, F32x16 b) { BMT_QUARTERS(vmulq_f32(a.quarter[i], b.quarter[i])); }
static inline F32x16 div(F32x16 a, F32x16 b) { BMT_QUARTERS(vdivq_f32(a.quarter[i], b.quarter[i])); }
static inline F32x16 div_by(F32x16 x, const Divisor& d) { return div(x, broadcast(d.value)); }
static inline F32x16 sqrt(F32x16 a) { BMT_QUARTERS(vsqrtq_f32(a.quarter[i])); }
// a if that is less, else b, also if a is NaN.
static inline F32x16 min_of(F32x16 a, F32x16 b) {
  BMT_QUARTERS(vbslq_f32(vcltq_f32(a.quarter[i], b.quarter[i]), a.quarter[i], b.quarter[i]));
}
// a * b + c with one rounding.
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  BMT_QUARTERS(vfmaq_f32(c.quarter[i], a.quarter[i], b.quarter[i]));
}

static inline float32x4_t max_magnitude4(float32x4_t a, float32x4_t b) {
  const uint32x4_t magnitude = vandq_u32(vreinterpretq_u32_f32(b), vdupq_n_u32(0x7fffffff));
  return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(a), magnitude));
}
static inline F32x16 max_magnitude(F32x16 a, F32x16 b) {
  BMT_QUARTERS(max_magnitude4(a.quarter[i], b.quarter[i]));
}
#undef BMT_QUARTERS

static inline F64x16 load(const double* p) {
  F64x16 out;
  for (int i = 0; i < 8; ++i) out.pair[i] = vld1q_f64(p + 2 * i);
  return out;
}
static inline void store(double* p, F64x16 x) {
  for (int i = 0; i < 8; ++i) vst1q_f64(p + 2 * i, x.pair[i]);
}
static inline F64x16 broadcast(double x) {
  F64x16 out;
  for (int i = 0; i < 8; ++i) out.pair[i] = vdupq_n_f64(x);
  return out;
}
static inline F64x16 add(F64x16 a, F64x16 b) {
  for (int i = 0; i < 8; ++i) a.pair[i] = vaddq_f64(a.pair[i], b.pair[i]);
  return a;
}
static inline F64x16 mul(F64x16 a, F64x16 b) {
  for (int i = 0; i < 8; ++i) a.pair[i] = vmulq_f64(a.pair[i], b.pair[i]);
  return a;
}

static inline F64x16 widen(F32x16 x) {
  F64x16 out;
  for (int i = 0; i < 4; ++i) {
    out.pair[2 * i] = vcvt_f64_f32(vget_low_f32(x.quarter[i]));
    out.pair[2 * i + 1] = vcvt_high_f64_f32(x.quarter[i]);
  }
  return out;
}
static inline F64x16 add_lanes(F64x16 total, F32x16 x) { return add(total, widen(x)); }
static inline F64x16 add_squares(F64x16 total, F32x16 x) {
  const F64x16 wide = widen(x);
  for (int i = 0; i < 8; ++i) total.pair[i] = vfmaq_f64(total.pair[i], wide.pair[i], wide.pair[i]);
  return total;
}
static inline double sum_of_lanes(F64x16 x) {
  for (int width = 4; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x.pair[i] = vaddq_f64(x.pair[i], x.pair[i + width]);
  }
  return vpaddd_f64(x.pair[0]);
}
