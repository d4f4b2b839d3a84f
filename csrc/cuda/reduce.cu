// Passes that are bound by memory alone: every thread moves 16 bytes at a time where pointers allow.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace bmtrain::cuda {
namespace {

constexpr int kPerThread = 8;

template <typename T>
struct Sum {  // the type that sums of T are made in
  using Type = float;
  static __device__ float of(T x) { return to_float(x); }
  static __device__ T rounded(float x) { return from_float<T>(x); }
};
template <>
struct Sum<double> {
  using Type = double;
  static __device__ double of(double x) { return x; }
  static __device__ double rounded(double x) { return x; }
};

// The elements [first, first + kCount) of an array; beyond its end, zeros.
template <typename T, int kCount>
__device__ Pack<T, kCount> load_part(const T* from, std::int64_t first, std::int64_t n) {
  if (first + kCount <= n && is_aligned(from + first, alignof(Pack<T, kCount>))) {
    return *reinterpret_cast<const Pack<T, kCount>*>(from + first);
  }
  Pack<T, kCount> pack = {};
  for (int k = 0; k < kCount; ++k) {
    if (first + k < n) pack.values[k] = from[first + k];
  }
  return pack;
}

template <typename T, int kCount>
__device__ void store_part(T* to, std::int64_t first, std::int64_t n, const Pack<T, kCount>& pack) {
  if (first + kCount <= n && is_aligned(to + first, alignof(Pack<T, kCount>))) {
    *reinterpret_cast<Pack<T, kCount>*>(to + first) = pack;
    return;
  }
  for (int k = 0; k < kCount; ++k) {
    if (first + k < n) to[first + k] = pack.values[k];
  }
}

__device__ std::int64_t first_element() {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerThread;
}
__device__ std::int64_t grid_stride() { return static_cast<std::int64_t>(gridDim.x) * kThreads * kPerThread; }
unsigned grid_over(std::int64_t n) {
  return grid_for((n + kThreads * kPerThread - 1) / (kThreads * kPerThread));
}

template <typename Out, typename Source>
__global__ void __launch_bounds__(kThreads) cast_kernel(Out* out, const Source* source, std::int64_t n) {
  for (std::int64_t i = first_element(); i < n; i += grid_stride()) {
    const auto in = load_part<Source, kPerThread>(source, i, n);
    Pack<Out, kPerThread> result;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) result.values[k] = from_float<Out>(to_float(in.values[k]));
    store_part(out, i, n, result);
  }
}

struct Sources {
  const void* pointers[kMostSources];
  int count;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(T* out, const __grid_constant__ Sources sources, std::int64_t n, bool accumulate,
               typename Sum<T>::Type factor) {
  using Wide = typename Sum<T>::Type;
  for (std::int64_t i = first_element(); i < n; i += grid_stride()) {
    Wide total[kPerThread] = {};
    for (int s = 0; s < sources.count; ++s) {
      const auto in = load_part<T, kPerThread>(static_cast<const T*>(sources.pointers[s]), i, n);
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) {
        total[k] = s == 0 ? Sum<T>::of(in.values[k]) : total[k] + Sum<T>::of(in.values[k]);
      }
    }
    Pack<T, kPerThread> result = {};
    if (accumulate) result = load_part<T, kPerThread>(out, i, n);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const Wide sum = factor == 1 ? total[k] : total[k] * factor;
      result.values[k] = Sum<T>::rounded(accumulate ? sum + Sum<T>::of(result.values[k]) : sum);
    }
    store_part(out, i, n, result);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) scale_kernel(T* x, std::int64_t n, const float* factor) {
  const float by = *factor;
  if (by == 1) return;
  for (std::int64_t i = first_element(); i < n; i += grid_stride()) {
    auto pack = load_part<T, kPerThread>(x, i, n);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) pack.values[k] = from_float<T>(to_float(pack.values[k]) * by);
    store_part(x, i, n, pack);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) square_kernel(double* partial, const T* x, std::int64_t n) {
  double total = 0;
  for (std::int64_t i = first_element(); i < n; i += grid_stride()) {
    const auto in = load_part<T, kPerThread>(x, i, n);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const double value = to_float(in.values[k]);
      total = fma(value, value, total);
    }
  }
  total = merge_block(total, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) partial[blockIdx.x] += total;
}

__global__ void __launch_bounds__(kThreads) finish_kernel(double* result, const double* partial) {
  double total = 0;
  for (int i = threadIdx.x; i < kPartialSums; i += kThreads) total += partial[i];
  total = merge_block(total, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) *result = total;
}

template <typename Out>
void launch_cast(void* out, const void* source, DType source_dtype, std::int64_t n, cudaStream_t stream) {
  auto* const to = static_cast<Out*>(out);
  const unsigned grid = grid_over(n);
  if (source_dtype == DType::kFloat32) {
    cast_kernel<<<grid, kThreads, 0, stream>>>(to, static_cast<const float*>(source), n);
  } else if (source_dtype == DType::kBFloat16) {
    cast_kernel<<<grid, kThreads, 0, stream>>>(to, static_cast<const Bf16*>(source), n);
  } else {
    cast_kernel<<<grid, kThreads, 0, stream>>>(to, static_cast<const Half*>(source), n);
  }
}

template <typename T>
cudaError_t launch_sum(void* out, const Sources& sources, std::int64_t n, bool accumulate, double factor,
                       cudaStream_t stream) {
  using Wide = typename Sum<T>::Type;
  sum_kernel<T><<<grid_over(n), kThreads, 0, stream>>>(static_cast<T*>(out), sources, n, accumulate,
                                                       static_cast<Wide>(factor));
  return cudaGetLastError();
}

}  // namespace

cudaError_t cast(void* out, DType out_dtype, const void* source, DType source_dtype, std::int64_t n,
                 cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (out_dtype == DType::kFloat64 || source_dtype == DType::kFloat64) return cudaErrorInvalidValue;
  if (out_dtype == DType::kFloat32) {
    launch_cast<float>(out, source, source_dtype, n, stream);
  } else if (out_dtype == DType::kBFloat16) {
    launch_cast<Bf16>(out, source, source_dtype, n, stream);
  } else {
    launch_cast<Half>(out, source, source_dtype, n, stream);
  }
  return cudaGetLastError();
}

cudaError_t ordered_sum(void* out, const void* const* sources, int num_sources, std::int64_t n, DType dtype,
                        bool accumulate, double factor, cudaStream_t stream) {
  // They travel as kernel arguments; more would need a second pass, over rounded sums.
  if (num_sources > kMostSources) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  Sources batch = {};
  batch.count = num_sources;
  std::copy(sources, sources + num_sources, batch.pointers);
  switch (dtype) {
    case DType::kFloat32:
      return launch_sum<float>(out, batch, n, accumulate, factor, stream);
    case DType::kBFloat16:
      return launch_sum<Bf16>(out, batch, n, accumulate, factor, stream);
    case DType::kFloat16:
      return launch_sum<Half>(out, batch, n, accumulate, factor, stream);
    default:
      return launch_sum<double>(out, batch, n, accumulate, factor, stream);
  }
}

cudaError_t scale(void* x, std::int64_t n, DType dtype, const float* factor, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const unsigned grid = grid_over(n);
  if (dtype == DType::kFloat32) {
    scale_kernel<<<grid, kThreads, 0, stream>>>(static_cast<float*>(x), n, factor);
  } else if (dtype == DType::kBFloat16) {
    scale_kernel<<<grid, kThreads, 0, stream>>>(static_cast<Bf16*>(x), n, factor);
  } else if (dtype == DType::kFloat16) {
    scale_kernel<<<grid, kThreads, 0, stream>>>(static_cast<Half*>(x), n, factor);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t squared_sum(double* partial, const void* x, std::int64_t n, DType dtype, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  // A fixed grid: which element meets which partial sum does not depend on the card.
  const unsigned grid = std::min<unsigned>(grid_over(n), kPartialSums);
  if (dtype == DType::kFloat32) {
    square_kernel<<<grid, kThreads, 0, stream>>>(partial, static_cast<const float*>(x), n);
  } else if (dtype == DType::kBFloat16) {
    square_kernel<<<grid, kThreads, 0, stream>>>(partial, static_cast<const Bf16*>(x), n);
  } else if (dtype == DType::kFloat16) {
    square_kernel<<<grid, kThreads, 0, stream>>>(partial, static_cast<const Half*>(x), n);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t finish_squared_sum(double* total, const double* partial, cudaStream_t stream) {
  finish_kernel<<<1, kThreads, 0, stream>>>(total, partial);
  return cudaGetLastError();
}

}  // namespace bmtrain::cuda
