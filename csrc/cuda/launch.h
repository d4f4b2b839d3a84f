// What every kernel file uses: launches, element types, grid sizes, sums over a block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "common/dtype.h"
#include "cuda/element.h"

namespace bmtrain::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

/// Blocks for `num_tasks` tasks: one each, as far as a grid goes. With 16 blocks for each multiprocessor of
/// an H100, which took several in turn, Adam took 1.08 times as long.
inline unsigned grid_for(std::int64_t num_tasks) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  return static_cast<unsigned>(num_tasks < 1 ? 1 : num_tasks < kMost ? num_tasks : kMost);
}

/// Starts `kernel` on `grid` blocks of kThreads. A function and not <<<>>>, so that a host compiler can read
/// the kernel files too (tests/cuda/emulate).
template <typename... Parameters, typename... Arguments>
[[nodiscard]] cudaError_t launch(cudaStream_t stream, unsigned grid, void (*kernel)(Parameters...),
                                 Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim.x = grid;
  config.blockDim.x = kThreads;
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());  // returned, so not left for others
  return error;
}

template <typename T>
struct ElementType {
  using Type = T;
};

/// Calls then(ElementType<T>()) for the fp32, bf16 or fp16 that `dtype` names.
template <typename Then>
[[nodiscard]] cudaError_t with_element_type(DType dtype, const Then& then) {
  switch (dtype) {
    case DType::kFloat32:
      return then(ElementType<float>());
    case DType::kBFloat16:
      return then(ElementType<Bf16>());
    case DType::kFloat16:
      return then(ElementType<Half>());
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

/// A value of another lane, word by word.
template <typename Value>
__device__ Value shuffled_down(const Value& value, unsigned lanes) {
  static_assert(sizeof(Value) % 4 == 0);
  unsigned words[sizeof(Value) / 4];
  memcpy(words, &value, sizeof(Value));
#pragma unroll
  for (unsigned& word : words) word = __shfl_down_sync(0xffffffffu, word, lanes);
  Value result;
  memcpy(&result, words, sizeof(Value));
  return result;
}

/// Merges the values of a block's kThreads threads, always in the same order; valid on thread 0. A kernel
/// calls it once.
template <typename Value, typename Merge>
__device__ Value merge_block(Value value, Merge merge) {
  constexpr int kWarps = kThreads / kWarp;
  alignas(Value) __shared__ unsigned char memory[kWarps * sizeof(Value)];  // a Value may have initialisers
  auto* const of_warp = reinterpret_cast<Value*>(memory);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = merge(value, shuffled_down(value, lanes));
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) value = merge(value, of_warp[w]);
  }
  return value;
}

}  // namespace bmtrain::cuda
