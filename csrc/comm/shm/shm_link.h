// The ranks of one host as one of them sees them: what it still has to send and to receive, and who moves it.
//
// [Note: Who moves the bytes]
// Posting an operation copies what it sends into this rank's rings, as far as there is space; waiting copies
// what it receives out of its peers' rings. So with every processor busy nothing is done twice and nobody is
// interrupted: a gather that was posted early is one copy from memory when it is waited for. Only where a
// ring is full does somebody depend on a peer that computes; then the background threads of both carry on.
//
// [Note: Order]
// A rank sends its collectives through one ring, in the order in which they were posted, and receives them
// in that order from each peer; messages between a pair have a ring of their own. An operation of two
// phases holds back what was posted after it until its second phase is under way: otherwise a rank could find
// an operation it has not posted yet in front of the one it waits for.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/exchange.h"
#include "comm/shm/shm_heap.h"
#include "comm/shm/shm_ring.h"
#include "comm/shm/shm_segment.h"
#include "comm/transport.h"
#include "common/float_environment.h"
#include "common/thread_annotations.h"

namespace bmtrain {

class ShmLink;

/// The slices of an all_to_all, each in a buffer of its sender or in memory of this process.
class ShmPeerSlices final : public PeerSlices {
 public:
  ShmPeerSlices(std::weak_ptr<ShmLink> link, int size) : link_(std::move(link)) {
    by_rank.resize(static_cast<std::size_t>(size));
  }
  ~ShmPeerSlices() override { release(); }
  ShmPeerSlices(const ShmPeerSlices&) = delete;
  ShmPeerSlices& operator=(const ShmPeerSlices&) = delete;
  void release() final;

  std::vector<std::pair<int, int>> in_place;  // rank and slot of the buffers that are read here
  std::vector<at::Tensor> copies;

 private:
  std::weak_ptr<ShmLink> link_;
};

/// Where an operation sends from: private memory, so that it goes through the rings, or a buffer used in
/// place.
enum class ShmPlace : std::uint8_t { kPrivate, kOwn, kCommon };

/// An exchange under way. What is posted is fixed; all that changes is protected by the link's mutex.
/// `combine` runs once, on any thread, which then rounds as the one that posted the operation.
struct ShmOperation : Exchange {
  ShmPlace place = ShmPlace::kPrivate;
  int slot = ShmHeap::kNone;  // of the buffer, unless kPrivate
  /// Of kCommon: writes the slice into the buffer, instead of copying it; or null.
  std::function<void(char* slice, const char* data)> write;
  int left[2] = {0, 0};  // pieces of each phase that are not through
  bool combined = false;
  bool done = false;
  std::fenv_t environment = {};  // of the thread that posted it
  /// Where pieces without `data` are received: they stay where they are, if they can.
  std::shared_ptr<ShmPeerSlices> slices;
};
using ShmOperationPtr = std::shared_ptr<ShmOperation>;

/// Any thread may call it; a thread of its own carries on where nobody does.
class ShmLink : public std::enable_shared_from_this<ShmLink> {
 public:
  /// `files` are the memory files of all ranks in rank order; `watches` has for each rank two descriptors (or
  /// -1) that become readable when that process is gone, and which belong to the link if this returns.
  ShmLink(const std::vector<int>& files, std::vector<int> watches, int rank, int size, std::string name,
          double timeout_seconds);
  ~ShmLink();
  ShmLink(const ShmLink&) = delete;
  ShmLink& operator=(const ShmLink&) = delete;

  [[nodiscard]] static std::size_t segment_bytes(int size);
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  /// Numbers the operation and starts it. Pieces of no bytes are left out. Raises StateError when closed,
  /// CommunicationError when aborted.
  void post(const ShmOperationPtr& operation) BMT_EXCLUDES(mutex_);
  /// Blocks until it is over; on failure aborts the link and raises CommunicationError.
  void await(ShmOperation& operation) BMT_EXCLUDES(mutex_);
  [[nodiscard]] bool is_done(ShmOperation& operation) BMT_EXCLUDES(mutex_);

  void abort(const std::string& reason) BMT_EXCLUDES(mutex_);
  void close() BMT_EXCLUDES(mutex_);
  [[nodiscard]] bool closed() BMT_EXCLUDES(mutex_);

  // Buffers used in place; see ShmHeap.

  /// Waits while only peers use what there is of `bytes`, for longest_wait() at most, after which there is
  /// none; see [Note: Waiting for readers].
  [[nodiscard]] c10::DataPtr borrow_own(std::int64_t bytes) BMT_EXCLUDES(mutex_);
  [[nodiscard]] std::chrono::milliseconds longest_wait() const { return longest_wait_; }
  void set_longest_wait(std::chrono::milliseconds wait) { longest_wait_ = wait; }
  [[nodiscard]] c10::DataPtr borrow_common(std::int64_t bytes) BMT_EXCLUDES(mutex_);
  void give_back_common(const void* view, std::int64_t bytes) BMT_EXCLUDES(mutex_);
  /// The slot of the own buffer that a tensor fills, about to be published; kNone if it is in none.
  [[nodiscard]] int publish_own(const at::Tensor& tensor) BMT_EXCLUDES(mutex_);
  [[nodiscard]] int find_common(const at::Tensor& tensor) BMT_EXCLUDES(mutex_);
  void end_own(int slot) { heap_->end_own(slot); }
  void end_common(int slot, std::uint64_t use) BMT_EXCLUDES(mutex_);
  [[nodiscard]] std::int64_t bytes_in_place() BMT_EXCLUDES(mutex_);
  void finish_reading(int peer, int slot);

  /// Bytes that this process copied for operations, since construction or the last reset.
  [[nodiscard]] std::int64_t bytes_copied() const { return copied_.load(std::memory_order_relaxed); }
  void count_copied(std::int64_t bytes) { copied_.fetch_add(bytes, std::memory_order_relaxed); }
  void reset_copied() { copied_.store(0, std::memory_order_relaxed); }

 private:
  struct Pending {
    ShmOperationPtr operation;
    Piece piece;
    std::int64_t moved = 0;
  };
  using Queue = std::deque<Pending>;
  // What comes from, and what goes to, one other rank.
  struct Peer {
    Queue collectives;
    Queue messages;
    Queue sends;  // messages to it
    bool died = false;
  };

  [[nodiscard]] std::string describe(const ShmOperation& operation) const;
  [[nodiscard]] ShmHeader& header(int rank) const { return segments_[index(rank)].header(); }
  [[nodiscard]] static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  // Moves whatever can be moved now; false if nothing could.
  bool progress() BMT_REQUIRES(mutex_);
  bool send_queue(Queue& queue, ShmRingWriter& ring) BMT_REQUIRES(mutex_);
  // Sends of one piece what can be sent now; returns how much.
  std::uint64_t send_some(Pending& pending, ShmRingWriter& ring, const ShmDescriptor& meta,
                          const std::function<bool(int)>& is_past) BMT_REQUIRES(mutex_);
  // Writes this rank's slice of a gather where all ranks see it.
  void write_common(const ShmOperation& operation, const Piece& piece) BMT_REQUIRES(mutex_);
  bool receive_queue(Queue& queue, ShmRingReader& ring, int peer) BMT_REQUIRES(mutex_);
  // Aborts the link if that fails.
  void receive_chunk(Pending& pending, const ShmDescriptor& chunk, const ShmRingReader& ring, int peer)
      BMT_REQUIRES(mutex_);
  // Whether anything that was posted is still to be moved.
  [[nodiscard]] bool is_busy() const BMT_REQUIRES(mutex_);
  // Tells the peers that nothing more comes from here, and that nothing more is read.
  void leave() BMT_REQUIRES(mutex_);
  // Computes what is due between the phases, and notes the end. Aborts the link if the computation fails.
  void settle(ShmOperation& operation) BMT_REQUIRES(mutex_);
  // Takes the first piece, which is through, off the queue.
  void retire(Queue& queue) BMT_REQUIRES(mutex_);
  void notify(int peer) const;
  // Wakes those whose sends wait for something that has happened here now.
  void call_blocked() const BMT_REQUIRES(mutex_);
  [[nodiscard]] bool is_gone(int peer) const BMT_REQUIRES(mutex_);
  // The ranks that have not let go of a common buffer's use before the present one.
  [[nodiscard]] std::vector<int> users_behind(int slot) const BMT_REQUIRES(mutex_);
  [[nodiscard]] bool any_is_gone() const BMT_REQUIRES(mutex_);
  // Gives the lock away until the bell has rung since `seen`, for some milliseconds at most; then looks for
  // processes that have ended. clang does not see whose lock it is.
  void sleep_until_called(Lock& lock, std::uint32_t seen, std::chrono::steady_clock::time_point deadline)
      BMT_REQUIRES(mutex_) BMT_UNCHECKED;
  // Looks which processes have ended; true if one more has.
  bool poll_peer_exits() BMT_REQUIRES(mutex_);
  // The ranks without which the operation cannot go on.
  [[nodiscard]] std::vector<int> blockers(const ShmOperation& operation) const BMT_REQUIRES(mutex_);
  void add_readers_behind(const Pending& pending, std::vector<int>& ranks) const BMT_REQUIRES(mutex_);
  [[noreturn]] void fail_lost(const ShmOperation& operation, int peer) BMT_REQUIRES(mutex_);
  [[noreturn]] void fail_late(const ShmOperation& operation, const std::vector<int>& peers)
      BMT_REQUIRES(mutex_);
  void abort_locked(const std::string& reason) BMT_REQUIRES(mutex_);
  void run_in_background() BMT_EXCLUDES(mutex_);

  const int rank_;
  const int size_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;
  std::vector<ShmSegment> segments_;
  const std::vector<int> watches_;
  const int process_;  // a forked child has the memory, but is not the rank
  std::atomic<std::int64_t> copied_ = 0;
  std::atomic<std::chrono::milliseconds> longest_wait_{std::chrono::seconds{10}};

  Mutex mutex_;
  // Made once. Used under the mutex, except what ShmHeap calls thread-safe.
  std::unique_ptr<ShmHeap> heap_;
  ShmRingWriter collective_writer_ BMT_GUARDED_BY(mutex_);
  std::vector<ShmRingReader> collective_readers_ BMT_GUARDED_BY(mutex_);
  std::vector<ShmRingWriter> message_writers_ BMT_GUARDED_BY(mutex_);
  std::vector<ShmRingReader> message_readers_ BMT_GUARDED_BY(mutex_);
  Queue collective_sends_ BMT_GUARDED_BY(mutex_);
  std::vector<Peer> peers_ BMT_GUARDED_BY(mutex_);
  std::int64_t sequence_ BMT_GUARDED_BY(mutex_) = 0;
  std::vector<std::int64_t> messages_sent_ BMT_GUARDED_BY(mutex_);
  std::vector<std::int64_t> messages_received_ BMT_GUARDED_BY(mutex_);
  // Destroyed by whoever calls next: the background thread must not drop a tensor that Python knows.
  std::vector<ShmOperationPtr> finished_ BMT_GUARDED_BY(mutex_);
  Standing standing_ BMT_GUARDED_BY(mutex_);

  std::atomic<bool> stop_ = false;
  std::thread background_;  // carries on where a peer waits and no thread of the script is in the link
};

}  // namespace bmtrain
