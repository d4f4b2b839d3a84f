// What the kernels of all optimizers have in common: one pass over ranges that lie anywhere.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cpu/kernels.h"
#include "cuda/launch.h"
#include "cuda/tiles.h"

namespace bmtrain::cuda {

// Four elements are 16 bytes of fp32 and 8 of 16-bit values. Two packs of each array keep enough bytes under
// way (docs/explanation/gpu.md), and more would take registers from other threads.
constexpr int kStepCount = 4;
constexpr int kStepUnroll = 2;
using StepTiles = Tiles<kStepCount, kStepUnroll>;

constexpr int kRangesPerLaunch = 16;  // they travel as kernel arguments, of which there are 4 KiB

template <typename Slice>
struct StepBatch {
  Slice slices[kRangesPerLaunch];
  Alignment alignments[kRangesPerLaunch];
  std::int64_t first_tile[kRangesPerLaunch + 1];
  int num_slices;
};

__device__ inline float load_as_float(const void* from, DType dtype, std::int64_t i) {
  if (dtype == DType::kBFloat16) return to_float(static_cast<const Bf16*>(from)[i]);
  if (dtype == DType::kFloat16) return to_float(static_cast<const Half*>(from)[i]);
  return static_cast<const float*>(from)[i];
}

__device__ inline void store_from_float(void* to, DType dtype, std::int64_t i, float x) {
  if (dtype == DType::kBFloat16) {
    static_cast<Bf16*>(to)[i] = from_float<Bf16>(x);
  } else if (dtype == DType::kFloat16) {
    static_cast<Half*>(to)[i] = from_float<Half>(x);
  } else {
    static_cast<float*>(to)[i] = x;
  }
}

// An Optimizer has
//   Slice                     what it updates, a cpu::StepSlice with kMoments arrays more
//   kMoments                  their number
//   moment(slice, m)          the m-th of them, or nullptr
//   update(slice, g, w, m)    one element's step; g is the gradient, w the weight and m its moments, which
//                             become the new ones

template <typename Optimizer, typename Grad, typename Rounded>
__device__ void step_packs(const typename Optimizer::Slice& slice, std::int64_t i) {
  StepTiles::Packs<Grad> g;
  StepTiles::Packs<float> w, moments[Optimizer::kMoments] = {};
  StepTiles::load(static_cast<const Grad*>(slice.grad) + i, g);
  StepTiles::load(slice.weight + i, w);
#pragma unroll
  for (int m = 0; m < Optimizer::kMoments; ++m) {
    if (Optimizer::moment(slice, m) != nullptr) StepTiles::load(Optimizer::moment(slice, m) + i, moments[m]);
  }
  StepTiles::for_each([&](int u, int k) {
    float of_element[Optimizer::kMoments];
    for (int m = 0; m < Optimizer::kMoments; ++m) of_element[m] = moments[m][u].values[k];
    Optimizer::update(slice, to_float(g[u].values[k]), w[u].values[k], of_element);
    for (int m = 0; m < Optimizer::kMoments; ++m) moments[m][u].values[k] = of_element[m];
  });
  StepTiles::store(slice.weight + i, w);
#pragma unroll
  for (int m = 0; m < Optimizer::kMoments; ++m) {
    if (Optimizer::moment(slice, m) != nullptr) StepTiles::store(Optimizer::moment(slice, m) + i, moments[m]);
  }
  if constexpr (sizeof(Rounded) == 2) {
    StepTiles::Packs<Rounded> rounded;
    StepTiles::for_each([&](int u, int k) { rounded[u].values[k] = from_float<Rounded>(w[u].values[k]); });
    StepTiles::store(static_cast<Rounded*>(slice.rounded) + i, rounded);
  }
}

template <typename Optimizer, typename Grad>
__device__ void step_packs_from(const typename Optimizer::Slice& slice, std::int64_t i) {
  if (slice.rounded == nullptr) return step_packs<Optimizer, Grad, float>(slice, i);
  if (slice.rounded_dtype == DType::kBFloat16) return step_packs<Optimizer, Grad, Bf16>(slice, i);
  return step_packs<Optimizer, Grad, Half>(slice, i);
}

/// One element at the end of a range, or of one whose arrays lie unlike each other.
template <typename Optimizer>
__device__ void step_one(const typename Optimizer::Slice& slice, std::int64_t i) {
  float w = slice.weight[i];
  float moments[Optimizer::kMoments] = {};
  for (int m = 0; m < Optimizer::kMoments; ++m) {
    if (Optimizer::moment(slice, m) != nullptr) moments[m] = Optimizer::moment(slice, m)[i];
  }
  Optimizer::update(slice, load_as_float(slice.grad, slice.grad_dtype, i), w, moments);
  slice.weight[i] = w;
  for (int m = 0; m < Optimizer::kMoments; ++m) {
    if (Optimizer::moment(slice, m) != nullptr) Optimizer::moment(slice, m)[i] = moments[m];
  }
  if (slice.rounded != nullptr) store_from_float(slice.rounded, slice.rounded_dtype, i, w);
}

template <typename Optimizer>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ StepBatch<typename Optimizer::Slice> batch) {
  int s = 0;
  for (std::int64_t tile = blockIdx.x; tile < batch.first_tile[batch.num_slices]; tile += gridDim.x) {
    while (tile >= batch.first_tile[s + 1]) ++s;  // tiles of a block only grow
    const auto& slice = batch.slices[s];
    StepTiles::visit(
        tile - batch.first_tile[s], slice.n, batch.alignments[s],
        [&](std::int64_t i) {
          if (slice.grad_dtype == DType::kBFloat16) return step_packs_from<Optimizer, Bf16>(slice, i);
          if (slice.grad_dtype == DType::kFloat16) return step_packs_from<Optimizer, Half>(slice, i);
          step_packs_from<Optimizer, float>(slice, i);
        },
        [&](std::int64_t i) { step_one<Optimizer>(slice, i); });
  }
}

template <typename Optimizer>
Alignment alignment_of_slice(const typename Optimizer::Slice& slice) {
  const Placed weight{slice.weight, sizeof(float)};
  Alignment all = StepTiles::alignment_of(weight, Placed{slice.grad, size_of(slice.grad_dtype)},
                                          Placed{slice.rounded, size_of(slice.rounded_dtype)});
  for (int m = 0; m < Optimizer::kMoments; ++m) {
    const Placed moment{Optimizer::moment(slice, m), sizeof(float)};
    all.has_packs = all.has_packs && StepTiles::alignment_of(weight, moment).has_packs;
  }
  return all;
}

/// Tiles of a slice, whose packs lie as `alignment` says.
template <typename Slice>
std::int64_t num_packed_tiles(const Slice& slice, const Alignment& alignment) {
  return slice.n == 0 ? 0 : StepTiles::count(slice.n, alignment);
}

/// Updates all slices with as few launches as their number allows. `num_tiles(slice, alignment)` are the
/// tiles that `kernel` makes of a slice.
template <typename Optimizer, typename NumTiles>
[[nodiscard]] cudaError_t step(const typename Optimizer::Slice* slices, std::int64_t num_slices,
                               cudaStream_t stream, void (*kernel)(StepBatch<typename Optimizer::Slice>),
                               const NumTiles& num_tiles) {
  using Batch = StepBatch<typename Optimizer::Slice>;
  static_assert(sizeof(Batch) <= 4096);
  for (std::int64_t first = 0; first < num_slices; first += kRangesPerLaunch) {
    Batch batch = {};
    batch.num_slices = static_cast<int>(std::min<std::int64_t>(kRangesPerLaunch, num_slices - first));
    for (int s = 0; s < batch.num_slices; ++s) {
      const auto& slice = batch.slices[s] = slices[first + s];
      if (slice.grad_dtype == DType::kFloat64) return cudaErrorInvalidValue;
      batch.alignments[s] = alignment_of_slice<Optimizer>(slice);
      batch.first_tile[s + 1] = batch.first_tile[s] + num_tiles(slice, batch.alignments[s]);
    }
    const std::int64_t all_tiles = batch.first_tile[batch.num_slices];
    if (all_tiles == 0) continue;
    const cudaError_t error = launch(stream, grid_for(all_tiles), kernel, batch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Optimizer>
[[nodiscard]] cudaError_t step(const typename Optimizer::Slice* slices, std::int64_t num_slices,
                               cudaStream_t stream) {
  return step<Optimizer>(slices, num_slices, stream, step_kernel<Optimizer>,
                         num_packed_tiles<typename Optimizer::Slice>);
}

}  // namespace bmtrain::cuda
