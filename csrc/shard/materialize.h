// Data for parameters that were made on the meta device.
#pragma once

#include <ATen/core/Tensor.h>

namespace bmtrain {

/// `parameter.set_data(data)` across devices, which torch refuses from the meta device. The parameter stays
/// the same object for all who hold it: optimizers, modules and ShardedBuffers.
void materialize(const at::Tensor& parameter, const at::Tensor& data);

}  // namespace bmtrain
