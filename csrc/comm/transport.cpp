#include "comm/transport.h"

#include <iterator>

#include "comm/arguments.h"
#include "common/check.h"

namespace bmtrain {

const char* name_of(Op op) {
  static constexpr const char* kNames[] = {"all_gather", "all_gather",     "all_to_all",     "all_to_all",
                                           "all_to_all", "reduce_scatter", "reduce_scatter", "all_reduce",
                                           "reduce",     "broadcast",      "send",           "recv",
                                           "barrier"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(Op::kBarrier) + 1);
  return kNames[static_cast<std::size_t>(op)];
}

bool Standing::abort(const std::string& why) {
  if (!is_open()) {
    return false;
  }
  is_aborted = true;
  reason = why;
  return true;
}

void Standing::refuse(const std::string& what) const {
  BMT_CHECK(CommunicationError, !is_aborted, what, ": the communicator was aborted: ", reason);
  throw StateError(what + ": the communicator is closed");
}

WorkPtr Transport::start(const Call& call) {
  check_arguments(*this, call);
  return perform(call);
}

void TrafficCounter::add(const char* op, std::int64_t bytes) {
  const Lock lock(mutex_);
  Traffic& count = counts_[op];
  count.messages += 1;
  count.bytes += bytes;
}

std::vector<std::pair<std::string, Traffic>> TrafficCounter::snapshot() const {
  const Lock lock(mutex_);
  return {counts_.begin(), counts_.end()};
}

void TrafficCounter::reset() {
  const Lock lock(mutex_);
  counts_.clear();
}

}  // namespace bmtrain
