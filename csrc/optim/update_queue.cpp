#include "optim/update_queue.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

namespace bmtrain {

Update::Update(std::string label, std::int64_t num_chunks, Compute compute)
    : label_(std::move(label)), num_chunks_(num_chunks), compute_(std::move(compute)) {}

bool Update::has_ended() const { return (failed_ || num_claimed_ == num_chunks_) && num_running_ == 0; }

Update::State Update::state() const {
  const Lock lock(mutex_);
  if (has_ended()) return failed_ ? State::kFailed : State::kDone;
  return num_claimed_ == 0 ? State::kReady : State::kUpdating;
}

bool Update::is_over() const {
  const Lock lock(mutex_);
  return has_ended();
}

bool Update::ask_for_extra() {
  const Lock lock(mutex_);
  if (num_claimed_ > 0) return false;
  with_extra_ = true;
  return true;
}

bool Update::run_one() {
  std::int64_t chunk = 0;
  bool with_extra = false;
  {
    const Lock lock(mutex_);
    if (failed_ || num_claimed_ == num_chunks_) return false;
    chunk = num_claimed_++;
    ++num_running_;
    with_extra = with_extra_;
  }
  bool failed = false;
  std::string error;
  try {
    compute_(chunk, with_extra);
  } catch (const std::exception& exception) {
    failed = true;
    error = exception.what();
  } catch (...) {
    failed = true;
    error = "unknown error";
  }
  const Lock lock(mutex_);
  --num_running_;
  if (failed && !failed_) {
    failed_ = true;
    error_ = std::move(error);
  }
  if (has_ended()) over_.notify_all();
  return true;
}

void Update::help() {
  while (run_one()) {
  }
  Lock lock(mutex_);
  over_.wait(lock, [this]() BMT_REQUIRES(mutex_) { return has_ended(); });
}

void Update::wait() {
  Lock lock(mutex_);
  over_.wait(lock, [this]() BMT_REQUIRES(mutex_) { return has_ended(); });
  if (failed_) throw std::runtime_error(label_ + ": the update of its parameters failed: " + error_);
}

void UpdateQueue::post(const std::vector<std::shared_ptr<Update>>& updates, int num_workers) {
  {
    const Lock lock(mutex_);
    updates_.insert(updates_.end(), updates.begin(), updates.end());
    num_workers_ = std::max(num_workers, 1);
    float_environment_ = float_environment();
    for (; num_started_ < num_workers_; ++num_started_) {
      // Detached: idle threads must not hold up the end of the process.
      std::thread([this, index = num_started_] { work(index); }).detach();
    }
  }
  wake_.notify_all();
}

void UpdateQueue::work(int index) {
  Lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&]() BMT_REQUIRES(mutex_) { return index < num_workers_ && !updates_.empty(); });
    const std::shared_ptr<Update> update = updates_.front();
    std::fesetenv(&float_environment_);
    lock.unlock();
    while (update->run_one()) {
    }
    lock.lock();
    if (!updates_.empty() && updates_.front() == update) updates_.pop_front();
  }
}

}  // namespace bmtrain
