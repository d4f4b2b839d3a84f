#include "comm/guard/watchdog.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "common/check.h"

namespace bmtrain {
namespace {

// How long a failed operation waits for the attendant, who needs seconds to hear all ranks.
constexpr std::chrono::seconds kPatience{10};

OpRecord::Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<OpRecord::Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Watchdog::Watchdog(double timeout_seconds)
    : timeout_(to_duration(timeout_seconds)), wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  BMT_CHECK(ValueError, std::isfinite(timeout_seconds) && timeout_seconds > 0,
            "Watchdog: timeout_seconds must be positive and finite, got ", timeout_seconds);
  BMT_CHECK(StateError, wake_fd_.is_open(), "Watchdog: cannot open an event: ", std::strerror(errno));
}

void Watchdog::wake() const {
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the attendant has reason enough to wake up.
  static_cast<void>(!::write(wake_fd_.get(), &one, sizeof one));
}

void Watchdog::watch(std::function<bool(const std::string& reason)> abort,
                     std::shared_ptr<FlightRecorder> recorder) {
  const Watched added{std::move(abort), std::move(recorder)};
  std::string verdict;
  {
    const Lock lock(mutex_);
    std::erase_if(watched_, [](const Watched& watched) { return watched.recorder.expired(); });
    watched_.push_back(added);
    verdict = verdict_;
  }
  if (!verdict.empty()) {
    static_cast<void>(added.abort(verdict));
  }
}

void Watchdog::hand_in(Failure failure) {
  if (verdict_.empty() && !failure_) {
    failure_ = std::move(failure);
  }
}

std::string Watchdog::explain(Failure failure) {
  const std::string own = failure.what;
  {
    Lock lock(mutex_);
    if (attended_ && verdict_.empty()) {
      hand_in(std::move(failure));
      wake();
      changed_.wait_for(lock, kPatience,
                        [this]() BMT_REQUIRES(mutex_) { return !verdict_.empty() || !attended_; });
    }
    if (!verdict_.empty()) {
      return verdict_;
    }
  }
  condemn(own, /*survivable=*/false);
  return verdict();
}

void Watchdog::report(Failure failure) {
  {
    const Lock lock(mutex_);
    if (attended_) {
      hand_in(std::move(failure));
      wake();
      return;
    }
  }
  condemn(failure.what, /*survivable=*/false);
}

void Watchdog::tell(Fingerprint fingerprint) {
  const Lock lock(mutex_);
  if (attended_) {
    fingerprints_.push_back(std::move(fingerprint));
    wake();
  }
}

bool Watchdog::agree(Fingerprint fingerprint) {
  const std::pair key(fingerprint.group, fingerprint.record.sequence);
  tell(std::move(fingerprint));
  Lock lock(mutex_);
  changed_.wait(lock, [&]() BMT_REQUIRES(mutex_) {
    return !verdict_.empty() || !attended_ || checks_ended_ || released_.contains(key);
  });
  released_.erase(key);
  return verdict_.empty();
}

std::string Watchdog::verdict() const {
  const Lock lock(mutex_);
  return verdict_;
}

void Watchdog::attend(bool present) {
  const Lock lock(mutex_);
  attended_ = present;
  changed_.notify_all();
}

std::optional<Failure> Watchdog::take_failure() {
  std::uint64_t count = 0;
  static_cast<void>(!::read(wake_fd_.get(), &count, sizeof count));
  const Lock lock(mutex_);
  auto failure = std::move(failure_);
  failure_.reset();
  return failure;
}

std::vector<Fingerprint> Watchdog::take_fingerprints() {
  const Lock lock(mutex_);
  std::vector<Fingerprint> taken(fingerprints_.begin(), fingerprints_.end());
  fingerprints_.clear();
  return taken;
}

void Watchdog::release(const std::string& group, std::int64_t sequence) {
  const Lock lock(mutex_);
  released_.emplace(group, sequence);
  changed_.notify_all();
}

std::vector<std::shared_ptr<FlightRecorder>> Watchdog::recorders() {
  std::vector<std::shared_ptr<FlightRecorder>> found;
  const Lock lock(mutex_);
  for (const Watched& watched : watched_) {
    if (auto recorder = watched.recorder.lock()) {
      found.push_back(std::move(recorder));
    }
  }
  return found;
}

void Watchdog::end_checks() {
  const Lock lock(mutex_);
  checks_ended_ = true;
  changed_.notify_all();
}

std::optional<Failure> Watchdog::overdue() {
  const auto limit = OpRecord::Clock::now() - timeout_;
  std::optional<Failure> oldest;
  for (const auto& recorder : recorders()) {
    recorder->poll();
    for (const OpRecord& record : recorder->blocked()) {
      if (record.started <= limit && (!oldest || record.started < oldest->record->started)) {
        const double seconds = std::chrono::duration<double>(timeout_).count();
        oldest = Failure{"late", detail::join("timed out after ", seconds, " s"), recorder->key(), record};
      }
    }
  }
  return oldest;
}

bool Watchdog::blocked_for(double seconds) {
  const auto limit = OpRecord::Clock::now() - to_duration(seconds);
  for (const auto& recorder : recorders()) {
    const auto blocked = recorder->blocked();
    if (std::any_of(blocked.begin(), blocked.end(), [&](const OpRecord& r) { return r.started <= limit; })) {
      return true;
    }
  }
  return false;
}

void Watchdog::condemn(const std::string& verdict, bool survivable) {
  std::vector<Watched> all;
  std::string first;
  {
    const Lock lock(mutex_);
    if (!verdict_.empty()) {
      return;
    }
    verdict_ = verdict.empty() ? "failed for an unknown reason" : verdict;
    first = verdict_;
    survivable_.store(survivable, std::memory_order_release);
    condemned_.store(true, std::memory_order_release);
    all = watched_;
    changed_.notify_all();
  }
  for (const Watched& watched : all) {  // without the lock: aborting takes milliseconds, and wakes callers
    static_cast<void>(watched.abort(first));
  }
}

}  // namespace bmtrain
