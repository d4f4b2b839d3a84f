// The memory that one rank shares with the others of its host, and how they wake each other.
//
// [Note: Segments]
// Each rank owns one segment and maps those of its peers. A segment is an anonymous memory file (memfd): it
// has no name, is not limited by the size of /dev/shm, and is gone with the last process that maps it,
// however that ends. It holds the rank's state, its bells, and the rings through which it sends (shm_ring.h).
// Pages that no ring has used yet take no memory.
//
// [Note: Bells]
// A bell is a counter that is raised and then woken (futex). Whoever wants to sleep reads the counter, looks
// once more for something to do, and sleeps only while the counter has still that value: no call is lost.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace bmtrain {

/// A counter on which threads of several processes sleep.
class ShmBell {
 public:
  [[nodiscard]] std::uint32_t count() const { return count_.load(std::memory_order_seq_cst); }
  void ring();
  /// Sleeps while count() == seen, at most `milliseconds`.
  void sleep(std::uint32_t seen, int milliseconds);

 private:
  std::atomic<std::uint32_t> count_ = 0;
  std::atomic<std::uint32_t> sleepers_ = 0;
};

/// What a rank says of itself.
enum class ShmState : std::uint32_t { kOpen = 0, kClosed = 1, kAborted = 2 };

/// A segment of only zeros is one in which nothing has happened yet.
struct ShmHeader {
  static constexpr std::size_t kReasonBytes = 1024;

  std::atomic<ShmState> state;
  char reason[kReasonBytes];  // written before `state` becomes kAborted
  // Something arrived for the owner, or a peer made room for what it sends.
  alignas(64) ShmBell bell;
  // The same, but for the owner's background thread: somebody cannot go on without it.
  alignas(64) ShmBell urgent;
};

/// One mapped segment.
class ShmSegment {
 public:
  ShmSegment() = default;
  /// Maps `bytes` of a memory file, which may be closed afterwards. Raises CommunicationError.
  ShmSegment(int file, std::size_t bytes);
  ~ShmSegment();
  ShmSegment(ShmSegment&& other) noexcept;
  ShmSegment& operator=(ShmSegment&& other) noexcept;
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  [[nodiscard]] ShmHeader& header() const { return *reinterpret_cast<ShmHeader*>(data_); }
  [[nodiscard]] char* data() const { return data_; }
  void call() const { header().bell.ring(); }
  void call_urgently() const { header().urgent.ring(); }

 private:
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace bmtrain
