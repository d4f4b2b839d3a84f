// FlatLayout: where each parameter lies in a flat buffer, and which rank owns which part of it. Any thread
// may read one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace bmtrain {

/// A run of elements.
struct Span {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
};

/// What one rank owns of one parameter: elements [param_begin, param_begin +
/// numel) of the flattened parameter lie at shard_offset of the rank's shard.
struct LocalPart {
  std::int64_t param_begin = 0;
  std::int64_t numel = 0;
  std::int64_t shard_offset = 0;
};

/// Parameters one after the other, each starting at a multiple of
/// `alignment_bytes`, cut into `num_ranks` equal partitions of ceil(total /
/// num_ranks) elements, rounded up. Offsets and sizes are in elements.
///
/// [Note: Aligned slices]
/// Every rank's slice of a buffer starts at a multiple of kSliceBytes. NCCL copies by 16 bytes only between
/// addresses that are multiples of 16, and else element by element; our kernels do the same. 128 bytes are a
/// line of a GPU's memory, and leave at least 16 where a buffer travels in a narrower dtype (an eighth of the
/// width at most). More would cost: each rank pads the gathered buffer, so that 512 bytes for 512 ranks are
/// 256 KiB for each buffer of each block.
class FlatLayout {
 public:
  static constexpr std::int64_t kAlignmentBytes = 512;
  static constexpr std::int64_t kSliceBytes = 128;

  /// `partition`: elements of a shard where they are known, as in files from before slices were aligned.
  FlatLayout(std::vector<std::int64_t> numels, std::int64_t element_size, std::int64_t num_ranks,
             std::int64_t alignment_bytes = kAlignmentBytes,
             std::optional<std::int64_t> partition = std::nullopt);

  [[nodiscard]] std::int64_t num_ranks() const { return num_ranks_; }
  [[nodiscard]] std::size_t size() const { return spans_.size(); }
  /// Elements of all parameters with alignment, the end of the buffer included.
  [[nodiscard]] std::int64_t total() const { return total_; }
  /// Elements of one rank's shard.
  [[nodiscard]] std::int64_t partition() const { return partition_; }
  /// Elements of the gathered buffer: num_ranks() * partition() >= total().
  [[nodiscard]] std::int64_t padded_total() const { return partition_ * num_ranks_; }
  [[nodiscard]] const Span& span(std::size_t index) const;
  [[nodiscard]] LocalPart local_part(std::size_t index, std::int64_t rank) const;

 private:
  std::vector<Span> spans_;
  std::int64_t num_ranks_;
  std::int64_t total_ = 0;
  std::int64_t partition_ = 0;
};

}  // namespace bmtrain
