// Elements as kernels compute with them: in fp32, whatever lies in memory. On the device conversions are its
// own instructions; on the host, where tests hold the kernels against torch, the same results but for the
// bits of a NaN.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define BMT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define BMT_HOST_DEVICE inline
#endif

namespace bmtrain::cuda {

template <typename To, typename From>
BMT_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

BMT_HOST_DEVICE float to_float(float x) { return x; }

BMT_HOST_DEVICE float to_float(Bf16 x) { return bits_as<float>(static_cast<std::uint32_t>(x.bits) << 16); }

BMT_HOST_DEVICE float to_float(Half x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // inf and NaN
    return bits_as<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  }
  // A half's exponent and fraction, shifted, are a float 2^112 times too small; exact for subnormal halves
  // too.
  const float scaled = bits_as<float>(rest << 13) * bits_as<float>(std::uint32_t{0x77800000u});
  return bits_as<float>(bits_as<std::uint32_t>(scaled) | sign);
#endif
}

template <typename T>
BMT_HOST_DEVICE T from_float(float x);

template <>
BMT_HOST_DEVICE float from_float<float>(float x) {
  return x;
}

/// To nearest, ties to even.
template <>
BMT_HOST_DEVICE Bf16 from_float<Bf16>(float x) {
#ifdef __CUDA_ARCH__
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const auto bits = bits_as<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};  // a NaN stays one
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

/// To nearest, ties to even.
template <>
BMT_HOST_DEVICE Half from_float<Half>(float x) {
#ifdef __CUDA_ARCH__
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const auto bits = bits_as<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  }
  if (magnitude >= 0x47800000u) {  // 65536 and above
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude <
      0x38800000u) {  // below the smallest normal half: adding 0.5 leaves the fraction in the last bits
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (bits_as<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return {static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13))};
#endif
}

}  // namespace bmtrain::cuda
