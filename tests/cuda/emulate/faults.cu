// Kernels that do what kernels must not: tests/cuda/test_emulation.py sees that each is found out.
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 64;

__global__ void beyond_the_end(float* x, int n) { x[threadIdx.x] = static_cast<float>(n); }

__global__ void misaligned(float* x, int n) {
  if (threadIdx.x == 0) __stcs(reinterpret_cast<uint4*>(x + n % 4), uint4{});
}

__global__ void writes_input(float* x, int n) { x[0] = static_cast<float>(n); }

__global__ void barrier_of_half(float* x, int n) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
  if (threadIdx.x == 0) x[0] = static_cast<float>(n);
}

__global__ void shuffle_of_half(float* x, int n) {
  unsigned value = threadIdx.x;
  if (threadIdx.x % 2 == 0) value = __shfl_down_sync(0xffffffffu, value, 1);
  if (threadIdx.x == 0) x[0] = static_cast<float>(value + static_cast<unsigned>(n));
}

__global__ void no_barrier(float* x, int n) {
  __shared__ float memory[kThreads];
  memory[threadIdx.x] = static_cast<float>(n);
  if (threadIdx.x == 0) x[0] = memory[kThreads - 1];
}

__global__ void second_write_too_early(float* x, int n) {
  __shared__ float memory[kThreads];
  memory[threadIdx.x] = static_cast<float>(n);
  __syncthreads();
  const float other = memory[(threadIdx.x + 1) % kThreads];
  memory[threadIdx.x] = other;
  if (threadIdx.x == 0) x[0] = other;
}

__global__ void never_written(float* x, int n) {
  __shared__ float memory[kThreads];
  if (threadIdx.x < 32) memory[threadIdx.x] = static_cast<float>(n);
  __syncthreads();
  if (threadIdx.x == 0) x[0] = memory[40];
}

__global__ void same_place(float* x, int n) { x[0] = static_cast<float>(n); }

__global__ void right(float* x, int n) {
  __shared__ float memory[kThreads];
  memory[threadIdx.x] = static_cast<float>(n);
  __syncthreads();
  if (threadIdx.x < 4) x[threadIdx.x] = memory[kThreads - 1 - threadIdx.x];
}

}  // namespace

#define BMT_ENTRY(kernel)                                               \
  extern "C" int run_##kernel(float* x, long n) {                       \
    cudaLaunchConfig_t config = {};                                     \
    config.gridDim.x = 2 - (n == 4);                                    \
    config.blockDim.x = kThreads;                                       \
    return cudaLaunchKernelEx(&config, kernel, x, static_cast<int>(n)); \
  }
BMT_ENTRY(beyond_the_end)
BMT_ENTRY(misaligned)
BMT_ENTRY(writes_input)
BMT_ENTRY(barrier_of_half)
BMT_ENTRY(shuffle_of_half)
BMT_ENTRY(no_barrier)
BMT_ENTRY(second_write_too_early)
BMT_ENTRY(never_written)
BMT_ENTRY(same_place)
BMT_ENTRY(right)
