// Words and bytes in vectors of 16 bytes, alike at all levels.

#if defined(__x86_64__)

static inline void words_of_bytes(U16x8& words, std::uint64_t bytes) {
  const __m128i low = _mm_cvtsi64_si128(static_cast<std::int64_t>(bytes));
  words = (U16x8)_mm_unpacklo_epi8(low, _mm_setzero_si128());
}
// Of words below 256.
static inline std::uint64_t bytes_of_words(const U16x8& words) {
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16((__m128i)words, (__m128i)words)));
}
// Stores each word two times. `pairs` is aligned.
static inline void store_twice(std::uint32_t* pairs, const U16x8& words) {
  const __m128i x = (__m128i)words;
  _mm_store_si128(reinterpret_cast<__m128i*>(pairs), _mm_unpacklo_epi16(x, x));
  _mm_store_si128(reinterpret_cast<__m128i*>(pairs + 4), _mm_unpackhi_epi16(x, x));
}

#else

static inline void words_of_bytes(U16x8& words, std::uint64_t bytes) {
  words = __builtin_convertvector(__builtin_bit_cast(U8x8, bytes), U16x8);
}
static inline std::uint64_t bytes_of_words(const U16x8& words) {
  return __builtin_bit_cast(std::uint64_t, __builtin_convertvector(words, U8x8));
}
static inline void store_twice(std::uint32_t* pairs, const U16x8& words) {
  for (int i = 0; i < 8; ++i) pairs[i] = words[i] * 0x10001u;
}

#endif
