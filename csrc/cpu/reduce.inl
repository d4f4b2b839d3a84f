// Numbers that describe a whole gradient: its sum of squares, its largest magnitude.

static double squared_sum(const void* x, DType dtype, std::int64_t offset, std::int64_t n) {
  return with_type(dtype, [&](auto zero) {
    const auto* const elements = static_cast<const decltype(zero)*>(x);
    F64x16 total = broadcast(0.0);
    for_groups(
        offset, offset + n, BMT_BODY(i, group) { total = add_squares(total, load(elements + i, group)); });
    return sum_of_lanes(total);
  });
}

static std::uint32_t max_magnitude(const void* x, DType dtype, std::int64_t offset, std::int64_t n) {
  return with_type(dtype, [&](auto zero) {
    const auto* const elements = static_cast<const decltype(zero)*>(x);
    F32x16 largest = broadcast(0.0f);
    for_groups(
        offset, offset + n,
        BMT_BODY(i, group) { largest = max_magnitude(largest, load(elements + i, group)); });
    std::uint32_t lanes[16];
    __builtin_memcpy(lanes, &largest, sizeof lanes);
    std::uint32_t out = 0;
    for (const std::uint32_t lane : lanes) out = lane > out ? lane : out;
    return out;
  });
}
