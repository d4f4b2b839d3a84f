#include "disk/checksum.h"

#include <array>
#include <cstring>

#include "cpu/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace bmtrain {
namespace {

using ByteSums = std::array<std::uint32_t, 256>;

// kByteSums[k][b]: what a byte b adds to the sum, k bytes after it.
constexpr std::array<ByteSums, 8> kByteSums = [] {
  std::array<ByteSums, 8> sums{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? 0xEDB88320U : 0);
    sums[0][byte] = sum;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = sums[k - 1][byte];
      sums[k][byte] = (before >> 8) ^ sums[0][before & 255];
    }
  }
  return sums;
}();

std::uint64_t word_at(const char* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

std::uint32_t sum_by_tables(std::uint32_t sum, const char* data, std::int64_t nbytes) {
  for (std::int64_t at = 0; at < nbytes; at += 8) {
    const std::uint64_t word = word_at(data + at) ^ sum;
    sum = 0;
    for (std::size_t k = 0; k < 8; ++k) sum ^= kByteSums[7 - k][(word >> (8 * k)) & 255];
  }
  return sum;
}

#if defined(__x86_64__)
// Adds to `next` what 16 bytes before it are worth there. The factors are those of Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.
__attribute__((target("pclmul"))) __m128i folded(__m128i bytes, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(bytes, factors, 0x00);
  return _mm_xor_si128(next, _mm_xor_si128(low, _mm_clmulepi64_si128(bytes, factors, 0x11)));
}

__attribute__((target("pclmul"))) std::uint32_t sum_by_products(std::uint32_t sum, const char* data,
                                                                std::int64_t nbytes) {
  const __m128i by_64_bytes = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
  const __m128i by_16_bytes = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  const auto* from = reinterpret_cast<const __m128i*>(data);
  const auto* const end = from + nbytes / 16;
  __m128i lanes[4];  // independent, for the pipeline
  for (int i = 0; i < 4; ++i) lanes[i] = _mm_loadu_si128(from + i);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(sum)));
  for (from += 4; from != end; from += 4) {
    for (int i = 0; i < 4; ++i) lanes[i] = folded(lanes[i], by_64_bytes, _mm_loadu_si128(from + i));
  }
  for (int i = 1; i < 4; ++i) lanes[i] = folded(lanes[i - 1], by_16_bytes, lanes[i]);
  char rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), lanes[3]);
  return sum_by_tables(0, rest, sizeof(rest));
}
#elif defined(__aarch64__)
std::uint32_t sum_by_instructions(std::uint32_t sum, const char* data, std::int64_t nbytes) {
  for (std::int64_t at = 0; at < nbytes; at += 8) {
    __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(sum) : "r"(word_at(data + at)));
  }
  return sum;
}
#endif

}  // namespace

std::uint32_t crc32_of(const void* data, std::int64_t nbytes) {
  const auto* bytes = static_cast<const char*>(data);
  if (cpu::isa_level() == cpu::IsaLevel::kBase) return ~sum_by_tables(~0U, bytes, nbytes);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul") != 0) return ~sum_by_products(~0U, bytes, nbytes);
#elif defined(__aarch64__)
  constexpr unsigned long kHasCrc32 = 1UL << 7;  // HWCAP_CRC32
  if ((getauxval(AT_HWCAP) & kHasCrc32) != 0) return ~sum_by_instructions(~0U, bytes, nbytes);
#endif
  return ~sum_by_tables(~0U, bytes, nbytes);
}

}  // namespace bmtrain
