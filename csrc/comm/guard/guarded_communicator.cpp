#include "comm/guard/guarded_communicator.h"

#include <atomic>
#include <exception>
#include <utility>

#include "comm/arguments.h"
#include "comm/transport.h"
#include "common/check.h"
#include "common/race_point.h"

namespace bmtrain {
namespace {

const char* to_string(ReduceOp op) {
  static constexpr const char* kNames[] = {"sum", "avg", "max", "min", "prod"};
  return kNames[static_cast<std::size_t>(op)];
}

OpRecord record_of(const Call& call) {
  OpRecord record;
  record.op = name_of(call.op);
  record.label = call.label;
  if (call.is_message()) {
    record.peer = call.peer;
  } else if (call.op == Op::kBroadcast) {
    record.detail = detail::join("root ", call.peer);
  } else if (call.op == Op::kReduce) {
    record.detail = detail::join(to_string(call.reduce_op), " to root ", call.peer);
  } else if (call.op == Op::kAllReduce || call.op == Op::kReduceScatter ||
             call.op == Op::kRingReduceScatter) {
    record.detail = to_string(call.reduce_op);
  }
  const at::Tensor& tensor = call.op == Op::kRecv ? call.output : call.input;
  if (tensor.defined()) {  // the transport refuses None
    // What travels, where a gather rounds its input.
    const bool is_rounded = call.op == Op::kAllGatherInPlace && call.output.defined();
    record.dtype = c10::toString((is_rounded ? call.output : tensor).scalar_type());
    record.numel = call.op == Op::kAllToAllUneven ? 0 : tensor.numel();  // that of one rank says nothing
  }
  return record;
}

class GuardedWork final : public Work {
 public:
  GuardedWork(std::shared_ptr<Guard> guard, OpRecord record, WorkPtr inner)
      : guard_(std::move(guard)), record_(std::move(record)), inner_(std::move(inner)) {}

  void wait() override {
    if (ended_.load(std::memory_order_acquire)) {
      if (!is_void_) {
        inner_->wait();  // repeats its result
      }
      return;
    }
    FlightRecorder& recorder = *guard_->recorder;
    recorder.start(record_.id);
    std::function<bool()> is_over;
    race_point();
    try {
      inner_->wait();
      if (!inner_->is_completed()) {
        is_over = inner_->follow();
      }
    } catch (const CommunicationError& error) {
      guard_->fail(record_, error.what());
      is_void_ = true;
      ended_.store(true, std::memory_order_release);
      return;
    } catch (...) {
      recorder.end(record_.id, OpState::kFailed);
      throw;
    }
    if (is_over) {
      recorder.follow(record_.id, std::move(is_over));
    } else {
      recorder.end(record_.id, OpState::kDone);
    }
    ended_.store(true, std::memory_order_release);
  }

  [[nodiscard]] bool is_completed() override { return is_void_ || inner_->is_completed(); }

 private:
  const std::shared_ptr<Guard> guard_;
  const OpRecord record_;
  const WorkPtr inner_;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> is_void_ = false;  // see [Note: Void operations]; set before `ended_`
};

const Communicator& required(const std::shared_ptr<Communicator>& inner,
                             const std::shared_ptr<Watchdog>& watchdog) {
  BMT_CHECK(ValueError, inner != nullptr && watchdog != nullptr, "GuardedCommunicator: expected a ",
            "communicator and a watchdog, got None");
  return *inner;
}

}  // namespace

std::string Guard::describe(const OpRecord& record) const {
  return detail::join(bmtrain::describe(record), " on group \"", recorder->name(), "\", rank ", rank, " of ",
                      size);
}

void Guard::fail(const OpRecord& record, const std::string& error) const {
  // Until there is a verdict the rank counts as being in this operation.
  const std::string verdict = watchdog->explain({"failed", error, recorder->key(), record});
  recorder->end(record.id, OpState::kFailed);
  watchdog->set_heard();
  if (!watchdog->is_void()) {
    throw CommunicationError(describe(record) + ": " + verdict);
  }
}

GuardedCommunicator::GuardedCommunicator(std::shared_ptr<Communicator> inner,
                                         std::shared_ptr<Watchdog> watchdog, std::string key,
                                         std::vector<int> members, bool check)
    : Communicator(required(inner, watchdog).rank(), required(inner, watchdog).size(),
                   required(inner, watchdog).name()),
      inner_(std::move(inner)) {
  BMT_CHECK(ValueError, members.size() == static_cast<std::size_t>(inner_->size()),
            "GuardedCommunicator: expected ", inner_->size(), " members, got ", members.size());
  auto recorder = std::make_shared<FlightRecorder>(std::move(key), inner_->name(), std::move(members));
  const auto abort = [weak = std::weak_ptr<Communicator>(inner_)](const std::string& reason) {
    const auto communicator = weak.lock();
    if (communicator != nullptr) {
      communicator->abort(reason);
    }
    return communicator != nullptr;
  };
  watchdog->watch(abort, recorder);
  guard_ = std::make_shared<Guard>(std::move(recorder), std::move(watchdog), inner_->rank(), inner_->size(),
                                   check);
}

WorkPtr GuardedCommunicator::start(const Call& call) {
  if (call.is_message()) {  // the recorder counts by peer
    check_rank(*this, name_of(call.op), "peer", call.peer);
  }
  FlightRecorder& recorder = *guard_->recorder;
  Watchdog& watchdog = *guard_->watchdog;
  const OpRecord record = recorder.post(record_of(call));
  if (watchdog.condemned()) {
    recorder.end(record.id, OpState::kFailed);
    watchdog.set_heard();
    if (watchdog.is_void()) {
      return std::make_shared<DoneWork>();
    }
    throw CommunicationError(guard_->describe(record) +
                             ": the communicator was aborted: " + watchdog.verdict());
  }
  try {
    if (guard_->check && !inner_->closed()) {
      compare(record);
    }
    race_point();
    return std::make_shared<GuardedWork>(guard_, record, inner_->start(call));
  } catch (const CommunicationError& error) {
    guard_->fail(record, error.what());
    return std::make_shared<DoneWork>();
  } catch (...) {
    recorder.withdraw(record);
    throw;
  }
}

void GuardedCommunicator::compare(const OpRecord& record) {
  const Guard& guard = *guard_;
  const Fingerprint fingerprint{guard.recorder->key(), guard.rank, guard.size, record};
  if (record.is_message()) {
    guard.watchdog->tell(fingerprint);  // a sender does not wait for its receiver's call
    return;
  }
  guard.recorder->start(record.id);
  const bool agreed = guard.watchdog->agree(fingerprint);
  guard.recorder->end(record.id, OpState::kPosted);  // from here on its own wait counts
  if (!agreed) {
    throw CommunicationError("the ranks do not agree");  // the verdict says how
  }
}

std::string GuardedCommunicator::failure() const {
  const std::string verdict = guard_->watchdog->verdict();
  return verdict.empty() ? inner_->failure() : verdict;
}

void GuardedCommunicator::abort(const std::string& reason) {
  guard_->watchdog->report({"aborted", reason, guard_->recorder->key(), std::nullopt});
}

}  // namespace bmtrain
