// A latch that can be used again, and that a thread may watch for a moment before it sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace bmtrain {

/// What a waiting thread does first.
enum class Waiting : std::uint8_t {
  kSleep,  // sleeps at once
  kWatch,  // watches for 150 us, if its last wait was short; whoever else is ready to run goes first
};

/// A number that any thread counts down and one thread awaits: its owner. It must outlive all calls, also a
/// count_down() that returns after the owner's wait.
///
/// [Note: Watching before sleeping]
/// To fall asleep and to be woken costs a loop over memory that fits the caches more than a second thread
/// gives it. So the owner watches the number first, but never at the cost of others: for a bounded time,
/// giving its processor away at each look, and only where it would have paid off the last time it waited.
/// Where nothing is to be done it sleeps, and where ranks or threads outnumber processors waits are long, and
/// it stops watching.
class Latch {
 public:
  /// By the owner, when everything counted before has been awaited. The next wait is for so many counts.
  void reset(std::int64_t count) { left_.store(count, std::memory_order_relaxed); }

  /// Of a latch for one count, by anyone: closes it again. True for the one caller who did, and may act on
  /// the count.
  [[nodiscard]] bool take() {
    std::int64_t open = 0;
    return left_.compare_exchange_strong(open, 1, std::memory_order_acq_rel);
  }

  /// What the caller did before is seen by the owner when its wait is over.
  void count_down();

  /// By the owner.
  void wait(Waiting waiting);

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] bool is_open() const { return left_.load(std::memory_order_acquire) == 0; }
  [[nodiscard]] bool opens_within(Clock::time_point begin) const;
  void sleep();

  std::atomic<std::int64_t> left_{0};
  std::atomic<bool> sleeps_{false};
  bool was_short_ = true;  // the last wait
  std::mutex mutex_;       // held by the owner from its last look until it sleeps
  std::condition_variable opened_;
};

}  // namespace bmtrain
