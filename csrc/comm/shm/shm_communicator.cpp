#include "comm/shm/shm_communicator.h"

#include <chrono>
#include <utility>

#include "comm/arguments.h"
#include "comm/host_tensor.h"
#include "common/check.h"
#include "common/tensor_dtype.h"
#include "common/thread_annotations.h"
#include "cpu/kernels.h"

namespace bmtrain {
namespace {

constexpr double kLongestSetting = 1e6;  // of longest_wait, in seconds

class ShmWork final : public Work {
 public:
  ShmWork(std::shared_ptr<ShmLink> link, ShmOperationPtr operation)
      : link_(std::move(link)),
        operation_(std::move(operation)),
        publish_(std::move(operation_->publish)),
        is_published_(publish_ == nullptr) {}

  void wait() override BMT_EXCLUDES(mutex_) {
    link_->await(*operation_);
    const Lock lock(mutex_);
    if (!std::exchange(is_published_, true)) {
      std::exchange(publish_, nullptr)();
    }
  }

  [[nodiscard]] bool is_completed() override BMT_EXCLUDES(mutex_) {
    const bool is_done = link_->is_done(*operation_);
    const Lock lock(mutex_);
    return is_done && is_published_;
  }

 private:
  const std::shared_ptr<ShmLink> link_;
  const ShmOperationPtr operation_;
  Mutex mutex_;
  std::function<void()> publish_ BMT_GUARDED_BY(mutex_);
  bool is_published_ BMT_GUARDED_BY(mutex_);
};

}  // namespace

ShmCommunicator::ShmCommunicator(const std::vector<int>& files, std::vector<int> watches, int rank, int size,
                                 std::string name, double timeout_seconds)
    : ExchangeCommunicator(rank, size, name),
      link_(std::make_shared<ShmLink>(files, std::move(watches), rank, size, std::move(name),
                                      timeout_seconds)) {}

double ShmCommunicator::longest_wait() const {
  return std::chrono::duration<double>(link_->longest_wait()).count();
}

void ShmCommunicator::set_longest_wait(double seconds) {
  BMT_CHECK(ValueError, seconds >= 0 && seconds <= kLongestSetting, "longest_wait: expected 0 to ",
            kLongestSetting, " seconds, got ", seconds);
  link_->set_longest_wait(
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds)));
}

void ShmCommunicator::reset_traffic() {
  Transport::reset_traffic();
  link_->reset_copied();
}

WorkPtr ShmCommunicator::perform(const Call& call) {
  if (call.op == Op::kAllToAllInPlace) {
    return exchange_in_place(call);
  }
  return call.op == Op::kAllGatherInPlace ? gather_in_place(call) : ExchangeCommunicator::perform(call);
}

WorkPtr ShmCommunicator::submit(Exchange exchange) {
  const auto operation = std::make_shared<ShmOperation>();
  static_cast<Exchange&>(*operation) = std::move(exchange);
  return post(operation);
}

WorkPtr ShmCommunicator::post(const ShmOperationPtr& operation) {
  link_->post(operation);
  return std::make_shared<ShmWork>(link_, operation);
}

WorkPtr ShmCommunicator::gather_in_place(const Call& call) {
  const int slot = link_->find_common(call.output);
  BMT_CHECK(ValueError, slot != ShmHeap::kNone, describe(*this, name_of(call.op)),
            ": expected an output that was borrowed for it");
  const auto operation = std::make_shared<ShmOperation>();
  static_cast<Exchange&>(*operation) = begin(call, bytes_of(call.output) / size(), 1 + slot);
  operation->place = ShmPlace::kCommon;
  operation->slot = slot;
  operation->kept = {call.output, call.input};
  operation->sends = {{data_of(call.input), operation->bytes}};
  if (call.input.scalar_type() != call.output.scalar_type()) {
    operation->write = [from = dtype_of(call.input.scalar_type(), "input"),
                        to = dtype_of(call.output.scalar_type(), "output"),
                        numel = call.input.numel()](char* slice, const void* data) {
      cpu::ordered_sum(slice, &data, 1, numel, to, from, /*accumulate=*/false, 1);
    };
  }
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) operation->receives.push_back({nullptr, operation->bytes, r});
  }
  return post(operation);
}

WorkPtr ShmCommunicator::exchange_in_place(const Call& call) {
  const at::Tensor& input = call.input;
  const auto operation = std::make_shared<ShmOperation>();
  static_cast<Exchange&>(*operation) = begin(call, bytes_of(input) / size(), 1);
  const std::int64_t bytes = operation->bytes;
  operation->slot = link_->publish_own(input);
  operation->place = operation->slot == ShmHeap::kNone ? ShmPlace::kPrivate : ShmPlace::kOwn;
  operation->kept = {input};
  operation->slices = std::make_shared<ShmPeerSlices>(link_, size());
  operation->slices->by_rank[static_cast<std::size_t>(rank())] = data_of(input) + rank() * bytes;
  *call.slices = operation->slices;
  for (int distance = 1; distance < size(); ++distance) {
    const int r = (rank() + distance) % size();
    operation->sends.push_back({data_of(input) + r * bytes, bytes, r});
    operation->receives.push_back({nullptr, bytes, r});
  }
  return post(operation);
}

}  // namespace bmtrain
