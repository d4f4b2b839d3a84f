// Sum of slices in the order of the ranks (the local half of a reduce-scatter).

// One group of 16 elements of every source.
template <typename T, typename V, typename Scalar>
static inline V sum_group(const T* const* srcs, int num_srcs, std::int64_t i, Scalar factor) {
  V total = num_srcs > 0 ? load(srcs[0] + i) : broadcast(Scalar(0));
  for (int r = 1; r < num_srcs; ++r) total = add(total, load(srcs[r] + i));
  return factor == Scalar(1) ? total : mul(total, broadcast(factor));
}

template <typename T, typename V, typename Scalar>
static void ordered_sum_of(T* dst, const T* const* srcs, int num_srcs, std::int64_t begin, std::int64_t end,
                           bool accumulate, Scalar factor) {
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    V total = sum_group<T, V, Scalar>(srcs, num_srcs, i, factor);
    if (accumulate) total = add(load(dst + i), total);
    store(dst + i, total);
  }
  if (i == end) return;
  // The last, partial group, through a copy.
  const auto bytes = static_cast<std::size_t>(end - i) * sizeof(T);
  T group[16] = {};
  if (num_srcs > 0) __builtin_memcpy(group, srcs[0] + i, bytes);
  V total = num_srcs > 0 ? load(group) : broadcast(Scalar(0));
  for (int r = 1; r < num_srcs; ++r) {
    __builtin_memcpy(group, srcs[r] + i, bytes);
    total = add(total, load(group));
  }
  if (factor != Scalar(1)) total = mul(total, broadcast(factor));
  if (accumulate) {
    __builtin_memcpy(group, dst + i, bytes);
    total = add(load(group), total);
  }
  store(group, total);
  __builtin_memcpy(dst + i, group, bytes);
}

static void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t offset, std::int64_t n,
                        DType dtype, bool accumulate, float factor) {
  const std::int64_t end = offset + n;
  switch (dtype) {
    case DType::kFloat32:
      return ordered_sum_of<float, F32x16>(static_cast<float*>(dst), reinterpret_cast<const float* const*>(srcs),
                                           num_srcs, offset, end, accumulate, factor);
    case DType::kFloat16:
      return ordered_sum_of<Half, F32x16>(static_cast<Half*>(dst), reinterpret_cast<const Half* const*>(srcs),
                                          num_srcs, offset, end, accumulate, factor);
    case DType::kBFloat16:
      return ordered_sum_of<Bf16, F32x16>(static_cast<Bf16*>(dst), reinterpret_cast<const Bf16* const*>(srcs),
                                          num_srcs, offset, end, accumulate, factor);
    case DType::kFloat64:
      return ordered_sum_of<double, F64x16>(static_cast<double*>(dst), reinterpret_cast<const double* const*>(srcs),
                                            num_srcs, offset, end, accumulate, static_cast<double>(factor));
  }
}
