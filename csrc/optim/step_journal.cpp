#include "optim/step_journal.h"

#include <cstring>
#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

constexpr std::int64_t kLine = 64;

}  // namespace

StepJournal::StepJournal(at::Tensor memory, std::int64_t num_pieces)
    : memory_(std::move(memory)), num_pieces_(num_pieces) {
  BMT_CHECK(ValueError,
            memory_.is_cpu() && memory_.is_contiguous() &&
                static_cast<std::int64_t>(memory_.nbytes()) >= nbytes(num_pieces_) &&
                reinterpret_cast<std::uintptr_t>(memory_.data_ptr()) % kLine == 0,
            "journal: expected ", nbytes(num_pieces_), " contiguous bytes on the CPU at a multiple of ",
            kLine, ", got ", memory_.nbytes());
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    const std::int64_t piece = slot_word(slot).exchange(0) - 1;
    if (piece >= 0) left_[piece].assign(slot_memory(slot), slot_memory(slot) + kSlotBytes);
  }
}

std::int64_t StepJournal::head_nbytes(std::int64_t num_pieces) {
  const std::int64_t words = 1 + num_pieces + static_cast<std::int64_t>(kSlots);
  return (words * static_cast<std::int64_t>(sizeof(std::int64_t)) + kLine - 1) / kLine * kLine;
}

std::int64_t StepJournal::nbytes(std::int64_t num_pieces) {
  return head_nbytes(num_pieces) + static_cast<std::int64_t>(kSlots * kSlotBytes);
}

void StepJournal::start(std::int64_t step) { word(0).store(step, std::memory_order_release); }

std::atomic<std::int64_t>& StepJournal::slot_word(std::size_t slot) const {
  return word(1 + num_pieces_ + static_cast<std::int64_t>(slot));
}

char* StepJournal::slot_memory(std::size_t slot) const {
  return static_cast<char*>(memory_.mutable_data_ptr()) + head_nbytes(num_pieces_) + slot * kSlotBytes;
}

bool StepJournal::is_done(std::int64_t piece) const {
  BMT_CHECK(ValueError, piece >= 0 && piece < num_pieces_, "journal: expected a piece below ", num_pieces_,
            ", got ", piece);
  return word(1 + piece).load(std::memory_order_relaxed) == step();
}

void StepJournal::restore(std::int64_t piece, std::span<const Range> ranges) const {
  if (left_.empty()) return;
  const auto found = left_.find(piece);
  if (found == left_.end()) return;
  const char* from = found->second.data();
  for (const auto& [to, nbytes] : ranges) {
    std::memcpy(to, from, nbytes);
    from += nbytes;
  }
}

std::size_t StepJournal::save(std::int64_t piece, std::span<const Range> ranges) {
  std::size_t slot = 0;
  while (in_use_[slot].test_and_set(std::memory_order_acquire)) slot = (slot + 1) % kSlots;
  char* to = slot_memory(slot);
  for (const auto& [from, nbytes] : ranges) {
    std::memcpy(to, from, nbytes);
    to += nbytes;
  }
  slot_word(slot).store(piece + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see [Note: Journals]
  return slot;
}

void StepJournal::finish(std::int64_t piece, std::size_t slot) {
  word(1 + piece).store(step(), std::memory_order_release);
  slot_word(slot).store(0, std::memory_order_release);
  in_use_[slot].clear(std::memory_order_release);
}

}  // namespace bmtrain
