// Passes that are bound by memory alone. See [Note: Tiles] in tiles.h.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/tiles.h"

namespace bmtrain::cuda {
namespace {

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

template <typename T>
Placed placed(const T* array) {
  return {array, sizeof(T)};
}

// Sources travel as kernel arguments: all their pointers, or the first one and the distance between them.
// Each kind has a kernel of its own, as one that asks which it has runs out of registers.
struct ListedSources {
  static constexpr int kUnroll = 4;
  const void* pointers[kMostSources];
  int count;

  template <typename T>
  __host__ __device__ const T* at(int s) const {
    return static_cast<const T*>(pointers[s]);
  }
};

struct SpacedSources {
  static constexpr int kUnroll = 2;  // more runs out of registers
  const void* first;
  std::int64_t spacing;  // in elements
  int count;

  template <typename T>
  __host__ __device__ const T* at(int s) const {
    return static_cast<const T*>(first) + s * spacing;
  }
};

std::int64_t distance(const void* from, const void* to) {
  return reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from);
}

template <typename T>
using SumTiles = Tiles<16 / static_cast<int>(sizeof(T)), sizeof(T) == 8 ? 1 : 2>;

// What becomes of a sum.
template <typename T>
__device__ T finished(typename Sum<T>::Type total, typename Sum<T>::Type factor, bool accumulate, T old) {
  if (factor != 1) total *= factor;
  return Sum<T>::rounded(accumulate ? total + Sum<T>::of(old) : total);
}

template <typename T, typename Sources>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(T* out, const __grid_constant__ Sources sources, std::int64_t n, Alignment alignment,
               bool accumulate, typename Sum<T>::Type factor) {
  using Tiling = SumTiles<T>;
  using Wide = typename Sum<T>::Type;
  const auto source = [&](int s) { return sources.template at<T>(s); };
  Tiling::visit_all(
      n, alignment,
      [&](std::int64_t i) {
        typename Tiling::template Wide<Wide> total = {};
        typename Tiling::template Packs<T> in;
#pragma unroll Sources::kUnroll
        for (int s = 0; s < sources.count; ++s) {
          Tiling::load(source(s) + i, in);
          Tiling::for_each([&](int u, int k) {
            const Wide x = Sum<T>::of(in[u].values[k]);
            total[u][k] = s == 0 ? x : total[u][k] + x;
          });
        }
        if (accumulate) Tiling::load(out + i, in);
        Tiling::for_each([&](int u, int k) {
          in[u].values[k] = finished<T>(total[u][k], factor, accumulate, in[u].values[k]);
        });
        Tiling::store(out + i, in);
      },
      [&](std::int64_t i) {
        Wide total = 0;
        for (int s = 0; s < sources.count; ++s) {
          const Wide x = Sum<T>::of(source(s)[i]);
          total = s == 0 ? x : total + x;
        }
        out[i] = finished<T>(total, factor, accumulate, accumulate ? out[i] : T{});
      });
}

template <typename T>
using ScaleTiles = Tiles<16 / static_cast<int>(sizeof(T)), 4>;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* x, std::int64_t n, Alignment alignment, const float* factor) {
  using Tiling = ScaleTiles<T>;
  const float by = *factor;
  if (by == 1) return;
  Tiling::visit_all(
      n, alignment,
      [&](std::int64_t i) {
        typename Tiling::template Packs<T> packs;
        Tiling::load(x + i, packs);
        Tiling::for_each(
            [&](int u, int k) { packs[u].values[k] = from_float<T>(to_float(packs[u].values[k]) * by); });
        Tiling::store(x + i, packs);
      },
      [&](std::int64_t i) { x[i] = from_float<T>(to_float(x[i]) * by); });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    square_kernel(double* partial, const T* x, std::int64_t n, Alignment alignment) {
  using Tiling = ScaleTiles<T>;
  double total = 0;
  const auto add = [&](T element) {
    const double value = to_float(element);
    total = fma(value, value, total);
  };
  Tiling::visit_all(
      n, alignment,
      [&](std::int64_t i) {
        typename Tiling::template Packs<T> packs;
        Tiling::load(x + i, packs);
        Tiling::for_each([&](int u, int k) { add(packs[u].values[k]); });
      },
      [&](std::int64_t i) { add(x[i]); });
  total = merge_block(total, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) partial[blockIdx.x] += total;
}

__global__ void __launch_bounds__(kThreads) finish_kernel(double* result, const double* partial) {
  double total = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kPartialSums; i += kThreads) total += partial[i];
  total = merge_block(total, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) *result = total;
}

template <typename T, typename Sources>
cudaError_t launch_sum(void* out, const Sources& sources, std::int64_t n, bool accumulate, double factor,
                       cudaStream_t stream) {
  using Tiling = SumTiles<T>;
  auto* const to = static_cast<T*>(out);
  Alignment alignment = Tiling::alignment_of(placed(to));
  for (int s = 0; s < sources.count; ++s) {
    const Placed source = placed(sources.template at<T>(s));
    alignment.has_packs = alignment.has_packs && Tiling::alignment_of(placed(to), source).has_packs;
  }
  return launch(stream, grid_for(Tiling::count(n, alignment)), sum_kernel<T, Sources>, to, sources, n,
                alignment, accumulate, static_cast<typename Sum<T>::Type>(factor));
}

}  // namespace

bool is_evenly_spaced(const void* const* pointers, int count) {
  for (int s = 2; s < count; ++s) {
    if (distance(pointers[s - 1], pointers[s]) != distance(pointers[0], pointers[1])) return false;
  }
  return count < 2 || pointers[0] != pointers[1];
}

cudaError_t ordered_sum(void* out, const void* const* sources, int num_sources, std::int64_t n, DType dtype,
                        bool accumulate, double factor, cudaStream_t stream) {
  // More would need a second pass, over rounded sums.
  const bool fits = num_sources <= kMostSources;
  if (!fits && !is_evenly_spaced(sources, num_sources)) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  const auto sum = [&](const auto& batch) {
    if (dtype == DType::kFloat64) return launch_sum<double>(out, batch, n, accumulate, factor, stream);
    return with_element_type(dtype, [&](auto type) {
      return launch_sum<typename decltype(type)::Type>(out, batch, n, accumulate, factor, stream);
    });
  };
  if (!fits) {
    const std::int64_t spacing = distance(sources[0], sources[1]);
    if (spacing % size_of(dtype) != 0) return cudaErrorInvalidValue;
    return sum(SpacedSources{sources[0], spacing / size_of(dtype), num_sources});
  }
  ListedSources listed = {};
  listed.count = num_sources;
  std::copy(sources, sources + num_sources, listed.pointers);
  return sum(listed);
}

cudaError_t scale(void* x, std::int64_t n, DType dtype, const float* factor, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return with_element_type(dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    auto* const data = static_cast<T*>(x);
    const Alignment alignment = ScaleTiles<T>::alignment_of(placed(data));
    const unsigned grid = grid_for(ScaleTiles<T>::count(n, alignment));
    return launch(stream, grid, scale_kernel<T>, data, n, alignment, factor);
  });
}

cudaError_t squared_sum(double* partial, const void* x, std::int64_t n, DType dtype, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return with_element_type(dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    const auto* const data = static_cast<const T*>(x);
    const Alignment alignment = ScaleTiles<T>::alignment_of(placed(data));
    // Which element meets which partial sum does not depend on the card.
    const unsigned grid = std::min<unsigned>(grid_for(ScaleTiles<T>::count(n, alignment)), kPartialSums);
    return launch(stream, grid, square_kernel<T>, partial, data, n, alignment);
  });
}

cudaError_t finish_squared_sum(double* total, const double* partial, cudaStream_t stream) {
  return launch(stream, 1, finish_kernel, total, partial);
}

}  // namespace bmtrain::cuda
