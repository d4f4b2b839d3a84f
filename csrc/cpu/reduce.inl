// Numbers that describe a whole gradient: its sum of squares, its largest magnitude.

template <typename T>
static double squared_sum_of(const void* memory, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(memory);
  F64x16 total = broadcast(0.0);
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) total = add_squares(total, load(x + i));
  if (i < end) total = add_squares(total, load_part(x + i, end - i));
  return sum_of_lanes(total);
}

static double squared_sum(const void* x, DType dtype, std::int64_t offset, std::int64_t n) {
  switch (dtype) {
    case DType::kFloat32:
      return squared_sum_of<float>(x, offset, offset + n);
    case DType::kFloat16:
      return squared_sum_of<Half>(x, offset, offset + n);
    case DType::kBFloat16:
      return squared_sum_of<Bf16>(x, offset, offset + n);
    case DType::kFloat64:
      break;
  }
  return 0;
}

template <typename T>
static std::uint32_t max_magnitude_of(const void* memory, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(memory);
  F32x16 largest = broadcast(0.0f);
  std::int64_t i = begin;
  for (; i + 16 <= end; i += 16) largest = max_magnitude(largest, load(x + i));
  if (i < end) largest = max_magnitude(largest, load_part(x + i, end - i));
  std::uint32_t lanes[16];
  __builtin_memcpy(lanes, &largest, sizeof lanes);
  std::uint32_t out = 0;
  for (const std::uint32_t lane : lanes) out = lane > out ? lane : out;
  return out;
}

static std::uint32_t max_magnitude(const void* x, DType dtype, std::int64_t offset, std::int64_t n) {
  switch (dtype) {
    case DType::kFloat32:
      return max_magnitude_of<float>(x, offset, offset + n);
    case DType::kFloat16:
      return max_magnitude_of<Half>(x, offset, offset + n);
    case DType::kBFloat16:
      return max_magnitude_of<Bf16>(x, offset, offset + n);
    case DType::kFloat64:
      break;
  }
  return 0;
}
