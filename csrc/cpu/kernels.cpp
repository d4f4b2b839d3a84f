// The kernels over whole buffers: cut into chunks at fixed places, spread over the pool.
#include "cpu/kernels.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/thread_pool.h"
#include "cpu/isa.h"

namespace bmtrain::cpu {
namespace {

// Elements of one task: a multiple of 16, small enough to balance, large enough that a task costs little.
// Only sums depend on it, and it is a constant.
constexpr std::int64_t kChunk = std::int64_t{1} << 14;

std::int64_t num_chunks_of(std::int64_t n) { return (n + kChunk - 1) / kChunk; }

// Calls body(chunk_index, offset, count) for each chunk of [0, n).
template <typename Body>
void for_each_chunk(std::int64_t n, const Body& body, Sharing sharing = Sharing::kHelp) {
  parallel_for(
      num_chunks_of(n),
      [&](std::int64_t index) {
        const std::int64_t offset = index * kChunk;
        body(index, offset, std::min(kChunk, n - offset));
      },
      sharing);
}

// The sum over chunks of part(offset, count), added in the order of the chunks.
template <typename Part>
double chunked_sum(std::int64_t n, const Part& part) {
  if (n <= kChunk) return n > 0 ? part(std::int64_t{0}, n) : 0.0;
  std::vector<double> parts(static_cast<std::size_t>(num_chunks_of(n)));
  for_each_chunk(n, [&](std::int64_t index, std::int64_t offset, std::int64_t count) {
    parts[static_cast<std::size_t>(index)] = part(offset, count);
  });
  double total = 0;
  for (const double value : parts) total += value;
  return total;
}

// The chunks of several slices, numbered through.
template <typename Slice>
class SliceChunks {
 public:
  SliceChunks(const Slice* slices, std::int64_t num_slices)
      : slices_(slices), first_chunk_(static_cast<std::size_t>(num_slices) + 1, 0) {
    for (std::int64_t s = 0; s < num_slices; ++s)
      first_chunk_[s + 1] = first_chunk_[s] + num_chunks_of(slices[s].n);
  }

  [[nodiscard]] std::int64_t count() const { return first_chunk_.back(); }

  // Calls body(chunk_index, slice, offset, count) for each chunk.
  template <typename Body>
  void for_each(const Body& body) const {
    parallel_for(count(), [&](std::int64_t index) {
      const auto after = std::upper_bound(first_chunk_.begin(), first_chunk_.end(), index);
      const auto s = static_cast<std::size_t>(after - first_chunk_.begin()) - 1;
      const std::int64_t offset = (index - first_chunk_[s]) * kChunk;
      body(index, slices_[s], offset, std::min(kChunk, slices_[s].n - offset));
    });
  }

 private:
  const Slice* const slices_;
  std::vector<std::int64_t> first_chunk_;  // the number of chunks in all slices before each
};

}  // namespace

void ordered_sum(void* dst, const void* const* srcs, int num_srcs, std::int64_t n, DType dtype,
                 DType src_dtype, bool accumulate, double factor) {
  const KernelTable& table = kernel_table();
  for_each_chunk(n, [&](std::int64_t, std::int64_t offset, std::int64_t count) {
    table.ordered_sum(dst, srcs, num_srcs, offset, count, dtype, src_dtype, accumulate, factor);
  });
}

double squared_sum(const void* x, std::int64_t n, DType dtype) {
  const KernelTable& table = kernel_table();
  return chunked_sum(
      n, [&](std::int64_t offset, std::int64_t count) { return table.squared_sum(x, dtype, offset, count); });
}

float abs_max(const void* x, std::int64_t n, DType dtype) {
  const KernelTable& table = kernel_table();
  std::atomic<std::uint32_t> largest{0};
  for_each_chunk(n, [&](std::int64_t, std::int64_t offset, std::int64_t count) {
    const std::uint32_t mine = table.max_magnitude(x, dtype, offset, count);
    std::uint32_t seen = largest.load(std::memory_order_relaxed);
    while (mine > seen && !largest.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
    }
  });
  return std::bit_cast<float>(largest.load());
}

double abs_power_sum(const void* x, std::int64_t n, DType dtype, double p) {
  const KernelTable& table = kernel_table();
  return chunked_sum(n, [&](std::int64_t offset, std::int64_t count) {
    constexpr std::int64_t kGroup = 256;
    float values[kGroup];
    double total = 0;
    for (std::int64_t i = 0; i < count; i += kGroup) {
      const std::int64_t size = std::min(kGroup, count - i);
      const void* const source = static_cast<const char*>(x) + (offset + i) * size_of(dtype);
      table.ordered_sum(values, &source, 1, 0, size, DType::kFloat32, dtype, /*accumulate=*/false, 1);
      for (std::int64_t k = 0; k < size; ++k) total += std::pow(std::fabs(static_cast<double>(values[k])), p);
    }
    return total;
  });
}

void zero(void* x, std::int64_t n, DType dtype) {
  const std::int64_t size = size_of(dtype);
  for_each_chunk(
      n,
      [&](std::int64_t, std::int64_t offset, std::int64_t count) {
        std::memset(static_cast<char*>(x) + offset * size, 0, static_cast<std::size_t>(count * size));
      },
      Sharing::kOwnOnly);
}

void adam(const AdamSlice* slices, std::int64_t num_slices, DeltaSums* sums) {
  const KernelTable& table = kernel_table();
  const SliceChunks chunks(slices, num_slices);
  std::vector<DeltaSums> parts(sums != nullptr ? static_cast<std::size_t>(chunks.count()) : 0);
  chunks.for_each([&](std::int64_t index, const AdamSlice& slice, std::int64_t offset, std::int64_t count) {
    table.adam(slice, offset, count, sums != nullptr ? &parts[static_cast<std::size_t>(index)] : nullptr);
  });
  if (sums == nullptr) return;
  *sums = {};
  for (const DeltaSums& part : parts) {
    sums->sum += part.sum;
    sums->sum_of_squares += part.sum_of_squares;
  }
}

void momentum(const MomentumSlice* slices, std::int64_t num_slices) {
  const KernelTable& table = kernel_table();
  SliceChunks(slices, num_slices)
      .for_each([&](std::int64_t, const MomentumSlice& slice, std::int64_t offset, std::int64_t count) {
        table.momentum(slice, offset, count);
      });
}

void adam_move(const AdamSlice* slices, std::int64_t num_slices) {
  const KernelTable& table = kernel_table();
  SliceChunks(slices, num_slices)
      .for_each([&](std::int64_t, const AdamSlice& slice, std::int64_t offset, std::int64_t count) {
        table.adam_move(slice, offset, count);
      });
}

}  // namespace bmtrain::cpu
