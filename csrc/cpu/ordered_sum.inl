// Sum of slices in the order of the ranks (the local half of a reduce-scatter).

// T is what is written, S what is read.
template <typename V, typename T, typename S, typename Scalar>
static void ordered_sum_of(void* dst_memory, const void* const* srcs, int num_srcs, std::int64_t begin,
                           std::int64_t end, bool accumulate, Scalar factor) {
  T* dst = static_cast<T*>(dst_memory);
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    V total = num_srcs > 0 ? load(static_cast<const S*>(srcs[0]) + i) : broadcast(Scalar(0));
    for (int r = 1; r < num_srcs; ++r) total = add(total, load(static_cast<const S*>(srcs[r]) + i));
    if (factor != Scalar(1)) total = mul(total, broadcast(factor));
    if (accumulate) total = add(load(dst + i), total);
    store(dst + i, total);
  }
  const std::int64_t rest = end - i;
  if (rest == 0) return;
  V total = num_srcs > 0 ? load_part(static_cast<const S*>(srcs[0]) + i, rest) : broadcast(Scalar(0));
  for (int r = 1; r < num_srcs; ++r) total = add(total, load_part(static_cast<const S*>(srcs[r]) + i, rest));
  if (factor != Scalar(1)) total = mul(total, broadcast(factor));
  if (accumulate) total = add(load_part(dst + i, rest), total);
  store_part(dst + i, total, rest);
}

template <typename T>
static void ordered_sum_to(void* dst, const void* const* srcs, int num_srcs, std::int64_t begin,
                           std::int64_t end, DType src_dtype, bool accumulate, float factor) {
  switch (src_dtype) {
    case DType::kFloat32:
      return ordered_sum_of<F32x16, T, float>(dst, srcs, num_srcs, begin, end, accumulate, factor);
    case DType::kFloat16:
      return ordered_sum_of<F32x16, T, Half>(dst, srcs, num_srcs, begin, end, accumulate, factor);
    case DType::kBFloat16:
      return ordered_sum_of<F32x16, T, Bf16>(dst, srcs, num_srcs, begin, end, accumulate, factor);
    case DType::kFloat64:
      return;  // goes with itself alone
  }
}

static void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t offset, std::int64_t n,
                        DType dtype, DType src_dtype, bool accumulate, double factor) {
  const std::int64_t end = offset + n;
  const auto rounded = static_cast<float>(factor);
  switch (dtype) {
    case DType::kFloat32:
      return ordered_sum_to<float>(dst, srcs, num_srcs, offset, end, src_dtype, accumulate, rounded);
    case DType::kFloat16:
      return ordered_sum_to<Half>(dst, srcs, num_srcs, offset, end, src_dtype, accumulate, rounded);
    case DType::kBFloat16:
      return ordered_sum_to<Bf16>(dst, srcs, num_srcs, offset, end, src_dtype, accumulate, rounded);
    case DType::kFloat64:
      return ordered_sum_of<F64x16, double, double>(dst, srcs, num_srcs, offset, end, accumulate, factor);
  }
}
