// How the threads of a grid share arrays of one length.
//
// [Note: Tiles]
// A thread takes packs: neighbours that one instruction loads, 16 bytes of the widest array. A warp's packs
// follow each other, so that its accesses fill whole sectors of memory; a thread takes kUnroll of them, a
// warp's width times kThreads apart, and asks for all before it uses the first. A block takes a tile, and
// then the tile a grid further on.
//
// Arrays may start anywhere. If all of them are equally far beyond a place where packs could start, tiles
// start there too, and only the ends are taken element by element; otherwise everything is.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/element.h"
#include "cuda/launch.h"
#include "cuda/pack.h"

namespace bmtrain::cuda {

/// Where the packs of `kCount` elements lie in some arrays.
struct Alignment {
  int skipped = 0;        // elements between the start of the first pack and that of the arrays
  bool has_packs = true;  // whether it is the same in all arrays
};

/// An array's address and the size of its elements.
struct Placed {
  const void* address;
  std::int64_t element_size;
};

template <int kCount, int kUnroll>
struct Tiles {
  static constexpr std::int64_t kStride = std::int64_t{kThreads} * kCount;  // between packs of a thread
  static constexpr std::int64_t kSize = kStride * kUnroll;

  template <typename T>
  using Packs = Pack<T, kCount>[kUnroll];
  /// A thread's elements in another type, in registers.
  template <typename T>
  using Wide = T[kUnroll][kCount];

  /// Arrays at nullptr are none.
  template <typename... Arrays>
  static Alignment alignment_of(const Placed& first, const Arrays&... others) {
    const auto skipped_in = [](const Placed& array) {
      const auto element_size = static_cast<std::uintptr_t>(array.element_size);
      return static_cast<int>(reinterpret_cast<std::uintptr_t>(array.address) / element_size % kCount);
    };
    const int skipped = skipped_in(first);
    return {skipped, ((others.address == nullptr || skipped_in(others) == skipped) && ...)};
  }

  /// Tiles of n elements.
  static std::int64_t count(std::int64_t n, const Alignment& alignment) {
    return (n + alignment.skipped + kSize - 1) / kSize;
  }

  /// This thread's part of a tile: visit_packs(i) if it is whole, with packs at i, i + kStride, ...;
  /// visit_one(i) for each element otherwise.
  template <typename VisitPacks, typename VisitOne>
  static __device__ void visit(std::int64_t tile, std::int64_t n, const Alignment& alignment,
                               const VisitPacks& visit_packs, const VisitOne& visit_one) {
    const std::int64_t i = tile * kSize - alignment.skipped + std::int64_t{threadIdx.x} * kCount;
    if (alignment.has_packs && i >= 0 && i + (kUnroll - 1) * kStride + kCount <= n) {
      visit_packs(i);
      return;
    }
#pragma unroll 1
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll 1
      for (int k = 0; k < kCount; ++k) {
        const std::int64_t one = i + u * kStride + k;
        if (one >= 0 && one < n) visit_one(one);
      }
    }
  }

  /// The same for all tiles of this thread's block.
  template <typename VisitPacks, typename VisitOne>
  static __device__ void visit_all(std::int64_t n, const Alignment& alignment, const VisitPacks& visit_packs,
                                   const VisitOne& visit_one) {
    const std::int64_t num_tiles = (n + alignment.skipped + kSize - 1) / kSize;
    for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x)
      visit(tile, n, alignment, visit_packs, visit_one);
  }

  /// Calls body(pack, element of it) for all of visit_packs(i), with numbers that the compiler knows.
  template <typename Body>
  static __device__ void for_each(const Body& body) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) body(u, k);
    }
  }

  /// The packs that visit_packs(i) is about.
  template <typename T>
  static __device__ void load(const T* from, Packs<T>& to) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) to[u] = load_pack<kCount>(from + u * kStride);
  }
  template <typename T>
  static __device__ void store(T* to, const Packs<T>& from) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) store_pack(to + u * kStride, from[u]);
  }
};

}  // namespace bmtrain::cuda
