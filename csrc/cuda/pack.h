// Several neighbours in one access to memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/element.h"

namespace bmtrain::cuda {

/// `kCount` neighbours: 4, 8 or 16 bytes, and aligned to as many.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

namespace detail {
template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<4> {
  using Type = unsigned;
};
template <>
struct WordsOf<8> {
  using Type = uint2;
};
template <>
struct WordsOf<16> {
  using Type = uint4;
};
}  // namespace detail

template <typename T, int kCount>
using Words = typename detail::WordsOf<static_cast<int>(sizeof(T)) * kCount>::Type;

/// The pack at an aligned address, of memory that the kernel reads once: first to leave the caches.
template <int kCount, typename T>
__device__ Pack<T, kCount> load_pack(const T* from) {
  return bits_as<Pack<T, kCount>>(__ldcs(reinterpret_cast<const Words<T, kCount>*>(from)));
}

template <typename T, int kCount>
__device__ void store_pack(T* to, const Pack<T, kCount>& pack) {
  __stcs(reinterpret_cast<Words<T, kCount>*>(to), bits_as<Words<T, kCount>>(pack));
}

}  // namespace bmtrain::cuda
