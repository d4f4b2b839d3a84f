#include "comm/shm/shm_communicator.h"

#include <ATen/ops/zeros.h>

#include <chrono>
#include <mutex>
#include <utility>

#include "comm/host_tensor.h"
#include "comm/ordered_reduce.h"
#include "common/check.h"

namespace bmtrain {
namespace {

constexpr double kLongestSetting = 1e6;  // of longest_wait, in seconds

class ShmWork final : public Work {
 public:
  ShmWork(std::shared_ptr<ShmLink> link, ShmOperationPtr operation, std::function<void()> publish)
      : link_(std::move(link)), operation_(std::move(operation)), publish_(std::move(publish)) {}

  void wait() override {
    link_->await(*operation_);
    const std::lock_guard lock(mutex_);
    if (publish_) {
      std::exchange(publish_, nullptr)();
    }
  }

  [[nodiscard]] bool is_completed() override {
    const bool done = link_->is_done(*operation_);
    const std::lock_guard lock(mutex_);
    return done && !publish_;
  }

 private:
  std::shared_ptr<ShmLink> link_;
  ShmOperationPtr operation_;
  std::mutex mutex_;               // protects publish_
  std::function<void()> publish_;  // to where the caller's device sees it; null when that was done
};

}  // namespace

ShmCommunicator::ShmCommunicator(const std::vector<int>& files, std::vector<int> watches, int rank, int size,
                                 std::string name, double timeout_seconds)
    : link_(std::make_shared<ShmLink>(files, std::move(watches), rank, size, std::move(name),
                                      timeout_seconds)) {}

ShmCommunicator::~ShmCommunicator() { link_->close(); }

double ShmCommunicator::longest_wait() const {
  return std::chrono::duration<double>(link_->longest_wait()).count();
}

void ShmCommunicator::set_longest_wait(double seconds) {
  BMT_CHECK(ValueError, seconds >= 0 && seconds <= kLongestSetting, "longest_wait: expected 0 to ",
            kLongestSetting, " seconds, got ", seconds);
  link_->set_longest_wait(
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds)));
}

ShmOperationPtr ShmCommunicator::begin(const char* op, const std::string& label, std::int64_t bytes,
                                       int detail) const {
  auto operation = std::make_shared<ShmOperation>();
  operation->op = op;
  operation->label = label;
  operation->bytes = bytes;
  operation->fingerprint = fingerprint(op, label, bytes, detail);
  return operation;
}

WorkPtr ShmCommunicator::start(const ShmOperationPtr& operation, Pieces sends, Pieces receives,
                               std::int64_t wire_bytes, std::function<void()> publish) {
  link_->post(operation, std::move(sends), std::move(receives));
  traffic_.add(operation->op, wire_bytes);
  return std::make_shared<ShmWork>(link_, operation, std::move(publish));
}

void ShmCommunicator::copy_slice(char* to, const char* from, std::int64_t bytes) {
  copy_own(to, from, bytes);
  link_->count_copied(to == from ? 0 : bytes);
}

ShmCommunicator::Pieces ShmCommunicator::from_others(const at::Tensor& received, std::int64_t bytes) const {
  Pieces pieces;
  for (int r = 0, slot = 0; r < size(); ++r) {
    if (r != rank()) {
      pieces.push_back({data_of(received) + slot++ * bytes, bytes, r});
    }
  }
  return pieces;
}

WorkPtr ShmCommunicator::all_gather(at::Tensor output, at::Tensor input, const std::string& label) {
  check_sizes(*this, "all_gather", "output", output, "input", input);
  if (const int slot = link_->find_common(output); slot != ShmHeap::kNone) {
    return gather_in_place(output, input, slot, label);
  }
  const std::int64_t bytes = bytes_of(input);
  const at::Tensor from = staged(input);
  const at::Tensor to = staged_empty(output);
  const ShmOperationPtr operation = begin("all_gather", label, bytes, 0);
  operation->tensors = {output, input, from, to};
  Pieces receives;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) {
      receives.push_back({data_of(to) + r * bytes, bytes, r});
    }
  }
  auto work = start(operation, {{data_of(from), bytes}}, std::move(receives), bytes * (size() - 1),
                    publisher(to, output));
  copy_slice(data_of(to) + rank() * bytes, data_of(from), bytes);
  return work;
}

WorkPtr ShmCommunicator::gather_in_place(const at::Tensor& output, const at::Tensor& input, int slot,
                                         const std::string& label) {
  const std::int64_t bytes = bytes_of(input);
  const ShmOperationPtr operation = begin("all_gather", label, bytes, 1 + slot);
  operation->is_common = true;
  operation->tensors = {output, input};
  Pieces receives;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) {
      receives.push_back({nullptr, bytes, r, 0, ShmPlace::kCommon, slot});
    }
  }
  return start(operation, {{data_of(input), bytes, ShmRing::kEverybody, 0, ShmPlace::kCommon, slot}},
               std::move(receives), bytes * (size() - 1));
}

WorkPtr ShmCommunicator::all_to_all_in_place(at::Tensor input, std::shared_ptr<PeerSlices>& slices,
                                             const std::string& label) {
  check_tensor(*this, "all_to_all", "input", input);
  BMT_CHECK(ValueError, input.is_cpu() && input.numel() % size() == 0, bmtrain::describe(*this, "all_to_all"),
            ": expected a tensor in host memory that divides by ", size(), " ranks");
  const std::int64_t bytes = bytes_of(input) / size();
  const ShmOperationPtr operation = begin("all_to_all", label, bytes, 1);
  operation->tensors = {input};
  operation->slices = std::make_shared<ShmPeerSlices>(link_, size());
  operation->slices->by_rank[static_cast<std::size_t>(rank())] = data_of(input) + rank() * bytes;
  slices = operation->slices;
  const int slot = link_->publish_own(input);
  const ShmPlace place = slot == ShmHeap::kNone ? ShmPlace::kPrivate : ShmPlace::kOwn;
  Pieces sends;
  Pieces receives;
  for (int distance = 1; distance < size(); ++distance) {
    const int r = (rank() + distance) % size();
    sends.push_back({data_of(input) + r * bytes, bytes, r, 0, place, slot});
    receives.push_back({nullptr, bytes, r});
  }
  return start(operation, std::move(sends), std::move(receives), bytes * (size() - 1));
}

WorkPtr ShmCommunicator::all_to_all(at::Tensor output, at::Tensor input, const std::string& label) {
  check_exchange(*this, output, input);
  const std::int64_t bytes = bytes_of(input) / size();
  const at::Tensor from = staged(input);
  const at::Tensor to = staged_empty(output);
  const ShmOperationPtr operation = begin("all_to_all", label, bytes, 0);
  operation->tensors = {output, input, from, to};
  Pieces sends;
  Pieces receives;
  for (int distance = 1; distance < size(); ++distance) {
    const int r = (rank() + distance) % size();
    sends.push_back({data_of(from) + r * bytes, bytes, r});
    receives.push_back({data_of(to) + r * bytes, bytes, r});
  }
  auto work =
      start(operation, std::move(sends), std::move(receives), bytes * (size() - 1), publisher(to, output));
  copy_slice(data_of(to) + rank() * bytes, data_of(from) + rank() * bytes, bytes);
  return work;
}

WorkPtr ShmCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                        const std::string& label) {
  check_sizes(*this, "reduce_scatter", "input", input, "output", output);
  check_reducible(*this, "reduce_scatter", input, op);
  const std::int64_t bytes = bytes_of(output);
  const at::Tensor from = staged(input);
  const at::Tensor to = staged_empty(output);
  const at::Tensor received = scratch(bytes * (size() - 1));
  const ShmOperationPtr operation = begin("reduce_scatter", label, bytes, detail_of(input.scalar_type(), op));
  operation->tensors = {output, input, from, to, received};
  const auto inputs = in_rank_order(rank(), size(), data_of(from) + rank() * bytes, received, bytes);
  operation->combine = [inputs, to = data_of(to), numel = to.numel(), dtype = to.scalar_type(), op] {
    ordered_reduce(to, inputs, numel, dtype, op);
  };
  Pieces sends;
  for (int distance = 1; distance < size(); ++distance) {
    const int r = (rank() + distance) % size();
    sends.push_back({data_of(from) + r * bytes, bytes, r});
  }
  return start(operation, std::move(sends), from_others(received, bytes), bytes * (size() - 1),
               publisher(to, output));
}

WorkPtr ShmCommunicator::all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) {
  check_tensor(*this, "all_reduce", "tensor", tensor);
  check_reducible(*this, "all_reduce", tensor, op);
  const at::Tensor host = staged(tensor);
  const ShmOperationPtr operation =
      begin("all_reduce", label, bytes_of(tensor), detail_of(tensor.scalar_type(), op));
  if (operation->bytes <= kSmallAllReduceBytes) {
    return all_reduce_small(operation, host, op, publisher(host, tensor));
  }
  return all_reduce_large(operation, host, op, publisher(host, tensor));
}

WorkPtr ShmCommunicator::all_reduce_small(const ShmOperationPtr& operation, const at::Tensor& tensor,
                                          ReduceOp op, std::function<void()> publish) {
  const std::int64_t bytes = operation->bytes;
  const at::Tensor received = scratch(bytes * (size() - 1));
  operation->tensors = {tensor, received};
  const auto inputs = in_rank_order(rank(), size(), data_of(tensor), received, bytes);
  operation->combine = [inputs, to = data_of(tensor), numel = tensor.numel(), dtype = tensor.scalar_type(),
                        op] { ordered_reduce(to, inputs, numel, dtype, op); };
  return start(operation, {{data_of(tensor), bytes}}, from_others(received, bytes), bytes * (size() - 1),
               std::move(publish));
}

WorkPtr ShmCommunicator::all_reduce_large(const ShmOperationPtr& operation, const at::Tensor& tensor,
                                          ReduceOp op, std::function<void()> publish) {
  const auto element = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t numel = tensor.numel();
  const Slice own = slice_of(numel, size(), rank());
  char* const own_data = data_of(tensor) + own.begin * element;
  const std::int64_t own_bytes = own.numel * element;
  const at::Tensor received = scratch(own_bytes * (size() - 1));
  operation->tensors = {tensor, received};
  const auto inputs = in_rank_order(rank(), size(), own_data, received, own_bytes);
  operation->combine = [inputs, own_data, own, dtype = tensor.scalar_type(), op] {
    ordered_reduce(own_data, inputs, own.numel, dtype, op);
  };
  // Reduce every slice on its own rank, then gather the slices. The second phase writes into a peer's slice
  // only after that peer has got it from here.
  Pieces sends;
  Pieces receives = from_others(received, own_bytes);
  for (int distance = 1; distance < size(); ++distance) {
    const int r = (rank() + distance) % size();
    const Slice slice = slice_of(numel, size(), r);
    char* const data = data_of(tensor) + slice.begin * element;
    sends.push_back({data, slice.numel * element, r, 0});
    receives.push_back({data, slice.numel * element, r, 1});
  }
  sends.push_back({own_data, own_bytes, ShmRing::kEverybody, 1});
  const std::int64_t wire_bytes = numel * element - own_bytes + own_bytes * (size() - 1);
  return start(operation, std::move(sends), std::move(receives), wire_bytes, std::move(publish));
}

WorkPtr ShmCommunicator::reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) {
  check_tensor(*this, "reduce", "tensor", tensor);
  check_reducible(*this, "reduce", tensor, op);
  check_rank(*this, "reduce", "root", root);
  const std::int64_t bytes = bytes_of(tensor);
  const at::Tensor host = staged(tensor);
  const ShmOperationPtr operation = begin("reduce", label, bytes, detail_of(tensor.scalar_type(), op, root));
  operation->tensors = {host};
  if (rank() != root) {
    return start(operation, {{data_of(host), bytes, root}}, {}, bytes);
  }
  const at::Tensor received = scratch(bytes * (size() - 1));
  operation->tensors.push_back(received);
  const auto inputs = in_rank_order(rank(), size(), data_of(host), received, bytes);
  operation->combine = [inputs, to = data_of(host), numel = host.numel(), dtype = host.scalar_type(), op] {
    ordered_reduce(to, inputs, numel, dtype, op);
  };
  return start(operation, {}, from_others(received, bytes), 0, publisher(host, tensor));
}

WorkPtr ShmCommunicator::broadcast(at::Tensor tensor, int root, const std::string& label) {
  check_tensor(*this, "broadcast", "tensor", tensor);
  check_rank(*this, "broadcast", "root", root);
  const std::int64_t bytes = bytes_of(tensor);
  const ShmOperationPtr operation = begin("broadcast", label, bytes, root);
  const at::Tensor host = rank() == root ? staged(tensor) : staged_empty(tensor);
  operation->tensors = {tensor, host};
  if (rank() == root) {
    return start(operation, {{data_of(host), bytes}}, {}, bytes * (size() - 1));
  }
  return start(operation, {}, {{data_of(host), bytes, root}}, 0, publisher(host, tensor));
}

WorkPtr ShmCommunicator::send(at::Tensor tensor, int peer, const std::string& label) {
  check_tensor(*this, "send", "tensor", tensor);
  check_rank(*this, "send", "peer", peer);
  BMT_CHECK(ValueError, peer != rank(), bmtrain::describe(*this, "send"), ": peer must be another rank");
  const std::int64_t bytes = bytes_of(tensor);
  const at::Tensor host = staged(tensor);
  const ShmOperationPtr operation = begin("send", label, bytes, 0);
  operation->fingerprint = fingerprint("message", "", bytes, 0);
  operation->message_peer = peer;
  operation->tensors = {host};
  return start(operation, {{data_of(host), bytes, peer}}, {}, bytes);
}

WorkPtr ShmCommunicator::recv(at::Tensor tensor, int peer, const std::string& label) {
  check_tensor(*this, "recv", "tensor", tensor);
  check_rank(*this, "recv", "peer", peer);
  BMT_CHECK(ValueError, peer != rank(), bmtrain::describe(*this, "recv"), ": peer must be another rank");
  const std::int64_t bytes = bytes_of(tensor);
  const at::Tensor host = staged_empty(tensor);
  const ShmOperationPtr operation = begin("recv", label, bytes, 0);
  operation->fingerprint = fingerprint("message", "", bytes, 0);
  operation->message_peer = peer;
  operation->tensors = {tensor, host};
  return start(operation, {}, {{data_of(host), bytes, peer}}, 0, publisher(host, tensor));
}

void ShmCommunicator::barrier(const std::string& label) {
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kByte));
  const at::Tensor received = scratch(size() - 1);
  const ShmOperationPtr operation = begin("barrier", label, 1, 0);
  operation->tensors = {token, received};
  start(operation, {{data_of(token), 1}}, from_others(received, 1), size() - 1)->wait();
}

}  // namespace bmtrain
