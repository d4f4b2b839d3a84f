// What vectors of 16 lanes take of AVX-512. The processors' own bf16 conversion is not used: it takes
// denormals for 0.

static inline F32x16 load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline void store(Half* p, F32x16 x) {
  const __m256i half = _mm512_cvtps_ph(x.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

static inline F32x16 load(const Bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
static inline void store_upper_halves(Bf16* p, F32x16 x) {
  const __m512i places = _mm512_setr_epi32(0x30001, 0x70005, 0xb0009, 0xf000d, 0x130011, 0x170015, 0x1b0019,
                                           0x1f001d, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i upper = _mm512_permutexvar_epi16(places, _mm512_castps_si512(x.part[0]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(upper));
}
static inline void store(Bf16* p, F32x16 x) {
  const __m512i bits = _mm512_castps_si512(x.part[0]);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_sub_epi32(rounded, odd, rounded, _mm512_set1_epi32(-1));
  // The table of this operation: a NaN stays one, and what is none keeps the rounded bits.
  const __m512i nans = _mm512_set1_epi32(0x22);
  store_upper_halves(p, {_mm512_fixupimm_ps(_mm512_castsi512_ps(rounded), x.part[0], nans, 0)});
}

// Codes in the upper bytes of words.
static inline void load_codes(Words& codes, const std::uint8_t* p) {
  const __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i halves = _mm512_setr_epi32(0, 4, 0, 4, 1, 5, 1, 5, 2, 6, 2, 6, 3, 7, 3, 7);
  const __m512i upper =
      _mm512_broadcast_i32x4(_mm_setr_epi8(-1, 0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7));
  codes.part[0] = (Words::Part)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(halves, bytes), upper);
}
static inline void store_codes(std::uint8_t* p, const Words (&codes)[1]) {
  const __m512i upper =
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m512i halves = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i bytes = _mm512_shuffle_epi8((__m512i)codes[0].part[0], upper);
  const __m256i packed = _mm512_castsi512_si256(_mm512_permutexvar_epi32(halves, bytes));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
static inline void split_words(F32x16 (&x)[2], const Words& words) {
  const __m512i pairs = (__m512i)words.part[0];
  x[0].part[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  x[1].part[0] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)));
}
static inline void join_words(Words& words, const F32x16 (&x)[2]) {
  const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(x[0].part[0]), 16);
  words.part[0] = (Words::Part)_mm512_mask_mov_epi16(even, 0xaaaaaaaau, _mm512_castps_si512(x[1].part[0]));
}
// x - y, or 0 where that is less.
static inline void subtract_to_0(Words::Part& x, const Words::Part& y) {
  x = (Words::Part)_mm512_subs_epu16((__m512i)x, (__m512i)y);
}
// 0 where y has no bit of the mask.
static inline void clear_where_0(Words::Part& x, const Words::Part& y, const Words::Part& mask) {
  x = (Words::Part)_mm512_maskz_mov_epi16(_mm512_test_epi16_mask((__m512i)y, (__m512i)mask), (__m512i)x);
}
// The largest word of each block.
static inline void max_of_words(U16x8& largest, const Words (&words)[8]) {
  __m512i two[4];  // in each quarter four words of a block, then four of the next
  for (int i = 0; i < 4; ++i) {
    const __m512i a = (__m512i)words[2 * i].part[0];
    const __m512i b = (__m512i)words[2 * i + 1].part[0];
    two[i] = _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  __m512i four[2];  // two words of each
  for (int i = 0; i < 2; ++i) {
    const __m512 a = _mm512_castsi512_ps(two[2 * i]);
    const __m512 b = _mm512_castsi512_ps(two[2 * i + 1]);
    four[i] = _mm512_max_epu16(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                               _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
  }
  for (__m512i& x : four)
    x = _mm512_and_si512(_mm512_max_epu16(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0xffff));
  const __m512i eight = _mm512_packus_epi32(four[0], four[1]);
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(eight), _mm512_extracti64x4_epi64(eight, 1));
  largest = (U16x8)_mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

static inline F32x16 sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.part[0])}; }
// a if that is less, else b, also if a is NaN.
static inline F32x16 min_of(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.part[0], b.part[0])}; }
// a * b + c with one rounding.
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm512_fmadd_ps(a.part[0], b.part[0], c.part[0])};
}

// See [Note: Division by a known number].
static inline F32x16 div_by(F32x16 x, const Divisor& d) {
  const __m512 high = _mm512_set1_ps(d.reciprocal);
  const __m512 q =
      _mm512_fmadd_ps(x.part[0], high, _mm512_mul_ps(x.part[0], _mm512_set1_ps(d.reciprocal_rest)));
  const __m512 rest = _mm512_fnmadd_ps(q, _mm512_set1_ps(d.value), x.part[0]);
  const __m512i infinities = _mm512_set1_epi32(0x110000);  // stay as they are
  return {_mm512_fixupimm_ps(_mm512_fmadd_ps(rest, high, q), x.part[0], infinities, 0)};
}

static inline F32x16 max_magnitude(F32x16 a, F32x16 b) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(b.part[0]), _mm512_set1_epi32(0x7fffffff));
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.part[0]), magnitude))};
}

static inline F64x16 widen(F32x16 x) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(x.part[0])),
          _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.part[0], 1))};
}
static inline F64x16 add_squares(F64x16 total, F32x16 x) {
  const F64x16 wide = widen(x);
  BMT_PARTS(F64x16, _mm512_fmadd_pd(wide.part[i], wide.part[i], total.part[i]));
}
