// Adam over flat ranges, in one pass.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cpu/kernels.h"

namespace bmtrain::cuda {

/// Updates all slices with as few launches as their number allows. Pointers are of the stream's device.
[[nodiscard]] cudaError_t adam(const cpu::AdamSlice* slices, std::int64_t num_slices, cudaStream_t stream);

}  // namespace bmtrain::cuda
