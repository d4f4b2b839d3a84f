#include "comm/transport.h"

#include <iterator>

#include "comm/arguments.h"
#include "comm/host_tensor.h"
#include "common/check.h"

namespace bmtrain {

const char* name_of(Op op) {
  static constexpr const char* kNames[] = {
      "all_gather",     "all_gather",                    // in place
      "all_to_all",     "all_to_all",     "all_to_all",  // in place, uneven
      "reduce_scatter", "reduce_scatter",                // around the ring
      "all_reduce",     "reduce",         "broadcast",  "send", "recv", "barrier",
  };
  static_assert(std::size(kNames) == static_cast<std::size_t>(Op::kBarrier) + 1);
  return kNames[static_cast<std::size_t>(op)];
}

bool Standing::abort(const std::string& why) {
  if (is_aborted) {
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
  WorkPtr work = perform(call);
  traffic_.add(name_of(call.op), wire_bytes(call));
  return work;
}

std::int64_t Transport::wire_bytes(const Call& call) const {
  const std::int64_t others = size() - 1;
  switch (call.op) {
    case Op::kAllGather:
      return bytes_of(call.input) * others;
    case Op::kAllGatherInPlace:  // what is sent has been rounded
      return bytes_of(call.output) / size() * others;
    case Op::kAllToAll:
    case Op::kAllToAllInPlace:
      return bytes_of(call.input) / size() * others;
    case Op::kAllToAllUneven:
      return (call.input.numel() - call.counts->input[static_cast<std::size_t>(rank())]) *
             static_cast<std::int64_t>(call.input.element_size());
    case Op::kReduceScatter:
    case Op::kRingReduceScatter:
      return bytes_of(call.output) * others;
    case Op::kAllReduce:
      return 2 * bytes_of(call.input) * others / size();
    case Op::kReduce:
      return rank() == call.peer ? 0 : bytes_of(call.input);
    case Op::kBroadcast:
      return rank() == call.peer ? bytes_of(call.input) * others : 0;
    case Op::kSend:
      return bytes_of(call.input);
    case Op::kRecv:
      return 0;
    case Op::kBarrier:
      return others;
  }
  return 0;
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
