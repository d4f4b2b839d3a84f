// Ends a process that its peers have given up on and that cannot end by itself.
//
// [Note: A rank that is given up on]
// After a verdict every rank raises it in its next operation. A rank that the verdict accuses may never come
// to one: it hangs in Python or in native code. The attendant (bmtrain/_watchdog.py) then arms this thread. A
// rank that spins while it holds the interpreter's lock has no attendant: for it the missing beats count,
// together with the connections of the watchdogs, on which the verdict waits unread or which the peers have
// closed. Stacks are written by Python's faulthandler in a signal handler, which needs no lock.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/thread_annotations.h"

namespace bmtrain {

class Sentinel {
 public:
  /// `who` begins what is printed; `signal` makes faulthandler write all stacks to the file `stacks`; without
  /// beats for `silence_seconds` the attendant counts as stuck.
  Sentinel(std::string who, int signal, int stacks, double silence_seconds);
  ~Sentinel();
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

  /// The attendant is alive.
  void beat() { beats_.fetch_add(1, std::memory_order_relaxed); }
  /// The connections to the other watchdogs; replaced before one of them is closed.
  void set_lines(std::vector<int> lines) BMT_EXCLUDES(mutex_);
  /// Ends the process after so many seconds, with `why`, unless release() is called before.
  void arm(double seconds, std::string why) BMT_EXCLUDES(mutex_);
  void release() BMT_EXCLUDES(mutex_);

 private:
  void run() BMT_EXCLUDES(mutex_);
  // Why the process has to end now; empty while it has not.
  [[nodiscard]] std::string look() BMT_REQUIRES(mutex_);
  [[nodiscard]] bool peers_have_given_up() const BMT_REQUIRES(mutex_);
  // Writes all stacks and ends the process; with fewer words where there is no memory for them.
  [[noreturn]] void end(const std::string& why) const;
  void report(const std::string& why) const;

  const std::string who_;
  const int signal_;
  const int stacks_;
  const double silence_;
  const pid_t process_;
  std::atomic<std::uint64_t> beats_ = 0;

  Mutex mutex_;
  std::condition_variable changed_;
  bool stop_ BMT_GUARDED_BY(mutex_) = false;
  std::vector<int> lines_ BMT_GUARDED_BY(mutex_);
  std::optional<double> left_ BMT_GUARDED_BY(mutex_);  // seconds until the end, while armed
  std::string why_ BMT_GUARDED_BY(mutex_);
  std::uint64_t seen_ BMT_GUARDED_BY(mutex_) = 0;  // beats at the last look
  double missing_ BMT_GUARDED_BY(mutex_) = 0;      // seconds without a beat

  std::thread thread_;  // looks a few times a second; sleeps otherwise
};

/// Ends the process by the default action of a signal, whatever handler it has. Does not return.
void end_by_signal(int number);

}  // namespace bmtrain
