// What the transports have in common: they check arguments before anything moves, refuse to work when closed
// or aborted, and count what they send.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "common/thread_annotations.h"

namespace bmtrain {

/// Thread-safe counters behind Communicator::traffic.
class TrafficCounter {
 public:
  void add(const char* op, std::int64_t bytes) BMT_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> snapshot() const BMT_EXCLUDES(mutex_);
  void reset() BMT_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::map<std::string, Traffic> counts_ BMT_GUARDED_BY(mutex_);
};

/// Whether operations may start. Not thread-safe: the mutex of its owner guards it.
struct Standing {
  bool is_closed = false;
  bool is_aborted = false;
  std::string reason;  // of the abort; the first one counts

  [[nodiscard]] bool is_open() const { return !is_closed && !is_aborted; }
  /// False if it was aborted before. What was closed is aborted for the operations that are still under way.
  bool abort(const std::string& why);
  /// Raises CommunicationError if aborted, else StateError; `what` names the operation that was refused.
  [[noreturn]] void refuse(const std::string& what) const;
};

class Transport : public Communicator {
 public:
  using Communicator::Communicator;

  [[nodiscard]] WorkPtr start(const Call& call) final;
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> traffic() const override {
    return traffic_.snapshot();
  }
  void reset_traffic() override { traffic_.reset(); }

 protected:
  /// The operation, whose arguments have been checked.
  [[nodiscard]] virtual WorkPtr perform(const Call& call) = 0;
  /// Bytes that this rank sends for it.
  [[nodiscard]] virtual std::int64_t wire_bytes(const Call& call) const;

 private:
  TrafficCounter traffic_;
};

/// The work of an operation that has nothing left to do once it was issued: on CUDA what it did is in the
/// order of the current stream.
class DoneWork final : public Work {
 public:
  void wait() override {}
  [[nodiscard]] bool is_completed() override { return true; }
};

}  // namespace bmtrain
