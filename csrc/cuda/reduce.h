// Sums of slices, scaling, and the one pass that gives norm and overflow.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace bmtrain::cuda {

/// out[i] = factor * (sources[0][i] + sources[1][i] + ...), summed in this order, plus the old out[i] if
/// `accumulate`. 16-bit values are summed in fp32 and rounded once. `sources` is a host array, with at most
/// kMostSources pointers unless these are evenly spaced, as slices of one buffer are; `out` may be one of
/// them.
[[nodiscard]] cudaError_t ordered_sum(void* out, const void* const* sources, int num_sources, std::int64_t n,
                                      DType dtype, bool accumulate, double factor, cudaStream_t stream);

/// Sources that one ordered_sum takes wherever they lie.
constexpr int kMostSources = 64;

/// Whether each pointer is as far from the one before it as all others, and none like it.
[[nodiscard]] bool is_evenly_spaced(const void* const* pointers, int count);

/// x[i] *= *factor in place, in fp32 and rounded once; memory is left alone where the factor is 1. fp32, fp16
/// and bf16.
[[nodiscard]] cudaError_t scale(void* x, std::int64_t n, DType dtype, const float* factor,
                                cudaStream_t stream);

/// Number of fp64 partial sums that squared_sum writes.
constexpr int kPartialSums = 1024;

/// partial[0 .. kPartialSums) += the squares of x: together their sum, the same bits in every run. fp32, fp16
/// and bf16; finite if and only if every element is.
[[nodiscard]] cudaError_t squared_sum(double* partial, const void* x, std::int64_t n, DType dtype,
                                      cudaStream_t stream);
/// *total = the sum of the partial sums.
[[nodiscard]] cudaError_t finish_squared_sum(double* total, const double* partial, cudaStream_t stream);

}  // namespace bmtrain::cuda
