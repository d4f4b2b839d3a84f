// Stands in for CUDA's own header where a host compiler compiles the .cu files: what they use of it, and no
// more. machine.h runs what they launch.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// A block has a thread-local segment to itself, see [Note: Where shared memory lies] in machine.cpp.
#define __shared__ static thread_local

inline constexpr emulate::Index& threadIdx = emulate::position.thread;
inline constexpr emulate::Index& blockIdx = emulate::position.block;
inline constexpr emulate::Index& blockDim = emulate::position.block_size;
inline constexpr emulate::Index& gridDim = emulate::position.grid_size;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace emulate {

// Not instrumented: what a kernel gets by value it may read, wherever the caller has it.
template <typename Kernel, typename Arguments, std::size_t... kIndices>
__attribute__((no_sanitize("thread"))) void call(Kernel kernel, Arguments& arguments,
                                                 std::index_sequence<kIndices...>) {
  kernel(std::get<kIndices>(arguments)...);
}

template <typename Kernel, typename Arguments>
struct Call {
  Kernel kernel;
  Arguments arguments;
  __attribute__((no_sanitize("thread"))) static void run(void* self) {
    auto& of = *static_cast<Call*>(self);
    call(of.kernel, of.arguments, std::make_index_sequence<std::tuple_size_v<Arguments>>());
  }
};

}  // namespace emulate

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "more than kernels take as arguments");
  using Call = emulate::Call<void (*)(Parameters...), std::tuple<std::remove_cv_t<Parameters>...>>;
  Call call{kernel, {std::forward<Arguments>(arguments)...}};
  const dim3 &grid = config->gridDim, &block = config->blockDim;
  const bool is_valid = grid.x > 0 && grid.y == 1 && grid.z == 1 && grid.x <= 0x7fffffffu && block.x > 0 &&
                        block.y == 1 && block.z == 1 && block.x <= 1024;
  if (!is_valid) return cudaErrorInvalidValue;
  static_assert(std::is_trivially_destructible_v<Call>);
  return emulate::start({grid.x, block.x, &Call::run, &call, sizeof(call), config->stream})
             ? cudaSuccess
             : cudaErrorLaunchFailure;
}

inline void __syncthreads() { emulate::wait_for_block(); }

inline unsigned __shfl_down_sync(unsigned mask, unsigned value, unsigned lanes) {
  const unsigned lane = threadIdx.x % 32, from = lane + lanes < 32 ? lane + lanes : lane;
  return static_cast<unsigned>(emulate::exchange(mask, value, from));
}

inline unsigned __shfl_sync(unsigned mask, unsigned value, int lane) {
  return static_cast<unsigned>(emulate::exchange(mask, value, static_cast<unsigned>(lane)));
}
inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes) {
  return static_cast<unsigned>(
      emulate::exchange(mask, value, threadIdx.x % 32 ^ static_cast<unsigned>(lanes)));
}

// Cache hints change no value.
template <typename T>
__attribute__((no_sanitize("thread"), noinline)) T __ldcs(const T* from) {
  emulate::touch(from, sizeof(T), /*writes=*/false, __builtin_return_address(0));
  return *from;
}
template <typename T>
__attribute__((no_sanitize("thread"), noinline)) void __stcs(T* to, T value) {
  emulate::touch(to, sizeof(T), /*writes=*/true, __builtin_return_address(0));
  *to = value;
}
