// The element types the core computes with, free of torch so that kernels can use it.
#pragma once

#include <cstdint>

namespace bmtrain {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

/// Bytes of one element.
[[nodiscard]] constexpr std::int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace bmtrain
