// UpdateQueue: work on memory that goes on behind the caller's back, and that a caller can wait for piece by
// piece.
//
// [Note: Updates in the background]
// An Update is the work of one block, cut into chunks that depend on nothing but their number. Chunks are
// claimed one by one by whoever comes first: a worker of the queue, which takes the updates in the order in
// which they were posted, or a thread that needs this update now. So a waiting thread never sits idle while
// chunks are left, and nothing has to be reordered for it.
// This file knows nothing of tensors, so that it can be built with ThreadSanitizer alone
// (tests/unit/test_update_queue.py).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/float_environment.h"
#include "common/thread_annotations.h"

namespace bmtrain {

class Update {
 public:
  enum class State : std::uint8_t {
    kReady,     // no chunk has been claimed
    kUpdating,  // from the first claim on
    kDone,      // every chunk has been computed
    kFailed,    // a chunk threw; those not yet claimed were dropped, and none is being computed any more
  };

  /// `compute(chunk, with_extra)` is called once for each chunk, from any thread; see `ask_for_extra`.
  using Compute = std::function<void(std::int64_t chunk, bool with_extra)>;

  Update(std::string label, std::int64_t num_chunks, Compute compute);
  Update(const Update&) = delete;
  Update& operator=(const Update&) = delete;

  [[nodiscard]] State state() const;

  /// Lets `compute` do its extra part too, in every chunk. False, and no effect, once a chunk has been
  /// claimed.
  [[nodiscard]] bool ask_for_extra();

  /// Claims and computes one chunk. False if none was left to claim. Never throws.
  bool run_one();
  /// Whether no chunk is left and none is being computed.
  [[nodiscard]] bool is_over() const;
  /// Computes what nobody has claimed and blocks until the update is over, failed or not.
  void help();

  /// Blocks until no chunk is left and none is being computed. Throws std::runtime_error, with the label and
  /// what the chunk said, if one threw.
  void wait();

 private:
  [[nodiscard]] bool has_ended() const BMT_REQUIRES(mutex_);

  const std::string label_;
  const std::int64_t num_chunks_;
  const Compute compute_;

  mutable Mutex mutex_;
  std::condition_variable over_;
  std::int64_t num_claimed_ BMT_GUARDED_BY(mutex_) = 0;
  std::int64_t num_running_ BMT_GUARDED_BY(mutex_) = 0;
  bool with_extra_ BMT_GUARDED_BY(mutex_) = false;
  bool failed_ BMT_GUARDED_BY(mutex_) = false;
  std::string error_ BMT_GUARDED_BY(mutex_);
};

class UpdateQueue {
 public:
  UpdateQueue() = default;
  UpdateQueue(const UpdateQueue&) = delete;
  UpdateQueue& operator=(const UpdateQueue&) = delete;

  /// Lets up to `num_workers` threads work through `updates`, after those posted before. The threads round as
  /// the calling thread does. They are started at their first need and live as long as the process, and so
  /// must the queue.
  void post(const std::vector<std::shared_ptr<Update>>& updates, int num_workers);

 private:
  // What the threads do; chunks that throw are errors of their update.
  void work(int index) BMT_EXCLUDES(mutex_);

  Mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Update>> updates_ BMT_GUARDED_BY(mutex_);
  int num_started_ BMT_GUARDED_BY(mutex_) = 0;
  int num_workers_ BMT_GUARDED_BY(mutex_) = 0;
  std::fenv_t float_environment_ BMT_GUARDED_BY(mutex_) = {};
};

}  // namespace bmtrain
