// Every generic body, and the table that names them. Included after vector.inl and a vector_*.inl, which
// provide, for V = F32x16: load and store (of float, Bf16, Half, bytes), broadcast, add, sub, mul, div, sqrt,
// fma, max_magnitude; for F64x16: load, store, broadcast, add, mul, widen, add_squares.

// total + x, lane by lane in fp64.
static inline F64x16 add_lanes(F64x16 total, F32x16 x) { return add(total, widen(x)); }

// Elements that a loop fetches before their turn: the hardware does so within a page, and five arrays cross
// pages often (a tenth of the time).
constexpr std::int64_t kAhead = 512;

// The elements that a body takes at once: 16, or the last ones, `count` of them. Those go through a whole
// group, whose other elements are 0.
struct WholeGroup {
  static constexpr std::int64_t count = 16;
};
struct LastGroup {
  std::int64_t count;
};

template <typename T>
static inline auto load(const T* p, WholeGroup) {
  return load(p);
}
template <typename T>
static inline auto load(const T* p, LastGroup group) {
  T elements[16] = {};
  __builtin_memcpy(elements, p, static_cast<std::size_t>(group.count) * sizeof(T));
  return load(elements);
}
template <typename T, typename V>
static inline void store(T* p, V x, WholeGroup) {
  store(p, x);
}
template <typename T, typename V>
static inline void store(T* p, V x, LastGroup group) {
  T elements[16];
  store(elements, x);
  __builtin_memcpy(p, elements, static_cast<std::size_t>(group.count) * sizeof(T));
}

// Fetches what a later group will take of an array.
template <typename T>
static inline void fetch(const T* p, WholeGroup) {
  __builtin_prefetch(p + kAhead);
}
template <typename T>
static inline void fetch_to_write(const T* p, WholeGroup) {
  __builtin_prefetch(p + kAhead, 1);
}
static inline void fetch(const void* /*p*/, LastGroup) {}
static inline void fetch_to_write(const void* /*p*/, LastGroup) {}

// Calls body(i, group) for elements [begin, end), group by group.
#define BMT_BODY(i, group) [&](std::int64_t i, auto group) __attribute__((always_inline))
template <typename Body>
[[gnu::always_inline]] static inline void for_groups(std::int64_t begin, std::int64_t end, const Body& body) {
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) body(i, WholeGroup());
  if (i < end) body(i, LastGroup{end - i});
}

// Calls then(T()) for the fp32, fp16 or bf16 that `dtype` names; fp64 goes with itself alone.
template <typename Then>
static inline auto with_type(DType dtype, const Then& then) {
  switch (dtype) {
    case DType::kFloat32:
      return then(float());
    case DType::kFloat16:
      return then(Half());
    case DType::kBFloat16:
      return then(Bf16());
    case DType::kFloat64:
      break;
  }
  return decltype(then(float()))();
}

#include "cpu/adam.inl"
#include "cpu/momentum.inl"
#include "cpu/ordered_sum.inl"
#include "cpu/reduce.inl"

const KernelTable kTable = {
    .ordered_sum = ordered_sum,
    .squared_sum = squared_sum,
    .max_magnitude = max_magnitude,
    .adam = adam,
    .momentum = momentum,
    .adam_move = adam_move,
};
