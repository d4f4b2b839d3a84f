// The kernels over whole buffers: cut into chunks at fixed places, spread over the pool.
#include "cpu/kernels.h"

#include <algorithm>

#include "common/thread_pool.h"
#include "cpu/isa.h"

namespace bmtrain::cpu {
namespace {

// Elements of one task: a multiple of 16, small enough to balance, large enough that a task costs little.
// Results never depend on it, sums apart, which are deterministic because it is a constant.
constexpr std::int64_t kChunk = std::int64_t{1} << 14;

// Calls body(offset, n) for each chunk of [0, total).
template <typename Body>
void for_each_chunk(std::int64_t total, const Body& body) {
  const std::int64_t num_chunks = (total + kChunk - 1) / kChunk;
  parallel_for(num_chunks, [&](std::int64_t index) {
    const std::int64_t offset = index * kChunk;
    body(offset, std::min(kChunk, total - offset));
  });
}

}  // namespace

void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t n, DType dtype, bool accumulate,
                 float factor) {
  const KernelTable& table = kernel_table();
  for_each_chunk(n, [&](std::int64_t offset, std::int64_t count) {
    table.ordered_sum(dst, srcs, num_srcs, offset, count, dtype, accumulate, factor);
  });
}

}  // namespace bmtrain::cpu
