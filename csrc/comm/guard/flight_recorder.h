// What one group's operations did lately: a ring of the last 512, kept for the day on which one does not end.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/thread_annotations.h"

namespace bmtrain {

enum class OpState : std::uint8_t {
  kPosted,   // from the call on; nobody waits yet
  kStarted,  // from wait() on: its time-out runs
  kDone,     // its result was there
  kFailed,   // it raised, or was aborted
};
[[nodiscard]] const char* to_string(OpState state);

/// One operation as its caller described it.
struct OpRecord {
  using Clock = std::chrono::steady_clock;

  const char* op = "";
  std::string label;  // what it serves: a block's name
  const char* dtype = "Byte";
  std::int64_t numel = 0;
  std::string detail;  // "sum", "root 1", "to rank 2": what else the ranks must agree on
  int peer = -1;       // of a send or recv, as a rank of the group

  // Filled in by the recorder.
  std::int64_t id = 0;        // in the order of posting
  std::int64_t sequence = 0;  // among the group's collectives, or among the messages with this peer
  OpState state = OpState::kPosted;
  Clock::time_point posted;
  Clock::time_point started;
  Clock::time_point ended;

  [[nodiscard]] bool is_message() const { return peer >= 0; }
};

/// `all_gather #3 for "block 2" (10 x float)`.
[[nodiscard]] std::string describe(const OpRecord& record);

/// Thread-safe. Writing a record takes a lock that is never held for long, and no allocation but its label's.
class FlightRecorder {
 public:
  static constexpr std::size_t kCapacity = 512;

  /// `key` names the group in the whole job ("tp/1/gather"), `name` in errors; `members` are its ranks in the
  /// job.
  FlightRecorder(std::string key, std::string name, std::vector<int> members);

  [[nodiscard]] const std::string& key() const { return key_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::vector<int>& members() const { return members_; }

  /// Numbers the operation and keeps it; returns it as kept.
  OpRecord post(OpRecord record) BMT_EXCLUDES(mutex_);
  /// Takes back the operation posted last: its arguments were refused, and the other ranks' numbers go on.
  void withdraw(const OpRecord& record) BMT_EXCLUDES(mutex_);
  void start(std::int64_t id) BMT_EXCLUDES(mutex_);
  void end(std::int64_t id, OpState state) BMT_EXCLUDES(mutex_);
  /// The operation goes on after wait() returned (on a stream): poll() asks whether it is over, which raises
  /// if it failed.
  void follow(std::int64_t id, std::function<bool()> over) BMT_EXCLUDES(mutex_);
  void poll() BMT_EXCLUDES(mutex_);

  /// Started and not ended, in the order of posting.
  [[nodiscard]] std::vector<OpRecord> blocked() const BMT_EXCLUDES(mutex_);
  /// The last ones, oldest first.
  [[nodiscard]] std::vector<OpRecord> records() const BMT_EXCLUDES(mutex_);
  /// Collectives posted so far: the number of the next one.
  [[nodiscard]] std::int64_t posted() const BMT_EXCLUDES(mutex_);

 private:
  // Null when the ring has passed it.
  [[nodiscard]] OpRecord* find(std::int64_t id) BMT_REQUIRES(mutex_);
  // Where the number of the record's kind is counted.
  [[nodiscard]] std::int64_t& counter_of(const OpRecord& record) BMT_REQUIRES(mutex_);

  const std::string key_;
  const std::string name_;
  const std::vector<int> members_;

  mutable Mutex mutex_;
  std::array<OpRecord, kCapacity> ring_ BMT_GUARDED_BY(mutex_);
  std::int64_t next_id_ BMT_GUARDED_BY(mutex_) = 0;
  std::int64_t collectives_ BMT_GUARDED_BY(mutex_) = 0;
  std::vector<std::int64_t> sent_ BMT_GUARDED_BY(mutex_);
  std::vector<std::int64_t> received_ BMT_GUARDED_BY(mutex_);
  std::vector<std::int64_t> blocked_ BMT_GUARDED_BY(mutex_);
  std::vector<std::pair<std::int64_t, std::function<bool()>>> followed_ BMT_GUARDED_BY(mutex_);
};

}  // namespace bmtrain
