#include "common/latch.h"

#include <thread>

namespace bmtrain {
namespace {

// Python takes 50 to 120 us from one step to the next.
constexpr std::chrono::microseconds kWatch{150};
// Of a wait asleep, which contains being woken.
constexpr std::chrono::microseconds kShort{300};

}  // namespace

void Latch::count_down() {
  // In one order with the owner's: either it sees the count, or its sleep is seen here.
  if (left_.fetch_sub(1, std::memory_order_seq_cst) != 1) return;
  if (!sleeps_.load(std::memory_order_seq_cst)) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }
  opened_.notify_one();
}

void Latch::wait(Waiting waiting) {
  if (is_open()) return;
  const Clock::time_point begin = Clock::now();
  if (waiting == Waiting::kWatch && was_short_ && opens_within(begin)) return;
  sleep();
  was_short_ = Clock::now() - begin < kShort;
}

bool Latch::opens_within(Clock::time_point begin) const {
  do {
    std::this_thread::yield();
    if (is_open()) return true;
  } while (Clock::now() - begin < kWatch);
  return false;
}

void Latch::sleep() {
  std::unique_lock<std::mutex> lock(mutex_);
  sleeps_.store(true, std::memory_order_seq_cst);
  opened_.wait(lock, [this] { return left_.load(std::memory_order_seq_cst) == 0; });
  sleeps_.store(false, std::memory_order_relaxed);
}

}  // namespace bmtrain
