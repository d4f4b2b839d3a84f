// A ring in shared memory: one rank writes chunks, one or several others read them, each at its own pace.
//
// The writer copies a chunk into the ring and publishes its descriptor; each reader follows the descriptors
// in order, copies the chunks that are meant for it, and says how far it is. Space is free again when all
// readers are past it. Where the next chunk goes is chosen so that memory which was in use before is used
// again first: a ring takes as much memory as was ever under way at one time, not its capacity, and small
// exchanges stay in the caches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

namespace bmtrain {

/// What a reader sees of a chunk. It names the operation, so that ranks which disagree find out.
struct ShmDescriptor {
  std::uint64_t offset;  // from the start of the ring's data
  std::uint64_t length;
  std::int64_t sequence;
  std::int64_t bytes;  // of the operation
  std::uint64_t fingerprint;
  std::int32_t reader;  // kEverybody, or the only one whom it concerns
  std::int32_t slot;    // of a buffer that is used in place (shm_heap.h), which then lies at `offset`; or -1
  char op[16];
};

/// Sizes of a ring, and where its parts lie from its start.
struct ShmRingShape {
  static constexpr std::uint64_t kSlots = 512;
  int readers = 0;
  std::uint64_t capacity = 0;

  [[nodiscard]] std::size_t descriptors_at() const;
  [[nodiscard]] std::size_t data_at() const;
  [[nodiscard]] std::size_t bytes() const;
};

/// Either side's view of a ring at `base`.
class ShmRing {
 public:
  static constexpr int kEverybody = -1;

  ShmRing(char* base, ShmRingShape shape) : base_(base), shape_(shape) {}

  [[nodiscard]] std::uint64_t published() const { return counter(0).load(std::memory_order_seq_cst); }
  [[nodiscard]] std::uint64_t consumed(int reader) const {
    return counter(2 + reader).load(std::memory_order_seq_cst);
  }
  [[nodiscard]] bool writer_is_blocked() const { return counter(1).load(std::memory_order_seq_cst) != 0; }
  [[nodiscard]] const ShmDescriptor& descriptor(std::uint64_t index) const;
  [[nodiscard]] char* data() const { return base_ + shape_.data_at(); }
  [[nodiscard]] const ShmRingShape& shape() const { return shape_; }

 protected:
  // On cache lines of their own: chunks published, whether the writer waits for space, chunks consumed by
  // each.
  [[nodiscard]] std::atomic<std::uint64_t>& counter(int index) const;
  [[nodiscard]] ShmDescriptor& slot(std::uint64_t index) const;

 private:
  char* base_;
  ShmRingShape shape_;
};

class ShmRingWriter : public ShmRing {
 public:
  static constexpr std::uint64_t kChunk = 256 * 1024;

  using ShmRing::ShmRing;

  /// Copies up to kChunk bytes of `data` and publishes them as `meta` says, of which offset and length are
  /// filled in. Returns how many, 0 if there is no space now. `is_gone(reader)` tells readers that are not
  /// waited for.
  std::uint64_t write(const char* data, std::uint64_t bytes, ShmDescriptor meta,
                      const std::function<bool(int)>& is_gone);
  /// Whether one more chunk that takes no space in the ring can be published now.
  [[nodiscard]] bool has_slot(const std::function<bool(int)>& is_gone);
  /// Publishes a chunk that lies elsewhere, after has_slot().
  void publish(const ShmDescriptor& meta);
  void set_blocked(bool blocked) { counter(1).store(blocked ? 1 : 0, std::memory_order_seq_cst); }

 private:
  struct Span {
    std::uint64_t offset;
    std::uint64_t length;
  };
  // Forgets what all readers are past.
  void reclaim(const std::function<bool(int)>& is_gone);
  [[nodiscard]] bool place(std::uint64_t length, std::uint64_t* offset);

  std::deque<Span> live_;        // in order of publication
  std::uint64_t reclaimed_ = 0;  // chunks
  std::uint64_t touched_ = 0;    // end of the memory that was ever used
};

class ShmRingReader : public ShmRing {
 public:
  ShmRingReader(char* base, ShmRingShape shape, int reader) : ShmRing(base, shape), reader_(reader) {}

  /// The next chunk, or null. Chunks for others are passed over.
  [[nodiscard]] const ShmDescriptor* next();
  /// Done with the chunk that next() returned.
  void consume();
  /// Whether any chunk was done with or passed over since the last call: the writer may have space now.
  [[nodiscard]] bool took_any() { return std::exchange(took_any_, false); }

 private:
  int reader_;
  bool took_any_ = false;
};

}  // namespace bmtrain
