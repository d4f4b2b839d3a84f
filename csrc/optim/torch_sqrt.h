// The square root that torch's own CPU operations compute.
#pragma once

#include "cpu/kernels.h"

namespace bmtrain {

/// A function with the bits of torch.sqrt on contiguous fp32, or nullptr if those are the correctly rounded
/// ones, which the kernels compute themselves. The answer is found once.
///
/// [Note: torch's square root]
/// Builds of torch with MKL use its vector math, which picks an algorithm by processor and is not always
/// correctly rounded (with AVX-512 one result in 150 is a neighbour). An fp32 step that is to be bit-equal to
/// torch.optim.Adam must take the same root, so we look for MKL's function in the process, compare it with
/// torch.sqrt, and fall back to torch.sqrt itself, block by block.
[[nodiscard]] cpu::SqrtFunction torch_sqrt();

}  // namespace bmtrain
