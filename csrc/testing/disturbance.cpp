#include "testing/disturbance.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "common/check.h"
#include "common/per_process.h"
#include "common/race_point.h"
#include "disk/transfer_fault.h"

namespace bmtrain {
namespace {

struct Disturbance {
  std::atomic<std::uint64_t> random{0};
  std::atomic<std::int64_t> most_microseconds{0};             // at every second point
  std::atomic<std::int64_t> most_microseconds_of_updates{0};  // at each chunk of an update
  std::atomic<std::int64_t> most_microseconds_of_transfers{0};
  std::atomic<std::int64_t> transfers_before_failure{-1};
  std::atomic<std::int64_t> result_of_failure{0};
  std::mutex mutex;  // protects the label
  std::string failing_label;
};

// SplitMix64: any sequence of states gives independent numbers, so that threads may share one.
std::uint64_t next_random(std::atomic<std::uint64_t>& state) {
  std::uint64_t z = state.fetch_add(0x9E3779B97F4A7C15U, std::memory_order_relaxed);
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31U);
}

void pause(std::uint64_t random, std::int64_t most_microseconds) {
  if (most_microseconds > 0) {
    const auto length = random % static_cast<std::uint64_t>(most_microseconds + 1);
    std::this_thread::sleep_for(std::chrono::microseconds(length));
  }
}

void disturb(const std::string* update) {
  auto& disturbance = per_process<Disturbance>();
  const std::uint64_t random = next_random(disturbance.random);
  if (update == nullptr) {
    if ((random & 1U) != 0) {
      pause(random >> 1U, disturbance.most_microseconds.load(std::memory_order_relaxed));
    }
    return;
  }
  {
    const std::lock_guard lock(disturbance.mutex);
    if (*update == disturbance.failing_label) {
      throw std::runtime_error("failed on request");
    }
  }
  pause(random, disturbance.most_microseconds_of_updates.load(std::memory_order_relaxed));
}

std::int64_t end_of_transfer(bool /*is_write*/, std::int64_t /*offset*/, std::int64_t result) {
  auto& disturbance = per_process<Disturbance>();
  pause(next_random(disturbance.random), disturbance.most_microseconds_of_transfers.load());
  return disturbance.transfers_before_failure.fetch_sub(1) == 0 ? disturbance.result_of_failure.load()
                                                                : result;
}

}  // namespace

void set_random_delays(std::uint64_t seed, std::int64_t most_microseconds) {
  auto& disturbance = per_process<Disturbance>();
  disturbance.random.store(seed * 0xD1342543DE82EF95U, std::memory_order_relaxed);
  disturbance.most_microseconds.store(most_microseconds, std::memory_order_relaxed);
  at_race_point.store(&disturb);
}

void disturb_updates(std::int64_t max_delay_microseconds, const std::string& failing_label) {
  BMT_CHECK(ValueError, max_delay_microseconds >= 0, "max_delay_microseconds: expected 0 or more, got ",
            max_delay_microseconds);
  auto& disturbance = per_process<Disturbance>();
  disturbance.most_microseconds_of_updates.store(max_delay_microseconds);
  const std::lock_guard lock(disturbance.mutex);
  disturbance.failing_label = failing_label;
  at_race_point.store(&disturb);
}

void disturb_transfers(std::int64_t max_delay_microseconds, std::int64_t failing, std::int64_t result) {
  auto& disturbance = per_process<Disturbance>();
  disturbance.most_microseconds_of_transfers.store(max_delay_microseconds);
  disturbance.result_of_failure.store(result);
  disturbance.transfers_before_failure.store(failing);
  transfer_fault.store(&end_of_transfer);
}

}  // namespace bmtrain
