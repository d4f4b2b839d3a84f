// Vectors of 16 lanes on AVX2, FMA and F16C.

struct F32x16 {
  __m256 low, high;
};

struct F64x16 {
  __m256d quarter[4];
};

static inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}

static inline F32x16 load(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline void store(Half* p, F32x16 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.low, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.high, kNearest));
}

static inline __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static inline F32x16 load(const Bf16* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

// The rounded upper halves, in the lower halves.
static inline __m256i narrow_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
}
static inline void store(Bf16* p, F32x16 x) {
  const __m256i packed = _mm256_packus_epi32(narrow_bf16(x.low), narrow_bf16(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// 32 bytes in the upper bytes of words, see U16x32: byte k in word 2k, byte 16 + k in word 2k + 1.
static inline void load_codes(U16x32& codes, const std::uint8_t* p) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
  const __m256i half[2] = {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(low, high)),
                           _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(low, high))};
  const __m256i upper[2] = {_mm256_slli_epi16(half[0], 8), _mm256_slli_epi16(half[1], 8)};
  __builtin_memcpy(&codes, upper, sizeof codes);
}
static inline void store_codes(std::uint8_t* p, const U16x32& codes) {
  __m256i half[2];
  __builtin_memcpy(half, &codes, sizeof codes);
  const __m256i upper =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 5, 9, 13, 3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1));
  // In each quarter four bytes of the first half of the block, then four of the second.
  const __m256i bytes =
      _mm256_unpacklo_epi64(_mm256_shuffle_epi8(half[0], upper), _mm256_shuffle_epi8(half[1], upper));
  const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
}
// The largest word of each vector.
static inline void max_of_words(std::uint16_t (&largest)[8], const U16x32 (&words)[8]) {
  for (int i = 0; i < 8; ++i) {
    __m256i half[2];
    __builtin_memcpy(half, &words[i], sizeof half);
    const __m256i all = _mm256_max_epu16(half[0], half[1]);
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi32(-1)));
    largest[i] = static_cast<std::uint16_t>(~_mm_cvtsi128_si32(least));
  }
}

static inline F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
static inline F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
static inline F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
static inline F32x16 div(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
static inline F32x16 sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
// a if that is less, else b, also if a is NaN.
static inline F32x16 min_of(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
// a * b + c with one rounding.
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

// See [Note: Division by a known number].
static inline __m256 div_by8(__m256 x, const Divisor& d) {
  const __m256 high = _mm256_set1_ps(d.reciprocal);
  const __m256 q = _mm256_fmadd_ps(x, high, _mm256_mul_ps(x, _mm256_set1_ps(d.reciprocal_rest)));
  const __m256 rest = _mm256_fnmadd_ps(q, _mm256_set1_ps(d.value), x);
  const __m256 finite = _mm256_cmp_ps(x, _mm256_set1_ps(__builtin_inff()), _CMP_NEQ_UQ);
  return _mm256_blendv_ps(x, _mm256_fmadd_ps(rest, high, q), finite);
}
static inline F32x16 div_by(F32x16 x, const Divisor& d) { return {div_by8(x.low, d), div_by8(x.high, d)}; }

static inline __m256 max_magnitude8(__m256 a, __m256 b) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(b), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), magnitude));
}
static inline F32x16 max_magnitude(F32x16 a, F32x16 b) {
  return {max_magnitude8(a.low, b.low), max_magnitude8(a.high, b.high)};
}

static inline F64x16 load(const double* p) {
  return {{_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4), _mm256_loadu_pd(p + 8), _mm256_loadu_pd(p + 12)}};
}
static inline void store(double* p, F64x16 x) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, x.quarter[i]);
}
static inline F64x16 broadcast(double x) {
  const __m256d value = _mm256_set1_pd(x);
  return {{value, value, value, value}};
}
static inline F64x16 add(F64x16 a, F64x16 b) {
  for (int i = 0; i < 4; ++i) a.quarter[i] = _mm256_add_pd(a.quarter[i], b.quarter[i]);
  return a;
}
static inline F64x16 mul(F64x16 a, F64x16 b) {
  for (int i = 0; i < 4; ++i) a.quarter[i] = _mm256_mul_pd(a.quarter[i], b.quarter[i]);
  return a;
}

static inline F64x16 widen(F32x16 x) {
  return {{_mm256_cvtps_pd(_mm256_castps256_ps128(x.low)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.low, 1)),
           _mm256_cvtps_pd(_mm256_castps256_ps128(x.high)),
           _mm256_cvtps_pd(_mm256_extractf128_ps(x.high, 1))}};
}
static inline F64x16 add_lanes(F64x16 total, F32x16 x) { return add(total, widen(x)); }
static inline F64x16 add_squares(F64x16 total, F32x16 x) {
  const F64x16 wide = widen(x);
  for (int i = 0; i < 4; ++i) {
    total.quarter[i] = _mm256_fmadd_pd(wide.quarter[i], wide.quarter[i], total.quarter[i]);
  }
  return total;
}
static inline double sum_of_lanes(F64x16 x) {
  const __m256d four =
      _mm256_add_pd(_mm256_add_pd(x.quarter[0], x.quarter[2]), _mm256_add_pd(x.quarter[1], x.quarter[3]));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
