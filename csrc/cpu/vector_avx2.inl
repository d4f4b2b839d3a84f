// What vectors of 16 lanes take of AVX2, FMA and F16C.

static inline F32x16 load(const Half* p) {
  BMT_PARTS(F32x16, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i))));
}
static inline void store(Half* p, F32x16 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.part[0], kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.part[1], kNearest));
}

static inline __m256 load8(const Bf16* p) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i upper = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                         -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(words), upper));
}
static inline F32x16 load(const Bf16* p) { BMT_PARTS(F32x16, load8(p + 8 * i)); }

// The rounded upper halves, in the lower halves.
static inline __m256i narrow_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
}
static inline void store(Bf16* p, F32x16 x) {
  const __m256i packed = _mm256_packus_epi32(narrow_bf16(x.part[0]), narrow_bf16(x.part[1]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline void store_upper_halves(Bf16* p, F32x16 x) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(x.part[0]), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(x.part[1]), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}

// Codes in the upper bytes of words.
static inline void load_codes(Words& codes, const std::uint8_t* p) {
  const __m256i upper = _mm256_setr_epi8(-1, 0, -1, 8, -1, 1, -1, 9, -1, 2, -1, 10, -1, 3, -1, 11,  //
                                         -1, 4, -1, 12, -1, 5, -1, 13, -1, 6, -1, 14, -1, 7, -1, 15);
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  codes.part[0] = (Words::Part)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), upper);
}
static inline void store_codes(std::uint8_t* p, const Words (&codes)[2]) {
  // In each half, bytes of the first eight elements, then of the other eight.
  const __m256i upper =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 5, 9, 13, 3, 7, 11, 15, 1, 5, 9, 13, 3, 7, 11, 15));
  const __m256i bytes = _mm256_unpacklo_epi64(_mm256_shuffle_epi8((__m256i)codes[0].part[0], upper),
                                              _mm256_shuffle_epi8((__m256i)codes[1].part[0], upper));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
}
static inline void split_words(F32x16 (&x)[1], const Words& words) {
  const __m256i pairs = (__m256i)words.part[0];
  x[0].part[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  x[0].part[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)));
}
static inline void join_words(Words& words, const F32x16 (&x)[1]) {
  const __m256i even = _mm256_srli_epi32(_mm256_castps_si256(x[0].part[0]), 16);
  words.part[0] = (Words::Part)_mm256_blend_epi16(even, _mm256_castps_si256(x[0].part[1]), 0xaa);
}
// x - y, or 0 where that is less.
static inline void subtract_to_0(Words::Part& x, const Words::Part& y) {
  x = (Words::Part)_mm256_subs_epu16((__m256i)x, (__m256i)y);
}
// 0 where y has no bit of the mask; both have none at 2^15.
static inline void clear_where_0(Words::Part& x, const Words::Part& y, const Words::Part& mask) {
  x = (Words::Part)_mm256_sign_epi16((__m256i)x, (__m256i)(y & mask));
}
// The largest word of each block.
static inline void max_of_words(U16x8& largest, const Words (&words)[8]) {
  __m256i two[4];  // in each half eight words of a block
  for (int i = 0; i < 4; ++i) {
    const __m256i first = (__m256i)words[i].part[0];
    const __m256i other = (__m256i)words[i + 4].part[0];
    two[i] = _mm256_max_epu16(_mm256_permute2x128_si256(first, other, 0x20),
                              _mm256_permute2x128_si256(first, other, 0x31));
  }
  __m256i four[2];  // in each half four words of a block, then four of the next
  for (int i = 0; i < 2; ++i) {
    four[i] = _mm256_max_epu16(_mm256_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm256_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  }
  const __m256 a = _mm256_castsi256_ps(four[0]);
  const __m256 b = _mm256_castsi256_ps(four[1]);
  const __m256i pairs = _mm256_max_epu16(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                                         _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)));
  const __m256i one =
      _mm256_and_si256(_mm256_max_epu16(pairs, _mm256_srli_epi32(pairs, 16)), _mm256_set1_epi32(0xffff));
  largest = (U16x8)_mm_packus_epi32(_mm256_castsi256_si128(one), _mm256_extracti128_si256(one, 1));
}

static inline F32x16 sqrt(F32x16 a) { BMT_PARTS(F32x16, _mm256_sqrt_ps(a.part[i])); }
// a if that is less, else b, also if a is NaN.
static inline F32x16 min_of(F32x16 a, F32x16 b) { BMT_PARTS(F32x16, _mm256_min_ps(a.part[i], b.part[i])); }
// a * b + c with one rounding.
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  BMT_PARTS(F32x16, _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]));
}

// See [Note: Division by a known number].
static inline __m256 div_by8(__m256 x, const Divisor& d) {
  const __m256 high = _mm256_set1_ps(d.reciprocal);
  const __m256 q = _mm256_fmadd_ps(x, high, _mm256_mul_ps(x, _mm256_set1_ps(d.reciprocal_rest)));
  const __m256 rest = _mm256_fnmadd_ps(q, _mm256_set1_ps(d.value), x);
  const __m256 finite = _mm256_cmp_ps(x, _mm256_set1_ps(__builtin_inff()), _CMP_NEQ_UQ);
  return _mm256_blendv_ps(x, _mm256_fmadd_ps(rest, high, q), finite);
}
static inline F32x16 div_by(F32x16 x, const Divisor& d) { BMT_PARTS(F32x16, div_by8(x.part[i], d)); }

static inline __m256 max_magnitude8(__m256 a, __m256 b) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(b), _mm256_set1_epi32(0x7fffffff));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), magnitude));
}
static inline F32x16 max_magnitude(F32x16 a, F32x16 b) {
  BMT_PARTS(F32x16, max_magnitude8(a.part[i], b.part[i]));
}

static inline F64x16 widen(F32x16 x) {
  BMT_PARTS(F64x16, _mm256_cvtps_pd(i % 2 == 0 ? _mm256_castps256_ps128(x.part[i / 2])
                                               : _mm256_extractf128_ps(x.part[i / 2], 1)));
}
static inline F64x16 add_squares(F64x16 total, F32x16 x) {
  const F64x16 wide = widen(x);
  BMT_PARTS(F64x16, _mm256_fmadd_pd(wide.part[i], wide.part[i], total.part[i]));
}
