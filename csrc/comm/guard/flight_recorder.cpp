#include "comm/guard/flight_recorder.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>

#include "common/check.h"

namespace bmtrain {

const char* to_string(OpState state) {
  static constexpr const char* kNames[] = {"posted", "started", "done", "failed"};
  return kNames[static_cast<std::size_t>(state)];
}

std::string describe(const OpRecord& record) {
  const std::string label = record.label.empty() ? "" : " for \"" + record.label + "\"";
  std::string extra = record.detail.empty() ? "" : ", " + record.detail;
  if (record.is_message()) {
    extra = detail::join(", peer ", record.peer);
  }
  return detail::join(record.op, " #", record.sequence, label, " (", record.numel, " x ", record.dtype, extra,
                      ")");
}

FlightRecorder::FlightRecorder(std::string key, std::string name, std::vector<int> members)
    : key_(std::move(key)),
      name_(std::move(name)),
      members_(std::move(members)),
      sent_(members_.size()),
      received_(members_.size()) {}

OpRecord FlightRecorder::post(OpRecord record) {
  record.posted = OpRecord::Clock::now();
  const Lock lock(mutex_);
  record.id = next_id_++;
  record.sequence = counter_of(record)++;
  ring_[static_cast<std::size_t>(record.id) % kCapacity] = record;
  return record;
}

void FlightRecorder::withdraw(const OpRecord& record) {
  const Lock lock(mutex_);
  if (record.id + 1 != next_id_) {
    return;  // another thread has posted since
  }
  next_id_ -= 1;
  counter_of(record) -= 1;
}

std::int64_t& FlightRecorder::counter_of(const OpRecord& record) {
  if (!record.is_message()) {
    return collectives_;
  }
  const bool sends = std::string_view(record.op) == "send";
  return (sends ? sent_ : received_).at(static_cast<std::size_t>(record.peer));
}

OpRecord* FlightRecorder::find(std::int64_t id) {
  OpRecord& record = ring_[static_cast<std::size_t>(id) % kCapacity];
  return record.id == id && id < next_id_ ? &record : nullptr;
}

void FlightRecorder::start(std::int64_t id) {
  const auto now = OpRecord::Clock::now();
  const Lock lock(mutex_);
  if (OpRecord* record = find(id)) {
    record->state = OpState::kStarted;
    record->started = now;
    blocked_.push_back(id);
  }
}

void FlightRecorder::end(std::int64_t id, OpState state) {
  const auto now = OpRecord::Clock::now();
  const Lock lock(mutex_);
  std::erase(blocked_, id);
  if (OpRecord* record = find(id)) {
    record->state = state;
    record->ended = now;
  }
}

void FlightRecorder::follow(std::int64_t id, std::function<bool()> over) {
  const Lock lock(mutex_);
  followed_.emplace_back(id, std::move(over));
}

void FlightRecorder::poll() {
  std::vector<std::pair<std::int64_t, std::function<bool()>>> followed;
  {
    const Lock lock(mutex_);
    followed.swap(followed_);
  }
  for (auto& [id, over] : followed) {
    try {
      if (over()) {
        end(id, OpState::kDone);
      } else {
        follow(id, std::move(over));
      }
    } catch (const std::exception&) {  // the next operation tells why
      end(id, OpState::kFailed);
    }
  }
}

std::vector<OpRecord> FlightRecorder::blocked() const {
  const Lock lock(mutex_);
  std::vector<OpRecord> found;
  for (const std::int64_t id : blocked_) {
    const OpRecord& record = ring_[static_cast<std::size_t>(id) % kCapacity];
    if (record.id == id) {
      found.push_back(record);
    }
  }
  std::sort(found.begin(), found.end(), [](const OpRecord& a, const OpRecord& b) { return a.id < b.id; });
  return found;
}

std::vector<OpRecord> FlightRecorder::records() const {
  const Lock lock(mutex_);
  std::vector<OpRecord> found;
  const std::int64_t first = std::max<std::int64_t>(0, next_id_ - static_cast<std::int64_t>(kCapacity));
  for (std::int64_t id = first; id < next_id_; ++id) {
    const OpRecord& record = ring_[static_cast<std::size_t>(id) % kCapacity];
    if (record.id == id) {  // one that was withdrawn has taken the place of the oldest
      found.push_back(record);
    }
  }
  return found;
}

std::int64_t FlightRecorder::posted() const {
  const Lock lock(mutex_);
  return collectives_;
}

}  // namespace bmtrain
