// What the kernels of all optimizers have in common: a block takes a tile of a range, a thread eight
// neighbours of it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/step_control.h"

namespace bmtrain::cuda {

constexpr int kPerThread = 8;  // two 16-byte loads of fp32, one of 16-bit values
constexpr std::int64_t kTile = kThreads * kPerThread;
constexpr int kRangesPerLaunch = 16;  // they travel as kernel arguments, of which there are 4 KiB

template <typename Slice>
struct StepBatch {
  Slice slices[kRangesPerLaunch];
  std::int64_t first_tile[kRangesPerLaunch + 1];
  int num_slices;
  StepControl control;
};

/// Calls launch(batch, grid) for as few batches as the number of slices allows.
template <typename Slice, typename Launch>
[[nodiscard]] cudaError_t for_each_batch(const Slice* slices, std::int64_t num_slices,
                                         const StepControl& control, const Launch& launch) {
  static_assert(sizeof(StepBatch<Slice>) <= 4096);
  for (std::int64_t first = 0; first < num_slices; first += kRangesPerLaunch) {
    StepBatch<Slice> batch = {};
    batch.control = control;
    batch.num_slices = static_cast<int>(std::min<std::int64_t>(kRangesPerLaunch, num_slices - first));
    for (int s = 0; s < batch.num_slices; ++s) {
      batch.slices[s] = slices[first + s];
      batch.first_tile[s + 1] = batch.first_tile[s] + (batch.slices[s].n + kTile - 1) / kTile;
    }
    if (batch.first_tile[batch.num_slices] == 0) continue;
    launch(batch, grid_for(batch.first_tile[batch.num_slices]));
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

/// StepControl as a kernel read it.
struct StepValues {
  float scale;
  bool skips;
  bool zeroes;
};

/// Calls body(slice, i, values) for the first element i of this thread in each of its block's tiles.
template <typename Slice, typename Body>
__device__ void for_each_tile(const StepBatch<Slice>& batch, const Body& body) {
  const StepControl& control = batch.control;
  const StepValues values = {.scale = control.grad_scale == nullptr ? 1 : *control.grad_scale,
                             .skips = control.found_inf != nullptr && *control.found_inf != 0,
                             .zeroes = control.zero_grad};
  if (values.skips && !values.zeroes) return;
  int s = 0;
  for (std::int64_t tile = blockIdx.x; tile < batch.first_tile[batch.num_slices]; tile += gridDim.x) {
    while (tile >= batch.first_tile[s + 1]) ++s;  // tiles of a block only grow
    const Slice& slice = batch.slices[s];
    const std::int64_t i = (tile - batch.first_tile[s]) * kTile + threadIdx.x * kPerThread;
    if (i < slice.n) body(slice, i, values);
  }
}

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

}  // namespace bmtrain::cuda
