// What vectors of 16 lanes take of NEON, which every 64-bit Arm processor has.

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
  BMT_PARTS(F32x16, vcvt_f32_f16(vreinterpret_f16_u16(load_four(p + 4 * i))));
}
static inline void store(Half* p, F32x16 x) {
  for (int i = 0; i < 4; ++i) store_four(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.part[i])));
}

static inline F32x16 load(const Bf16* p) {
  BMT_PARTS(F32x16, vreinterpretq_f32_u32(vshll_n_u16(load_four(p + 4 * i), 16)));
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
  for (int i = 0; i < 4; ++i) store_four(p + 4 * i, narrow_bf16(x.part[i]));
}
static inline void store_upper_halves(Bf16* p, F32x16 x) {
  for (int i = 0; i < 4; ++i) store_four(p + 4 * i, vshrn_n_u32(vreinterpretq_u32_f32(x.part[i]), 16));
}

// Codes in the upper bytes of words.
static inline void load_codes(Words& codes, const std::uint8_t* p) {
  const uint8x16_t upper[2] = {{255, 0, 255, 4, 255, 1, 255, 5, 255, 2, 255, 6, 255, 3, 255, 7},
                               {255, 8, 255, 12, 255, 9, 255, 13, 255, 10, 255, 14, 255, 11, 255, 15}};
  for (int i = 0; i < 2; ++i) codes.part[i] = (Words::Part)vqtbl1q_u8(vld1q_u8(p), upper[i]);
}
static inline void store_codes(std::uint8_t* p, const Words (&codes)[2]) {
  const uint8x16_t order = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  for (int i = 0; i < 2; ++i) {
    const uint8x16_t bytes = vuzp2q_u8((uint8x16_t)codes[i].part[0], (uint8x16_t)codes[i].part[1]);
    vst1q_u8(p + 16 * i, vqtbl1q_u8(bytes, order));
  }
}
static inline void split_words(F32x16 (&x)[1], const Words& words) {
  for (int i = 0; i < 2; ++i) {
    const uint32x4_t pairs = (uint32x4_t)words.part[i];
    x[0].part[2 * i] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    x[0].part[2 * i + 1] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
  }
}
static inline void join_words(Words& words, const F32x16 (&x)[1]) {
  for (int i = 0; i < 2; ++i) {
    words.part[i] = (Words::Part)vtrn2q_u16((uint16x8_t)x[0].part[2 * i], (uint16x8_t)x[0].part[2 * i + 1]);
  }
}
// x - y, or 0 where that is less.
static inline void subtract_to_0(Words::Part& x, const Words::Part& y) {
  x = (Words::Part)vqsubq_u16((uint16x8_t)x, (uint16x8_t)y);
}
// 0 where y has no bit of the mask.
static inline void clear_where_0(Words::Part& x, const Words::Part& y, const Words::Part& mask) {
  x = (Words::Part)vandq_u16((uint16x8_t)x, vtstq_u16((uint16x8_t)y, (uint16x8_t)mask));
}
// The largest word of each block.
static inline void max_of_words(U16x8& largest, const Words (&words)[8]) {
  for (int i = 0; i < 8; ++i) {
    largest[i] = vmaxvq_u16(vmaxq_u16((uint16x8_t)words[i].part[0], (uint16x8_t)words[i].part[1]));
  }
}

static inline F32x16 div_by(F32x16 x, const Divisor& d) { return div(x, broadcast(d.value)); }
static inline F32x16 sqrt(F32x16 a) { BMT_PARTS(F32x16, vsqrtq_f32(a.part[i])); }
// a if that is less, else b, also if a is NaN.
static inline F32x16 min_of(F32x16 a, F32x16 b) {
  BMT_PARTS(F32x16, vbslq_f32(vcltq_f32(a.part[i], b.part[i]), a.part[i], b.part[i]));
}
// a * b + c with one rounding.
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  BMT_PARTS(F32x16, vfmaq_f32(c.part[i], a.part[i], b.part[i]));
}

static inline float32x4_t max_magnitude4(float32x4_t a, float32x4_t b) {
  const uint32x4_t magnitude = vandq_u32(vreinterpretq_u32_f32(b), vdupq_n_u32(0x7fffffff));
  return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(a), magnitude));
}
static inline F32x16 max_magnitude(F32x16 a, F32x16 b) {
  BMT_PARTS(F32x16, max_magnitude4(a.part[i], b.part[i]));
}

static inline F64x16 widen(F32x16 x) {
  F64x16 out;
  for (int i = 0; i < 4; ++i) {
    out.part[2 * i] = vcvt_f64_f32(vget_low_f32(x.part[i]));
    out.part[2 * i + 1] = vcvt_high_f64_f32(x.part[i]);
  }
  return out;
}
static inline F64x16 add_squares(F64x16 total, F32x16 x) {
  const F64x16 wide = widen(x);
  BMT_PARTS(F64x16, vfmaq_f64(total.part[i], wide.part[i], wide.part[i]));
}
