#pragma once

#include <concepts>
#include <cstdint>

namespace bmtrain {

/** Bytes of a page of memory on the platforms of this library, or a divisor. */
inline constexpr std::uint64_t kPage = 4096;

/** The least multiple of `unit` that is not less than `value`; neither is negative. */
template <std::integral T>
constexpr T round_up(T value, T unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace bmtrain
