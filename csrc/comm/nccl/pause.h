// Waiting for something that most often ends within microseconds, and sometimes never.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace bmtrain {

/// Asks again and again, at first without sleep. Sleeps are short where what is waited for is a launch, which
/// the host is held up by; after a while it is something else (a connection, another rank), and they may be
/// long.
class Pause {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int kMostYields = 100;
  static constexpr std::chrono::microseconds kShortest{20};
  static constexpr std::chrono::microseconds kLongestOfLaunch{50};
  static constexpr std::chrono::microseconds kLongest{2000};
  static constexpr std::chrono::milliseconds kLaunch{20};

  /// How long to sleep after `waited`, and a sleep of `last` before (zero: none yet).
  [[nodiscard]] static constexpr std::chrono::microseconds next(std::chrono::microseconds last,
                                                                Clock::duration waited) {
    return std::clamp(last * 2, kShortest, waited < kLaunch ? kLongestOfLaunch : kLongest);
  }

  void operator()() {
    if (num_yields_ < kMostYields) {
      ++num_yields_;
      std::this_thread::yield();
      return;
    }
    length_ = next(length_, Clock::now() - began_);
    std::this_thread::sleep_for(length_);
  }

 private:
  const Clock::time_point began_ = Clock::now();
  int num_yields_ = 0;
  std::chrono::microseconds length_{0};
};

}  // namespace bmtrain
