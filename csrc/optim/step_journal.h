// A record of a step in memory that another process maps: it completes the step if this one dies in it.
//
// [Note: Journals]
// A step updates weights and state in place. Where these, too, are in memory that the other process maps, a
// death leaves pieces that are updated, pieces that are not, and a few that were being updated. So each piece
// is copied into a slot before its update, and marked as done after it. The copy stays in the second cache:
// what is read and written in memory is that of the step alone.
//
// The other process reads a copy of all of it: it puts the contents of slots back, and updates the pieces
// that are not done. A process that only stood still may go on meanwhile: then the words of the journal
// change before a piece does.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace bmtrain {

class StepJournal {
 public:
  static constexpr std::int64_t kPiece =
      2048;  // elements: whole words, of five arrays at most in the first cache

  struct Range {
    void* memory;
    std::size_t nbytes;
  };

  /// A journal of so many pieces in `memory`: zeros, or what another process has left, of which nothing is
  /// kept.
  StepJournal(at::Tensor memory, std::int64_t num_pieces);

  [[nodiscard]] static std::int64_t nbytes(std::int64_t num_pieces);
  /// The bytes at the beginning that change with every update of a piece.
  [[nodiscard]] static std::int64_t head_nbytes(std::int64_t num_pieces);
  [[nodiscard]] static std::int64_t num_pieces_of(std::int64_t numel) {
    return (numel + kPiece - 1) / kPiece;
  }

  /// The number of the step under way, above all earlier ones; 0 at first.
  [[nodiscard]] std::int64_t step() const { return word(0).load(std::memory_order_relaxed); }
  void start(std::int64_t step);

  /// Calls `update` for a piece that this step has not updated, with its ranges as they were before the step.
  template <typename Update>
  void run(std::int64_t piece, std::span<const Range> ranges, const Update& update) {
    if (is_done(piece)) return;
    restore(piece, ranges);
    const std::size_t slot = save(piece, ranges);
    update();
    finish(piece, slot);
  }

 private:
  static constexpr std::size_t kSlots = 64;  // threads that update at the same time; others wait
  static constexpr std::size_t kSlotBytes = kPiece * 4 * sizeof(float);

  [[nodiscard]] std::atomic<std::int64_t>& word(std::int64_t index) const {
    return reinterpret_cast<std::atomic<std::int64_t>*>(memory_.mutable_data_ptr())[index];
  }
  [[nodiscard]] std::atomic<std::int64_t>& slot_word(std::size_t slot) const;
  [[nodiscard]] char* slot_memory(std::size_t slot) const;
  [[nodiscard]] bool is_done(std::int64_t piece) const;
  void restore(std::int64_t piece, std::span<const Range> ranges) const;
  [[nodiscard]] std::size_t save(std::int64_t piece, std::span<const Range> ranges);
  void finish(std::int64_t piece, std::size_t slot);

  at::Tensor memory_;
  std::int64_t num_pieces_;
  std::array<std::atomic_flag, kSlots> in_use_;
  std::unordered_map<std::int64_t, std::vector<char>>
      left_;  // by a process that died: contents of slots, by piece
};

}  // namespace bmtrain
