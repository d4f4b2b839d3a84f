// The CPU kernels as the rest of the core sees them: plain functions over raw memory.
//
// Every function is parallel over the pool of common/thread_pool.h, accepts any alignment and any size
// from 0 up, gives the same bits at every instruction set level and every number of threads, and does not
// allocate per element. None of them touches Python or tensors. See [Note: One body, three levels].
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace bmtrain::cpu {

/// dst[i] = factor * (srcs[0][i] + srcs[1][i] + ...), summed in the order of `srcs`, plus the old dst[i] if
/// `accumulate`. 16-bit values are summed in fp32 and rounded once, to nearest even. `dst` may be one of the
/// sources. With no source the sum is 0.
void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t n, DType dtype, bool accumulate,
                 float factor);

}  // namespace bmtrain::cpu
