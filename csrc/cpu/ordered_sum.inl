// Sum of slices in the order of the ranks (the local half of a reduce-scatter).

template <typename V, typename T, typename Scalar>
static void ordered_sum_of(void* dst_memory, const void* const* srcs, int num_srcs, std::int64_t begin,
                           std::int64_t end, bool accumulate, Scalar factor) {
  T* dst = static_cast<T*>(dst_memory);
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    V total = num_srcs > 0 ? load(static_cast<const T*>(srcs[0]) + i) : broadcast(Scalar(0));
    for (int r = 1; r < num_srcs; ++r) total = add(total, load(static_cast<const T*>(srcs[r]) + i));
    if (factor != Scalar(1)) total = mul(total, broadcast(factor));
    if (accumulate) total = add(load(dst + i), total);
    store(dst + i, total);
  }
  const std::int64_t rest = end - i;
  if (rest == 0) return;
  V total = num_srcs > 0 ? load_part(static_cast<const T*>(srcs[0]) + i, rest) : broadcast(Scalar(0));
  for (int r = 1; r < num_srcs; ++r) total = add(total, load_part(static_cast<const T*>(srcs[r]) + i, rest));
  if (factor != Scalar(1)) total = mul(total, broadcast(factor));
  if (accumulate) total = add(load_part(dst + i, rest), total);
  store_part(dst + i, total, rest);
}

static void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t offset, std::int64_t n,
                        DType dtype, bool accumulate, double factor) {
  const std::int64_t end = offset + n;
  switch (dtype) {
    case DType::kFloat32:
      return ordered_sum_of<F32x16, float>(dst, srcs, num_srcs, offset, end, accumulate,
                                           static_cast<float>(factor));
    case DType::kFloat16:
      return ordered_sum_of<F32x16, Half>(dst, srcs, num_srcs, offset, end, accumulate,
                                          static_cast<float>(factor));
    case DType::kBFloat16:
      return ordered_sum_of<F32x16, Bf16>(dst, srcs, num_srcs, offset, end, accumulate,
                                          static_cast<float>(factor));
    case DType::kFloat64:
      return ordered_sum_of<F64x16, double>(dst, srcs, num_srcs, offset, end, accumulate, factor);
  }
}
