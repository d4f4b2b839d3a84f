// Buffers that the ranks of one host use in place, beside what goes through the rings.
//
// [Note: Buffers used in place]
// An *own* buffer belongs to one rank; its peers read it where it is. The rank publishes it through its ring
// like any other chunk, as a reference, and it is free again when its borrower and all readers are done with
// it. There are two of a size at most. A rank whose program has all of them in use takes other memory, which
// goes through the ring: the ranks need not agree. One that only peers still read is waited for.
//
// [Note: Waiting for readers]
// That wait is never one in a circle. A rank waits only for a buffer that it is done with itself: it has
// passed, in the order of the program, the place where the sum of those gradients ends (of one that it sums
// in turn, that is before the next gradients land), and waits for a peer to pass the same place. All other
// waits are of this kind too: for what a peer does at an earlier place of the one program that all run (its
// gather was posted, its gradients were, its use of a common buffer ended). Of the ranks that wait take the
// one that is at the earliest place: the peer it waits for is at an earlier one still, so it does not wait,
// and gets there. What ranks read earlier than their program says, because it has come
// (ShardedBuffer::sum_if_arrived), is let go of earlier by the reader; the owner's use ends no earlier.
// Ranks that do not run one program could wait for each other: after some seconds other memory is taken.
//
// A *common* buffer is written by all ranks of the group, each its slice. Which one a gather uses is not
// negotiated: every rank picks the buffer that it let go of first, and all ranks borrow and give back in the
// same order, that of their program. A rank may be behind, so nobody writes its slice before all others have
// let go of the buffer's last use. A peer that is behind gets there without anything that is posted later: so
// nobody waits in a circle.
//
// What ends otherwise than by giving back (a model that is collected as garbage, at another moment on every
// rank) retires its buffer: it counts as in use until the ranks can agree that all have retired it. A rank
// says how many operations it had posted by then. Who has seen the end of a gather knows that all ranks had
// posted it, and waits for gathers in the order of the program: so what was retired before the last gather
// that was waited for is the same on all ranks, whenever they look.
//
// There are as many common buffers as were in use at one time. A buffer of either kind that many uses of
// others have passed over gives its memory back to the system. Own ones do so in each step whose gradients
// are dropped before the forward: activations take their place until the backward.
//
// What a rank reads of a common buffer is a mapping of its own (copy on write): what a program writes into it
// stays with that rank, and is dropped when the buffer is given back.
//
// Memory is a part of the ranks' segment files, mapped when it is first used, and counted once for all who
// map it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "common/file_descriptor.h"

namespace bmtrain {

/// What a rank tells the others of buffers. A table of only zeros is one in which nothing has happened yet.
struct ShmHeapTable {
  static constexpr int kSlots = 512;

  std::atomic<std::uint32_t> readers[kSlots];     // of its own buffers: peers that have not read them yet
  std::atomic<std::uint64_t> given_back[kSlots];  // of common buffers: the last use that it is done with
  std::atomic<std::uint64_t> retired[kSlots];     // likewise: 1 + the operations it had posted before, or 0
  std::atomic<std::uint32_t> emptied[kSlots];     // rank 0's: how often a rank was done with its memory
};

/// Not thread-safe but where it says so.
class ShmHeap {
 public:
  static constexpr int kNone = -1;
  static constexpr int kBeingRead = -2;

  /// `files`: of all ranks; duplicated. `begin`: where each file has space that nobody else uses.
  ShmHeap(const std::vector<int>& files, std::vector<ShmHeapTable*> tables, int rank, std::uint64_t begin);
  ~ShmHeap();
  ShmHeap(const ShmHeap&) = delete;
  ShmHeap& operator=(const ShmHeap&) = delete;

  /// Of all buffers: own ones, and this rank's share of the common ones.
  [[nodiscard]] std::int64_t bytes() const;

  // Own buffers.

  /// A buffer of exactly `bytes`; kBeingRead if there will be one as soon as peers have read it, and none is
  /// idle; or kNone.
  [[nodiscard]] int borrow_own(std::int64_t bytes);
  /// The borrower is done with it. Thread-safe.
  void end_own(int slot) { own_[index(slot)].lent.store(false, std::memory_order_release); }
  [[nodiscard]] char* own_data(int slot) const { return own_[index(slot)].data; }
  [[nodiscard]] std::uint64_t own_offset(int slot) const { return own_[index(slot)].offset; }
  /// The own buffer that begins at `data` and has `bytes`, or kNone.
  [[nodiscard]] int find_own(const char* data, std::int64_t bytes) const;
  /// All peers are about to read it.
  void expect_readers(int slot);
  /// The own buffer of another rank. Raises CommunicationError.
  [[nodiscard]] const char* map_peer(int peer, std::uint64_t offset, std::int64_t bytes);
  /// A peer's own buffer was read; true if by all. Thread-safe.
  [[nodiscard]] bool finish_reading(int peer, int slot) {
    return tables_[index(peer)]->readers[slot].fetch_sub(1) == 1;
  }

  /// Gives back the memory of those that are free and that `least_uses` uses of others have passed over.
  void give_own_memory_back(std::uint64_t least_uses);

  // Common buffers.

  /// A buffer of exactly `bytes`, or kNone: the same on all ranks that made the same calls. Raises
  /// CommunicationError.
  [[nodiscard]] int borrow_common(std::int64_t bytes);
  /// Contents are not needed any more; another gather may use it.
  void give_back_common(int slot);
  /// Which use of it began last: what names a use to retire_common().
  [[nodiscard]] std::uint64_t common_use(int slot) const { return common_[index(slot)].use; }
  /// The memory of a use that was not given back is gone; `num_posted` operations were posted before.
  void retire_common(int slot, std::uint64_t use, std::uint64_t num_posted);
  /// The end of a gather was seen, after which `num_posted` operations have been posted on all ranks.
  void settle(std::uint64_t num_posted) { settled_ = std::max(settled_, num_posted); }
  /// This rank's view of the whole.
  [[nodiscard]] char* common_view(int slot) const { return common_[index(slot)].view; }
  /// Where this rank writes its slice for the others.
  [[nodiscard]] char* common_data(int slot) const { return common_[index(slot)].shared; }
  [[nodiscard]] int find_common(const char* view, std::int64_t bytes) const;
  /// Whether `peer` has let go of the use before the present one.
  [[nodiscard]] bool has_given_back(int peer, int slot) const;

 private:
  struct Own {
    char* data = nullptr;
    std::int64_t bytes = 0;
    std::uint64_t offset = 0;
    std::uint64_t use = 0;  // the number of the present or last use
    std::atomic<bool> lent = false;
    bool is_empty = true;  // its memory was given back to the system
  };
  struct Common {
    char* view = nullptr;    // private: copy on write
    char* shared = nullptr;  // the same memory as all ranks see it
    std::int64_t bytes = 0;
    std::uint64_t offset = 0;
    std::uint64_t use = 0;     // the number of the present or last use
    std::uint64_t before = 0;  // of the one before it
    std::uint64_t since = 0;   // what was settled when the present use began
    bool lent = false;
    bool is_empty = true;  // its memory was given back to the system
  };

  [[nodiscard]] static std::size_t index(int number) { return static_cast<std::size_t>(number); }
  // Null, and errno set, where there is no room.
  [[nodiscard]] char* try_map(int file, std::uint64_t offset, std::int64_t bytes, bool is_private);
  [[nodiscard]] char* map(int file, std::uint64_t offset, std::int64_t bytes, bool is_private);
  void drop_private_pages(const Common& buffer) const;
  [[nodiscard]] int make_common(std::int64_t bytes);
  // Whether all ranks are known to have retired it.
  [[nodiscard]] bool is_retired(int slot) const;
  void begin_use(Common& buffer);
  void end_use(int slot);
  [[nodiscard]] bool is_free(int own_slot) const;
  [[nodiscard]] int lend_own(int slot);
  // Of common buffers that nobody has used for long.
  void give_memory_back();
  void empty(int file, std::uint64_t offset, std::int64_t bytes) const;

  const int rank_;
  std::vector<FileDescriptor> files_;
  std::vector<ShmHeapTable*> tables_;
  std::vector<std::pair<void*, std::size_t>> mappings_;
  Own own_[ShmHeapTable::kSlots];
  Common common_[ShmHeapTable::kSlots];
  int num_own_ = 0;
  int num_common_ = 0;
  std::uint64_t own_end_;
  std::uint64_t common_end_;
  std::uint64_t uses_ = 0;      // of common buffers
  std::uint64_t own_uses_ = 0;  // of own ones
  std::uint64_t settled_ = 0;
  std::map<std::pair<int, std::uint64_t>, const char*> peers_;  // by rank and offset
  FileDescriptor page_map_;
};

}  // namespace bmtrain
