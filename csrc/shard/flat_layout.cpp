#include "shard/flat_layout.h"

#include <algorithm>

#include "common/check.h"
#include "common/sizes.h"

namespace bmtrain {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 60;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

FlatLayout::FlatLayout(std::vector<std::int64_t> numels, std::int64_t element_size, std::int64_t num_ranks,
                       std::int64_t alignment_bytes, std::optional<std::int64_t> partition)
    : num_ranks_(num_ranks) {
  BMT_CHECK(ValueError, num_ranks >= 1, "num_ranks: expected at least 1, got ", num_ranks);
  BMT_CHECK(ValueError, element_size >= 1, "element_size: expected at least 1 byte, got ", element_size);
  BMT_CHECK(ValueError, alignment_bytes >= 1, "alignment_bytes: expected at least 1, got ", alignment_bytes);
  const std::int64_t alignment = std::max<std::int64_t>(1, alignment_bytes / element_size);
  spans_.reserve(numels.size());
  for (const std::int64_t numel : numels) {
    BMT_CHECK(ValueError, numel >= 0, "numels: expected sizes of at least 0, got ", numel);
    // With room for what is rounded up, and for all ranks' ends.
    BMT_CHECK(ValueError, numel <= kMost && total_ <= kMost - numel, "numels: expected at most ", kMost,
              " elements together, got more");
    const std::int64_t offset = round_up(total_, alignment);
    spans_.push_back({offset, numel});
    total_ = offset + numel;
  }
  total_ = round_up(total_, alignment);
  const std::int64_t slice = std::max<std::int64_t>(1, std::min(kSliceBytes, alignment_bytes) / element_size);
  const std::int64_t share = ceil_div(total_, num_ranks_);
  partition_ = partition.value_or(round_up(share, slice));
  BMT_CHECK(ValueError, !partition || (partition_ >= share && partition_ <= kMost / num_ranks_),
            "partition: expected at least ", share, ", one of ", num_ranks_, " shares of ", total_,
            " elements, got ", partition_);
}

const Span& FlatLayout::span(std::size_t index) const {
  BMT_CHECK(ValueError, index < spans_.size(), "index: expected 0 to ", spans_.size(), " (excluded), got ",
            index);
  return spans_[index];
}

LocalPart FlatLayout::local_part(std::size_t index, std::int64_t rank) const {
  BMT_CHECK(ValueError, rank >= 0 && rank < num_ranks_, "rank: expected 0 to ", num_ranks_ - 1, ", got ",
            rank);
  const Span& whole = span(index);
  const std::int64_t shard_begin = rank * partition_;
  const std::int64_t begin = std::clamp(shard_begin, whole.offset, whole.offset + whole.numel);
  const std::int64_t end = std::clamp(shard_begin + partition_, begin, whole.offset + whole.numel);
  return {begin - whole.offset, end - begin, end > begin ? begin - shard_begin : 0};
}

}  // namespace bmtrain
