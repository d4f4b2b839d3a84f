// Element types of the kernels in memory. No functions here: see [Note: One body, several levels].
#pragma once

#include <cstdint>

namespace bmtrain::cpu {

struct Bf16 {
  std::uint16_t bits;
};

struct Half {
  std::uint16_t bits;
};

}  // namespace bmtrain::cpu
