// Scaling of gradients with one rounding, as the GPU kernel does.
#pragma once

#include <ATen/core/Tensor.h>

namespace bmtrain {

/// Multiplies a floating-point tensor on the host in place: in fp32 for 16-bit values, by a factor that is
/// not rounded to 16 bits.
void scale_exactly(const at::Tensor& tensor, double factor);

}  // namespace bmtrain
