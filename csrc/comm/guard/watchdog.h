// The one place of a process that knows of all its communicators and of the first thing that went wrong.
//
// [Note: First error wins]
// A thread whose operation fails does not raise what it saw: it may have seen no more than the next victim.
// It hands its finding in and waits for the verdict, which bmtrain/_watch/watchdog.py, on a thread of its
// own, gets from all ranks. The verdict is one for the job; with it every communicator of the process is
// aborted, and every operation, pending or later, raises it. Where nobody attends (one rank, a group made
// before init_distributed) or the attendant does not answer, the finding is the verdict.
//
// [Note: Time-outs]
// The attendant also looks for operations that somebody has waited for too long. Transports have time-outs
// too, but longer ones: closing connections tells the other ranks less than a verdict does.
//
// [Note: Void operations]
// Where the job continues without a lost rank (bmtrain/_survive), a step under way is repeated. Until the
// script's loop has come to its next micro-step, operations raise nothing: they end at once, and what their
// results hold has no meaning. The gradients made of it are dropped.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/guard/flight_recorder.h"
#include "common/file_descriptor.h"
#include "common/thread_annotations.h"

namespace bmtrain {

/// What one thread saw go wrong.
struct Failure {
  std::string kind;  // "failed": the transport raised; "late"; "aborted": somebody called abort()
  std::string what;
  std::string group;  // key of the group; empty when none is concerned
  std::optional<OpRecord> record;
};

/// What the ranks of a group must agree on before an operation moves data (BMTRAIN_CHECK=1).
struct Fingerprint {
  std::string group;
  int rank = 0;  // in the group
  int size = 0;
  OpRecord record;
};

class Watchdog {
 public:
  explicit Watchdog(double timeout_seconds);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // What guards call, without the GIL.

  /// `abort` aborts a communicator, or returns false when that is gone; it is called without locks.
  void watch(std::function<bool(const std::string& reason)> abort, std::shared_ptr<FlightRecorder> recorder)
      BMT_EXCLUDES(mutex_);
  /// Hands a failure in and returns the verdict on it. Blocks for seconds at most.
  [[nodiscard]] std::string explain(Failure failure) BMT_EXCLUDES(mutex_);
  /// Hands a failure in; never blocks.
  void report(Failure failure) BMT_EXCLUDES(mutex_);
  /// Blocks until all ranks of the group have posted the same operation; false once there is a verdict.
  [[nodiscard]] bool agree(Fingerprint fingerprint) BMT_EXCLUDES(mutex_);
  /// Hands a fingerprint in that nobody waits for.
  void tell(Fingerprint fingerprint) BMT_EXCLUDES(mutex_);
  /// The verdict; empty while all is well.
  [[nodiscard]] std::string verdict() const BMT_EXCLUDES(mutex_);
  [[nodiscard]] bool condemned() const { return condemned_.load(std::memory_order_acquire); }
  /// Whether operations after a survivable verdict are void, from now on.
  void let_be_void(bool allowed) { may_be_void_.store(allowed, std::memory_order_relaxed); }
  /// See [Note: Void operations].
  [[nodiscard]] bool is_void() const { return survivable_.load(std::memory_order_acquire) && may_be_void_; }
  /// An operation has raised the verdict: the script knows of it.
  void set_heard() { heard_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool heard() const { return heard_.load(std::memory_order_relaxed); }

  // What the attendant calls.

  void attend(bool present) BMT_EXCLUDES(mutex_);
  /// Readable when there is a failure or a fingerprint to take.
  [[nodiscard]] int wake_fd() const { return wake_fd_.get(); }
  [[nodiscard]] std::optional<Failure> take_failure() BMT_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<Fingerprint> take_fingerprints() BMT_EXCLUDES(mutex_);
  void release(const std::string& group, std::int64_t sequence) BMT_EXCLUDES(mutex_);
  /// From now on agree() agrees: there is nobody to compare with.
  void end_checks() BMT_EXCLUDES(mutex_);
  /// The operation that has been waited for longest, if that is longer than the time-out.
  [[nodiscard]] std::optional<Failure> overdue();
  /// Whether somebody has waited in one operation for `seconds`.
  [[nodiscard]] bool blocked_for(double seconds);
  /// Makes this the verdict unless there is one, and aborts everything with it. `survivable`: operations may
  /// be void after it.
  void condemn(const std::string& verdict, bool survivable = false) BMT_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::shared_ptr<FlightRecorder>> recorders() BMT_EXCLUDES(mutex_);

 private:
  struct Watched {
    std::function<bool(const std::string& reason)> abort;
    std::weak_ptr<FlightRecorder> recorder;  // as long-lived as the communicator
  };

  void wake() const;
  void hand_in(Failure failure) BMT_REQUIRES(mutex_);

  const OpRecord::Clock::duration timeout_;
  const FileDescriptor wake_fd_;
  std::atomic<bool> condemned_ = false;
  std::atomic<bool> heard_ = false;
  std::atomic<bool> survivable_ = false;
  std::atomic<bool> may_be_void_ = false;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  bool attended_ BMT_GUARDED_BY(mutex_) = false;
  bool checks_ended_ BMT_GUARDED_BY(mutex_) = false;
  std::string verdict_ BMT_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ BMT_GUARDED_BY(mutex_);
  std::deque<Fingerprint> fingerprints_ BMT_GUARDED_BY(mutex_);
  std::set<std::pair<std::string, std::int64_t>> released_ BMT_GUARDED_BY(mutex_);
  std::vector<Watched> watched_ BMT_GUARDED_BY(mutex_);
};

}  // namespace bmtrain
