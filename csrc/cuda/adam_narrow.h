// Adam whose moments are in bf16 or in 8 bits: see [Note: Moments in bf16] and [Note: Moments in 8 bits] in
// cpu/kernels.h, whose bits these have.
//
// A warp takes blocks of 32 elements, a lane one element of each: so accesses of a warp are neighbours
// wherever arrays begin, and the largest element of a block is found by shuffles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/adam_math.h"
#include "cuda/step.h"

namespace bmtrain::cuda {

constexpr int kNarrowUnroll = 4;  // blocks of a warp whose elements are under way together
constexpr std::int64_t kNarrowTile = std::int64_t{kThreads} * kNarrowUnroll;
static_assert(cpu::kMomentBlock == kWarp);

/// The bits of a number, with one NaN for all, given by its bits.
__device__ inline std::uint32_t bits_with_nan(float x, std::uint32_t nan) {
  const auto bits = bits_as<std::uint32_t>(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : bits;
}
constexpr std::uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
constexpr std::uint32_t kHashFactor = 0x85ebca77u;

__device__ inline std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

struct Bf16Moments {
  const cpu::AdamSlice& slice;

  __device__ float first(std::int64_t i, bool is_inside) const {
    return at(slice.bf16_exp_avg, i, is_inside);
  }
  __device__ float second(std::int64_t i, bool is_inside) const {
    return at(slice.bf16_exp_avg_sq, i, is_inside);
  }
  __device__ static std::uint32_t hash(float weight, float exp_avg) {
    return bits_with_nan(weight, kInfinity) ^ bits_with_nan(exp_avg, kNan);
  }
  __device__ void store(std::int64_t i, bool is_inside, float exp_avg, float exp_avg_sq,
                        std::uint32_t random) const {
    if (!is_inside) return;
    static_cast<Bf16*>(slice.bf16_exp_avg)[i] = rounded(exp_avg, random >> 16);
    static_cast<Bf16*>(slice.bf16_exp_avg_sq)[i] = rounded(exp_avg_sq, (random ^ random >> 16) & 0xffffu);
  }

 private:
  __device__ static float at(const void* array, std::int64_t i, bool is_inside) {
    return is_inside ? to_float(static_cast<const Bf16*>(array)[i]) : 0;
  }
  __device__ static Bf16 rounded(float x, std::uint32_t noise) {
    return {static_cast<std::uint16_t>((bits_with_nan(x, kNan) + noise) >> 16)};
  }
};

struct CodedMoments {
  const cpu::AdamSlice& slice;

  __device__ float first(std::int64_t i, bool is_inside) const {
    return decoded<127>(slice.coded_exp_avg, i, is_inside);
  }
  __device__ float second(std::int64_t i, bool is_inside) const {
    return decoded<255>(slice.coded_exp_avg_sq, i, is_inside);
  }
  __device__ static std::uint32_t hash(float weight, float exp_avg) {
    return bits_as<std::uint32_t>(weight) ^ bits_with_nan(exp_avg, kInfinity);
  }
  __device__ void store(std::int64_t i, bool is_inside, float exp_avg, float exp_avg_sq,
                        std::uint32_t random) const {
    encode<127>(slice.coded_exp_avg, i, is_inside, exp_avg, random);
    encode<255>(slice.coded_exp_avg_sq, i, is_inside, exp_avg_sq, random);
  }

 private:
  static constexpr int kBelowCode = 20;  // bits of fp32 below those that a code has
  static constexpr std::uint32_t kNotFinite = 255, kLeastExponent = 33;

  // kTop: the largest code of a magnitude; bits above it are the sign. The exponent is read by the lane that
  // writes it later.
  template <std::uint32_t kTop>
  __device__ static float decoded(const cpu::CodedArray& array, std::int64_t i, bool is_inside) {
    const std::uint32_t code = is_inside ? array.codes[i] : 0;
    const bool is_first = is_inside && threadIdx.x % kWarp == 0;
    const std::uint32_t exponent = __shfl_sync(0xffffffffu, is_first ? array.exponents[i / kWarp] : 0u, 0);
    const std::uint32_t magnitude = code & kTop;
    if (exponent == kNotFinite) return bits_as<float>(kNan);
    if (magnitude == 0) return 0;
    return bits_as<float>(((exponent << 23) + ((magnitude - kTop) << kBelowCode)) | (code & ~kTop) << 24);
  }

  template <std::uint32_t kTop>
  __device__ static void encode(const cpu::CodedArray& array, std::int64_t i, bool is_inside, float x,
                                std::uint32_t random) {
    const std::uint32_t bits = bits_with_nan(x, kInfinity);
    const std::uint32_t magnitude = is_inside ? ((bits & 0x7fffffffu) + (random >> 12)) >> kBelowCode : 0;
    std::uint32_t largest = magnitude;
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
      largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    const std::uint32_t exponent = larger((largest + 7) >> 3, kLeastExponent);
    if (!is_inside) return;
    const auto above = static_cast<std::int32_t>(magnitude - (exponent << 3) + kTop);
    std::uint32_t code = above > 0 ? static_cast<std::uint32_t>(above) : 0;
    if (kTop == 255 && code == 0 && magnitude != 0) code = 1;  // not 0, as it is divided by
    if (kTop == 127) code |= bits >> 24 & 0x80u;
    array.codes[i] = static_cast<std::uint8_t>(exponent == kNotFinite ? 0 : code);
    if (threadIdx.x % kWarp == 0) array.exponents[i / kWarp] = static_cast<std::uint8_t>(exponent);
  }
};

template <typename Moments>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ StepBatch<cpu::AdamSlice> batch) {
  int s = 0;
  for (std::int64_t tile = blockIdx.x; tile < batch.first_tile[batch.num_slices]; tile += gridDim.x) {
    while (tile >= batch.first_tile[s + 1]) ++s;
    const cpu::AdamSlice& slice = batch.slices[s];
    const Moments moments{slice};
    const std::int64_t first = (tile - batch.first_tile[s]) * kNarrowTile +
                               std::int64_t{threadIdx.x / kWarp} * (kWarp * kNarrowUnroll) +
                               threadIdx.x % kWarp;
    float g[kNarrowUnroll] = {};
    AdamElement old[kNarrowUnroll] = {};
#pragma unroll
    for (int u = 0; u < kNarrowUnroll; ++u) {
      const std::int64_t i = first + u * kWarp;
      const bool is_inside = i < slice.n;
      if (is_inside) {
        g[u] = load_as_float(slice.grad, slice.grad_dtype, i);
        old[u].weight = slice.weight[i];
      }
      old[u].exp_avg = moments.first(i, is_inside);
      old[u].exp_avg_sq = moments.second(i, is_inside);
    }
#pragma unroll
    for (int u = 0; u < kNarrowUnroll; ++u) {
      const std::int64_t i = first + u * kWarp;
      const AdamElement now = adam_element(slice.factors, g[u], old[u]);
      const std::uint32_t random =
          (Moments::hash(old[u].weight, now.exp_avg) ^ slice.factors.dither_seed) * kHashFactor;
      moments.store(i, i < slice.n, now.exp_avg, now.exp_avg_sq, random);
      if (i >= slice.n) continue;
      slice.weight[i] = now.weight;
      if (slice.rounded != nullptr) store_from_float(slice.rounded, slice.rounded_dtype, i, now.weight);
    }
  }
}

}  // namespace bmtrain::cuda
