// What every kernel file uses: 16-byte access, grid sizes, sums over a block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/element.h"

namespace bmtrain::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

/// Blocks for `num_tasks` tasks of one block each, which then take several in turn.
inline unsigned grid_for(std::int64_t num_tasks) {
  constexpr std::int64_t kMost = 132 * 16;  // enough waves for the largest cards; more only start blocks
  return static_cast<unsigned>(num_tasks < 1 ? 1 : num_tasks < kMost ? num_tasks : kMost);
}

/// `kCount` neighbours, loaded and stored at once (16 bytes at a time).
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T values[kCount];
};

template <typename T>
__host__ __device__ inline bool is_aligned(const T* pointer, std::uintptr_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// Merges the threads' values, in an order that depends on the number of threads alone; valid on thread 0.
template <typename Value, typename Merge>
__device__ Value merge_block(Value value, Merge merge) {
  __shared__ alignas(Value) unsigned char memory[kThreads * sizeof(Value)];  // a Value may have initialisers
  auto* const of_thread = reinterpret_cast<Value*>(memory);
  of_thread[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
      of_thread[threadIdx.x] = merge(of_thread[threadIdx.x], of_thread[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const Value result = of_thread[0];
  __syncthreads();
  return result;
}

}  // namespace bmtrain::cuda
