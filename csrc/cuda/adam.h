// Adam over flat ranges, in one pass.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "cpu/kernels.h"

namespace bmtrain::cuda {

/// What holds for all ranges of a step, read on the device, so that the host does not wait for it.
struct AdamControl {
  const float* grad_scale = nullptr;  // the gradients are multiplied by it as well (clipping); nullptr: 1
  const float* found_inf =
      nullptr;             // not 0: nothing is updated, but gradients are zeroed if asked; nullptr: 0
  bool zero_grad = false;  // the gradients are left zero
};

/// Updates all slices with as few launches as their number allows. Pointers are of the stream's device.
[[nodiscard]] cudaError_t adam(const cpu::AdamSlice* slices, std::int64_t num_slices,
                               const AdamControl& control, cudaStream_t stream);

}  // namespace bmtrain::cuda
