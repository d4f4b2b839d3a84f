// The kernels' host functions for ctypes. Numbers of dtypes are those of DType.
#include <cstdint>
#include <vector>

#include "../host/factors.h"
#include "cuda/adam.h"
#include "cuda/cross_entropy.h"
#include "cuda/momentum.h"
#include "cuda/reduce.h"

using namespace bmtrain;  // NOLINT(google-build-using-namespace)

namespace {

DType dtype_of(std::int64_t number) { return static_cast<DType>(number); }

// One range of a step; every field is 8 bytes.
struct Range {
  float* weight;
  void *moment, *second_moment;
  void* rounded;
  std::int64_t rounded_dtype;
  const void* grad;
  std::int64_t grad_dtype, n;
  const float* factors;      // as in factors.h
  std::int64_t moment_bits;  // 32, 16 or 8
};

template <typename Slice>
Slice slice_of(const Range& range) {
  Slice slice;
  slice.weight = range.weight;
  slice.rounded = range.rounded;
  slice.rounded_dtype = dtype_of(range.rounded_dtype);
  slice.grad = range.grad;
  slice.grad_dtype = dtype_of(range.grad_dtype);
  slice.n = range.n;
  return slice;
}

}  // namespace

extern "C" {

int adam(const Range* ranges, std::int64_t num_ranges) {
  std::vector<cpu::AdamSlice> slices;
  for (std::int64_t r = 0; r < num_ranges; ++r) {
    auto& slice = slices.emplace_back(slice_of<cpu::AdamSlice>(ranges[r]));
    const auto coded = [&](void* array) {
      auto* const codes = static_cast<std::uint8_t*>(array);
      return cpu::CodedArray{codes, codes + slice.n};
    };
    if (ranges[r].moment_bits == 8) {
      slice.coded_exp_avg = coded(ranges[r].moment);
      slice.coded_exp_avg_sq = coded(ranges[r].second_moment);
    } else if (ranges[r].moment_bits == 16) {
      slice.bf16_exp_avg = ranges[r].moment;
      slice.bf16_exp_avg_sq = ranges[r].second_moment;
    } else {
      slice.exp_avg = static_cast<float*>(ranges[r].moment);
      slice.exp_avg_sq = static_cast<float*>(ranges[r].second_moment);
    }
    slice.factors = adam_factors(ranges[r].factors);
  }
  return cuda::adam(slices.data(), num_ranges, nullptr);
}

int momentum(const Range* ranges, std::int64_t num_ranges) {
  std::vector<cpu::MomentumSlice> slices;
  for (std::int64_t r = 0; r < num_ranges; ++r) {
    auto& slice = slices.emplace_back(slice_of<cpu::MomentumSlice>(ranges[r]));
    slice.momentum = static_cast<float*>(ranges[r].moment);
    slice.factors = momentum_factors(ranges[r].factors);
  }
  return cuda::momentum(slices.data(), num_ranges, nullptr);
}

int ordered_sum(void* out, const void* const* sources, std::int64_t num_sources, std::int64_t n,
                std::int64_t dtype, std::int64_t accumulate, double factor) {
  return cuda::ordered_sum(out, sources, static_cast<int>(num_sources), n, dtype_of(dtype), accumulate != 0,
                           factor, nullptr);
}

int scale(void* x, std::int64_t n, std::int64_t dtype, const float* factor) {
  return cuda::scale(x, n, dtype_of(dtype), factor, nullptr);
}

int squared_sum(double* partial, const void* x, std::int64_t n, std::int64_t dtype) {
  return cuda::squared_sum(partial, x, n, dtype_of(dtype), nullptr);
}

int finish_squared_sum(double* total, const double* partial) {
  return cuda::finish_squared_sum(total, partial, nullptr);
}

int cross_entropy_sums(const void* data, std::int64_t dtype, std::int64_t num_rows, std::int64_t width,
                       const std::int64_t* target, const float* weight, std::int64_t smooth, float* maximum,
                       float* exp_sum, float* target_logit, float* smoothed, std::int64_t divided) {
  return cuda::cross_entropy_sums({data, dtype_of(dtype), num_rows, width, target, weight, smooth != 0},
                                  {maximum, exp_sum, target_logit, smoothed, divided != 0}, nullptr);
}

int cross_entropy_gradient(void* out, const void* data, std::int64_t dtype, std::int64_t num_rows,
                           std::int64_t width, const std::int64_t* target, const float* weight,
                           const float* maximum, const float* log_sum, const float* scale, const float* hit,
                           const float* spread, const bool* ignored) {
  return cuda::cross_entropy_gradient({data, dtype_of(dtype), num_rows, width, target, weight, false},
                                      {maximum, log_sum, scale, hit, spread, ignored}, out, nullptr);
}
}
