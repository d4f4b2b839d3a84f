// A checksum of memory that takes no longer than to read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace bmtrain {

/// The sum of the memory's words of 8 bytes, the last one filled up with zeros: any one bit changes it.
inline std::int64_t word_sum(const void* memory, std::size_t nbytes) {
  const auto* const bytes = static_cast<const unsigned char*>(memory);
  std::uint64_t sum = 0;
  std::uint64_t word = 0;
  std::size_t at = 0;
  for (; at + sizeof word <= nbytes; at += sizeof word) {
    std::memcpy(&word, bytes + at, sizeof word);
    sum += word;
  }
  if (at < nbytes) {
    word = 0;
    std::memcpy(&word, bytes + at, nbytes - at);
    sum += word;
  }
  return static_cast<std::int64_t>(sum);
}

}  // namespace bmtrain
