// Every generic body, and the table that names them. Included after a vector_*.inl, which provides, for
// V = F32x16: load and store (of float, Bf16, Half, bytes), broadcast, add, sub, mul, div, sqrt, fma,
// max_magnitude; for F64x16: load, store, broadcast, add, mul, add_squares.

// A last, partial group goes through a whole one, whose other elements are 0.
template <typename T>
static inline auto load_part(const T* p, std::int64_t count) {
  T group[16] = {};
  __builtin_memcpy(group, p, static_cast<std::size_t>(count) * sizeof(T));
  return load(group);
}

template <typename T, typename V>
static inline void store_part(T* p, V x, std::int64_t count) {
  T group[16];
  store(group, x);
  __builtin_memcpy(p, group, static_cast<std::size_t>(count) * sizeof(T));
}

#include "cpu/adam.inl"
#include "cpu/convert.inl"
#include "cpu/momentum.inl"
#include "cpu/ordered_sum.inl"
#include "cpu/reduce.inl"

const KernelTable kTable = {
    .ordered_sum = ordered_sum,
    .cast = cast,
    .squared_sum = squared_sum,
    .max_magnitude = max_magnitude,
    .adam = adam,
    .momentum = momentum,
    .adam_move = adam_move,
};
