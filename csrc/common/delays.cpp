#include "common/delays.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace bmtrain {
namespace {

std::atomic<std::int64_t> most{0};
std::atomic<std::uint64_t> state{0};

// SplitMix64: any sequence of states gives independent numbers, so that threads may share one.
std::uint64_t next_random() {
  std::uint64_t z = state.fetch_add(0x9E3779B97F4A7C15U, std::memory_order_relaxed);
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31U);
}

}  // namespace

void set_random_delays(std::uint64_t seed, std::int64_t most_microseconds) {
  state.store(seed * 0xD1342543DE82EF95U, std::memory_order_relaxed);
  most.store(most_microseconds, std::memory_order_relaxed);
}

void delay() {
  const std::int64_t limit = most.load(std::memory_order_relaxed);
  if (limit <= 0) {
    return;
  }
  const std::uint64_t random = next_random();
  if ((random & 1U) != 0) {
    const auto pause = (random >> 1U) % static_cast<std::uint64_t>(limit + 1);
    std::this_thread::sleep_for(std::chrono::microseconds(pause));
  }
}

}  // namespace bmtrain
