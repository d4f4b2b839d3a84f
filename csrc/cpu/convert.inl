// Conversion between the element types.

static void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t offset,
                 std::int64_t n) {
  with_type(dst_dtype, [&](auto to) {
    with_type(src_dtype, [&](auto from) {
      auto* const written = static_cast<decltype(to)*>(dst);
      const auto* const read = static_cast<const decltype(from)*>(src);
      for_groups(
          offset, offset + n, BMT_BODY(i, group) { store(written + i, load(read + i, group), group); });
    });
  });
}
