#include "comm/guard/guarded_communicator.h"

#include <atomic>
#include <exception>
#include <utility>

#include "comm/arguments.h"
#include "common/check.h"
#include "common/race_point.h"

namespace bmtrain {
namespace {

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kProd:
      return "prod";
  }
  return "unknown";
}

OpRecord record_of(const char* op, const at::Tensor& tensor, const std::string& label,
                   std::string detail = "") {
  OpRecord record;
  record.op = op;
  record.label = label;
  record.detail = std::move(detail);
  if (tensor.defined()) {  // the transport refuses None
    record.dtype = c10::toString(tensor.scalar_type());
    record.numel = tensor.numel();
  }
  return record;
}

class GuardedWork final : public Work {
 public:
  GuardedWork(std::shared_ptr<Guard> guard, OpRecord record, WorkPtr inner)
      : guard_(std::move(guard)), record_(std::move(record)), inner_(std::move(inner)) {}

  void wait() override {
    if (ended_.load(std::memory_order_acquire)) {
      inner_->wait();  // repeats its result
      return;
    }
    FlightRecorder& recorder = *guard_->recorder;
    recorder.start(record_.id);
    bool over = false;
    race_point();
    try {
      inner_->wait();
      over = inner_->is_completed();
    } catch (const CommunicationError& error) {
      guard_->fail(record_, error.what());
    } catch (...) {
      recorder.end(record_.id, OpState::kFailed);
      throw;
    }
    if (over) {
      recorder.end(record_.id, OpState::kDone);
    } else {
      // Gone: nobody asks for its result any more.
      recorder.follow(record_.id, [weak = std::weak_ptr<Work>(inner_)] {
        const auto work = weak.lock();
        return work == nullptr || work->is_completed();
      });
    }
    ended_.store(true, std::memory_order_release);
  }

  [[nodiscard]] bool is_completed() override { return inner_->is_completed(); }

 private:
  const std::shared_ptr<Guard> guard_;
  const OpRecord record_;
  const WorkPtr inner_;
  std::atomic<bool> ended_ = false;
};

// What transports do in one blocking call, as a Work: so that the wait is recorded as one.
class BarrierWork final : public Work {
 public:
  BarrierWork(Communicator& comm, std::string label) : comm_(comm), label_(std::move(label)) {}

  void wait() override {
    if (!done_) {
      comm_.barrier(label_);
      done_ = true;
    }
  }
  [[nodiscard]] bool is_completed() override { return done_; }

 private:
  Communicator& comm_;
  const std::string label_;
  bool done_ = false;
};

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
  throw CommunicationError(describe(record) + ": " + verdict);
}

GuardedCommunicator::GuardedCommunicator(std::shared_ptr<Communicator> inner,
                                         std::shared_ptr<Watchdog> watchdog, std::string key,
                                         std::vector<int> members, bool check)
    : inner_(std::move(inner)) {
  BMT_CHECK(ValueError, inner_ != nullptr && watchdog != nullptr, "GuardedCommunicator: expected a ",
            "communicator and a watchdog, got None");
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

WorkPtr GuardedCommunicator::run(OpRecord record, const std::function<WorkPtr()>& post) {
  FlightRecorder& recorder = *guard_->recorder;
  Watchdog& watchdog = *guard_->watchdog;
  record = recorder.post(std::move(record));
  if (watchdog.condemned()) {
    recorder.end(record.id, OpState::kFailed);
    watchdog.set_heard();
    throw CommunicationError(guard_->describe(record) +
                             ": the communicator was aborted: " + watchdog.verdict());
  }
  try {
    if (guard_->check && !inner_->closed()) {
      compare(record);
    }
    race_point();
    return std::make_shared<GuardedWork>(guard_, record, post());
  } catch (const CommunicationError& error) {
    guard_->fail(record, error.what());
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

WorkPtr GuardedCommunicator::all_gather(at::Tensor output, at::Tensor input, const std::string& label) {
  return run(record_of("all_gather", input, label), [&] { return inner_->all_gather(output, input, label); });
}

WorkPtr GuardedCommunicator::all_to_all(at::Tensor output, at::Tensor input, const std::string& label) {
  return run(record_of("all_to_all", input, label), [&] { return inner_->all_to_all(output, input, label); });
}

WorkPtr GuardedCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                            const std::string& label) {
  return run(record_of("reduce_scatter", input, label, to_string(op)),
             [&] { return inner_->reduce_scatter(output, input, op, label); });
}

WorkPtr GuardedCommunicator::ring_reduce_scatter(at::Tensor output, at::Tensor input,
                                                 const std::string& label) {
  return run(record_of("reduce_scatter", input, label, to_string(ReduceOp::kSum)),
             [&] { return inner_->ring_reduce_scatter(output, input, label); });
}

WorkPtr GuardedCommunicator::all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) {
  return run(record_of("all_reduce", tensor, label, to_string(op)),
             [&] { return inner_->all_reduce(tensor, op, label); });
}

WorkPtr GuardedCommunicator::reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) {
  return run(record_of("reduce", tensor, label, detail::join(to_string(op), " to root ", root)),
             [&] { return inner_->reduce(tensor, op, root, label); });
}

WorkPtr GuardedCommunicator::all_to_all_in_place(at::Tensor input, std::shared_ptr<PeerSlices>& slices,
                                                 const std::string& label) {
  return run(record_of("all_to_all", input, label),
             [&] { return inner_->all_to_all_in_place(input, slices, label); });
}

WorkPtr GuardedCommunicator::broadcast(at::Tensor tensor, int root, const std::string& label) {
  return run(record_of("broadcast", tensor, label, detail::join("root ", root)),
             [&] { return inner_->broadcast(tensor, root, label); });
}

WorkPtr GuardedCommunicator::send(at::Tensor tensor, int peer, const std::string& label) {
  check_rank(*this, "send", "peer", peer);
  OpRecord record = record_of("send", tensor, label);
  record.peer = peer;
  return run(std::move(record), [&] { return inner_->send(tensor, peer, label); });
}

WorkPtr GuardedCommunicator::recv(at::Tensor tensor, int peer, const std::string& label) {
  check_rank(*this, "recv", "peer", peer);
  OpRecord record = record_of("recv", tensor, label);
  record.peer = peer;
  return run(std::move(record), [&] { return inner_->recv(tensor, peer, label); });
}

void GuardedCommunicator::barrier(const std::string& label) {
  run(record_of("barrier", at::Tensor(), label), [&] {
    return std::make_shared<BarrierWork>(*inner_, label);
  })->wait();
}

std::string GuardedCommunicator::failure() const {
  const std::string verdict = guard_->watchdog->verdict();
  return verdict.empty() ? inner_->failure() : verdict;
}

void GuardedCommunicator::abort(const std::string& reason) {
  guard_->watchdog->report({"aborted", reason, guard_->recorder->key(), std::nullopt});
}

}  // namespace bmtrain
