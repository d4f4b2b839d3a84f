// Element types of the kernels. No functions here: see [Note: One body, several levels].
#pragma once

#include <cstdint>

namespace bmtrain::cpu {

struct Bf16 {
  std::uint16_t bits;
};

struct Half {
  std::uint16_t bits;
};

// Integers in the compiler's vectors, whose operations every level has.
using U32x16 [[gnu::vector_size(64)]] = std::uint32_t;
using S32x16 [[gnu::vector_size(64)]] = std::int32_t;
using U16x16 [[gnu::vector_size(32)]] = std::uint16_t;
using U8x8 [[gnu::vector_size(8)]] = std::uint8_t;
using U16x8 [[gnu::vector_size(16)]] = std::uint16_t;

}  // namespace bmtrain::cpu
