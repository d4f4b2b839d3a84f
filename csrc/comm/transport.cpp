#include "comm/transport.h"

#include "comm/arguments.h"
#include "common/check.h"

namespace bmtrain {

const char* name_of(Op op) {
  switch (op) {
    case Op::kAllGather:
    case Op::kAllGatherInPlace:
      return "all_gather";
    case Op::kAllToAll:
    case Op::kAllToAllInPlace:
    case Op::kAllToAllUneven:
      return "all_to_all";
    case Op::kReduceScatter:
    case Op::kRingReduceScatter:
      return "reduce_scatter";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kReduce:
      return "reduce";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kSend:
      return "send";
    case Op::kRecv:
      return "recv";
    case Op::kBarrier:
      return "barrier";
  }
  return "unknown";
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
