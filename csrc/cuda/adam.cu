// Adam over flat ranges: a block takes a tile of a range, a thread eight neighbours of it.
#include <algorithm>

#include "cuda/adam.h"
#include "cuda/adam_math.h"
#include "cuda/launch.h"

namespace bmtrain::cuda {
namespace {

constexpr int kPerThread = 8;  // two 16-byte loads of fp32, one of 16-bit values
constexpr std::int64_t kTile = kThreads * kPerThread;
constexpr int kRangesPerLaunch = 16;  // they travel as kernel arguments, of which there are 4 KiB

struct Batch {
  cpu::AdamSlice slices[kRangesPerLaunch];
  std::int64_t first_tile[kRangesPerLaunch + 1];
  int num_slices;
  AdamControl control;
};
static_assert(sizeof(Batch) <= 4096);

template <typename T, int kCount>
__device__ void load(const T* from, float (&to)[kCount], std::int64_t left) {
  if (left >= kCount && is_aligned(from)) {
    constexpr int kStep = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int k = 0; k < kCount; k += kStep) {
      const auto pack = *reinterpret_cast<const Pack<T, kStep>*>(from + k);
#pragma unroll
      for (int j = 0; j < kStep; ++j) to[k + j] = to_float(pack.values[j]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = k < left ? to_float(from[k]) : 0;
  }
}

template <typename T, int kCount>
__device__ void store(T* to, const float (&from)[kCount], std::int64_t left) {
  if (left >= kCount && is_aligned(to)) {
    constexpr int kStep = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int k = 0; k < kCount; k += kStep) {
      Pack<T, kStep> pack;
#pragma unroll
      for (int j = 0; j < kStep; ++j) pack.values[j] = from_float<T>(from[k + j]);
      *reinterpret_cast<Pack<T, kStep>*>(to + k) = pack;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < left) to[k] = from_float<T>(from[k]);
    }
  }
}

template <typename Grad, typename Rounded>
__device__ void update(const cpu::AdamSlice& slice, std::int64_t i, float scale, bool skips, bool zeroes) {
  const std::int64_t left = slice.n - i;
  Grad* const grad = const_cast<Grad*>(static_cast<const Grad*>(slice.grad)) + i;
  if (!skips) {
    float g[kPerThread], w[kPerThread], m[kPerThread], v[kPerThread];
    load(grad, g, left);
    load(slice.weight + i, w, left);
    load(slice.exp_avg + i, m, left);
    load(slice.exp_avg_sq + i, v, left);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const AdamElement element = adam_element(slice.factors, g[k] * scale, {w[k], m[k], v[k]});
      w[k] = element.weight;
      m[k] = element.exp_avg;
      v[k] = element.exp_avg_sq;
    }
    store(slice.weight + i, w, left);
    store(slice.exp_avg + i, m, left);
    store(slice.exp_avg_sq + i, v, left);
    if constexpr (sizeof(Rounded) == 2) store(static_cast<Rounded*>(slice.rounded) + i, w, left);
  }
  if (zeroes) {
    const float zeros[kPerThread] = {};
    store(grad, zeros, left);
  }
}

template <typename Grad>
__device__ void update_from(const cpu::AdamSlice& slice, std::int64_t i, float scale, bool skips,
                            bool zeroes) {
  if (slice.rounded == nullptr) return update<Grad, float>(slice, i, scale, skips, zeroes);
  if (slice.rounded_dtype == DType::kBFloat16) return update<Grad, Bf16>(slice, i, scale, skips, zeroes);
  return update<Grad, Half>(slice, i, scale, skips, zeroes);
}

__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ Batch batch) {
  const float scale = batch.control.grad_scale == nullptr ? 1 : *batch.control.grad_scale;
  const bool skips = batch.control.found_inf != nullptr && *batch.control.found_inf != 0;
  if (skips && !batch.control.zero_grad) return;
  int s = 0;
  for (std::int64_t tile = blockIdx.x; tile < batch.first_tile[batch.num_slices]; tile += gridDim.x) {
    while (tile >= batch.first_tile[s + 1]) ++s;  // tiles of a block only grow
    const cpu::AdamSlice& slice = batch.slices[s];
    const std::int64_t i = (tile - batch.first_tile[s]) * kTile + threadIdx.x * kPerThread;
    if (i >= slice.n) continue;
    const bool zeroes = batch.control.zero_grad;
    switch (slice.grad_dtype) {
      case DType::kFloat32:
        update_from<float>(slice, i, scale, skips, zeroes);
        break;
      case DType::kBFloat16:
        update_from<Bf16>(slice, i, scale, skips, zeroes);
        break;
      default:
        update_from<Half>(slice, i, scale, skips, zeroes);
    }
  }
}

}  // namespace

cudaError_t adam(const cpu::AdamSlice* slices, std::int64_t num_slices, const AdamControl& control,
                 cudaStream_t stream) {
  for (std::int64_t first = 0; first < num_slices; first += kRangesPerLaunch) {
    Batch batch = {};
    batch.control = control;
    batch.num_slices = static_cast<int>(std::min<std::int64_t>(kRangesPerLaunch, num_slices - first));
    for (int s = 0; s < batch.num_slices; ++s) {
      batch.slices[s] = slices[first + s];
      batch.first_tile[s + 1] = batch.first_tile[s] + (batch.slices[s].n + kTile - 1) / kTile;
    }
    if (batch.first_tile[batch.num_slices] == 0) continue;
    adam_kernel<<<grid_for(batch.first_tile[batch.num_slices]), kThreads, 0, stream>>>(batch);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace bmtrain::cuda
