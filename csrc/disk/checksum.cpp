#include "disk/checksum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "common/thread_pool.h"

namespace bmtrain {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87U;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::int64_t kPiece = std::int64_t{1} << 17;  // bytes of one task

// Each round is a bijection of the sum for a given word and of the word for a given sum: no change is lost.
std::uint64_t mix(std::uint64_t sum, std::uint64_t word) {
  return std::rotl(sum + word * kPrime2, 31) * kPrime1;
}

std::uint64_t sum_of_piece(const char* data, std::int64_t nbytes) {
  std::array<std::uint64_t, 4> lanes{kPrime1, kPrime2, 0, ~kPrime1};  // independent, for the pipeline
  for (std::int64_t at = 0; at < nbytes; at += 32) {
    std::array<std::uint64_t, 4> words;
    std::memcpy(words.data(), data + at, sizeof(words));
    for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum = mix(sum, lane);
  return sum;
}

}  // namespace

std::uint64_t checksum(const void* data, std::int64_t nbytes) {
  const auto* bytes = static_cast<const char*>(data);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>((nbytes + kPiece - 1) / kPiece));
  parallel_for(static_cast<std::int64_t>(sums.size()), [&](std::int64_t i) {
    sums[static_cast<std::size_t>(i)] =
        sum_of_piece(bytes + i * kPiece, std::min(kPiece, nbytes - i * kPiece));
  });
  std::uint64_t whole = static_cast<std::uint64_t>(nbytes);
  for (const std::uint64_t sum : sums) whole = mix(whole, sum);
  return whole;
}

}  // namespace bmtrain
