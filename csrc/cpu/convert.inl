// Conversion between the element types.

template <typename To, typename From>
static void cast_of(void* dst_memory, const void* src_memory, std::int64_t begin, std::int64_t end) {
  To* dst = static_cast<To*>(dst_memory);
  const From* src = static_cast<const From*>(src_memory);
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) store(dst + i, load(src + i));
  if (i < end) store_part(dst + i, load_part(src + i, end - i), end - i);
}

template <typename From>
static void cast_from(void* dst, DType dst_dtype, const void* src, std::int64_t begin, std::int64_t end) {
  switch (dst_dtype) {
    case DType::kFloat32:
      return cast_of<float, From>(dst, src, begin, end);
    case DType::kFloat16:
      return cast_of<Half, From>(dst, src, begin, end);
    case DType::kBFloat16:
      return cast_of<Bf16, From>(dst, src, begin, end);
    case DType::kFloat64:
      return;
  }
}

static void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t offset,
                 std::int64_t n) {
  switch (src_dtype) {
    case DType::kFloat32:
      return cast_from<float>(dst, dst_dtype, src, offset, offset + n);
    case DType::kFloat16:
      return cast_from<Half>(dst, dst_dtype, src, offset, offset + n);
    case DType::kBFloat16:
      return cast_from<Bf16>(dst, dst_dtype, src, offset, offset + n);
    case DType::kFloat64:
      return;
  }
}
