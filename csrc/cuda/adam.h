// Adam over flat ranges, in one pass.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cpu/kernels.h"
#include "cuda/step_control.h"

namespace bmtrain::cuda {

/// Updates all slices with as few launches as their number allows. Pointers are of the stream's device.
/// cudaErrorInvalidValue if slices with narrow moments are to be controlled.
[[nodiscard]] cudaError_t adam(const cpu::AdamSlice* slices, std::int64_t num_slices,
                               const StepControl& control, cudaStream_t stream);

}  // namespace bmtrain::cuda
