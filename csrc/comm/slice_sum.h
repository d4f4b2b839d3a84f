// The local half of a reduce-scatter: what the ranks sent is summed in rank
// order.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace bmtrain {

/// destination = slices[0] + slices[1] + ... (+ destination if `accumulate`,
/// last), accumulated in fp32 for 16-bit dtypes and rounded once. All tensors
/// are 1-D, contiguous and of one size and device, the slices of one dtype.
void sum_slices(const at::Tensor& destination, const std::vector<at::Tensor>& slices, bool accumulate);

}  // namespace bmtrain
