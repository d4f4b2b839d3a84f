// Sum of slices in the order of the ranks (the local half of a reduce-scatter).

// T is what is written, S what is read, and Scalar what sums are made in.
template <typename T, typename S, typename Scalar>
static void ordered_sum_of(void* dst_memory, const void* const* srcs, int num_srcs, std::int64_t begin,
                           std::int64_t end, bool accumulate, Scalar factor) {
  T* const dst = static_cast<T*>(dst_memory);
  for_groups(
      begin, end, BMT_BODY(i, group) {
        const auto source = [&](int r) __attribute__((always_inline)) {
          return load(static_cast<const S*>(srcs[r]) + i, group);
        };
        auto total = num_srcs > 0 ? source(0) : broadcast(Scalar(0));
        for (int r = 1; r < num_srcs; ++r) total = add(total, source(r));
        if (factor != Scalar(1)) total = mul(total, broadcast(factor));
        if (accumulate) total = add(load(dst + i, group), total);
        store(dst + i, total, group);
      });
}

static void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t offset, std::int64_t n,
                        DType dtype, DType src_dtype, bool accumulate, double factor) {
  const std::int64_t end = offset + n;
  if (dtype == DType::kFloat64)
    return ordered_sum_of<double, double>(dst, srcs, num_srcs, offset, end, accumulate, factor);
  with_type(dtype, [&](auto to) {
    with_type(src_dtype, [&](auto from) {
      ordered_sum_of<decltype(to), decltype(from)>(dst, srcs, num_srcs, offset, end, accumulate,
                                                   static_cast<float>(factor));
    });
  });
}
