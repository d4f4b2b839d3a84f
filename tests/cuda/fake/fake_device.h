// The device of fake_nccl.cpp: streams as queues of steps, each of which runs when its condition holds.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "comm/nccl/nccl_api.h"
#include "common/device_runtime.h"

namespace fake {

std::recursive_mutex mutex;  // protects everything in this library

struct Step {
  std::function<bool()> is_ready;
  std::function<void()> run;
};
struct Stream {
  std::deque<Step> steps;
  std::int64_t num_done = 0, num_queued = 0;
};
std::map<std::int64_t, Stream> streams;  // 0: everybody's current stream
bool is_lazy =
    false;  // tensor operations of other streams run when somebody has to wait for them, not before
bool is_forced = false;

void advance() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [id, stream] : streams) {
      while (!stream.steps.empty() && stream.steps.front().is_ready()) {
        const Step step = std::move(stream.steps.front());
        stream.steps.pop_front();
        step.run();
        stream.num_done += 1;
        moved = true;
      }
    }
  }
}

std::string journal;  // what was asked of streams and events, and of NCCL, line by line

void note(const std::string& line) { journal += line + "\n"; }

void enqueue(std::int64_t id, Step step) {
  streams[id].steps.push_back(std::move(step));
  streams[id].num_queued += 1;
}

// Whether the calling thread has the interpreter's lock.
bool has_lock() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() != 0;
}

int num_asked = 0, num_asked_with_lock = 0;
int records_before_failure = -1;  // negative: the device does not fail
std::int64_t last_event = 0;
int num_resets = 0;  // what was marked before the last one has happened

class Event final : public bmtrain::DeviceEvent {
 public:
  void record(std::int64_t stream) override {
    const std::lock_guard lock(mutex);
    if (records_before_failure >= 0 && records_before_failure-- == 0)
      throw std::runtime_error("the device failed");
    id_ = ++last_event;
    note("event " + std::to_string(id_) + " on " + std::to_string(stream));
    stream_ = stream;
    position_ = streams[stream].num_queued;
    reset_ = num_resets;
  }
  void block(std::int64_t stream) override {
    const std::lock_guard lock(mutex);
    // What is computed in the caller's stream is computed at once.
    const bool was_forced = std::exchange(is_forced, is_forced || stream == 0);
    note(std::to_string(stream) + " waits for event " + std::to_string(id_));
    enqueue(stream, {[id = stream_, position = position_, reset = reset_] {
                       return reset != num_resets || streams[id].num_done >= position;
                     },
                     [] {}});
    advance();
    is_forced = was_forced;
  }
  [[nodiscard]] bool is_complete() override {
    const std::lock_guard lock(mutex);
    num_asked += 1;
    num_asked_with_lock += has_lock() ? 1 : 0;
    const bool was_forced = std::exchange(is_forced, true);
    advance();
    is_forced = was_forced;
    return reset_ != num_resets || streams[stream_].num_done >= position_;
  }

 private:
  std::int64_t id_ = 0, stream_ = 0, position_ = 0;
  int reset_ = 0;
};

class Runtime final : public bmtrain::DeviceRuntime {
 public:
  [[nodiscard]] std::int64_t make_stream() override {
    const std::lock_guard lock(mutex);
    return ++last_;
  }
  [[nodiscard]] std::int64_t current_stream() override { return 0; }
  [[nodiscard]] void* native_handle(std::int64_t stream) override { return reinterpret_cast<void*>(stream); }
  [[nodiscard]] std::unique_ptr<bmtrain::DeviceEvent> make_event() override {
    return std::make_unique<Event>();
  }
  void synchronize() override {
    const std::lock_guard lock(mutex);
    note("synchronize");
    is_forced = true;
    advance();
    is_forced = false;
  }
  void run_on(std::int64_t stream, std::function<void()> work) override {
    const std::lock_guard lock(mutex);
    note("work on " + std::to_string(stream));
    enqueue(stream, {[] { return !is_lazy || is_forced; }, std::move(work)});
    advance();
  }

 private:
  std::int64_t last_ = 0;
};

}  // namespace fake
using namespace fake;  // NOLINT: one library
