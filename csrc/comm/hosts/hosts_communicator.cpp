#include "comm/hosts/hosts_communicator.h"

#include <utility>
#include <vector>

#include "common/check.h"

namespace bmtrain {
namespace {

// Slices `first` to `first + count - 1` of a tensor cut into `size` ones: 1-D.
at::Tensor slices_of(const at::Tensor& tensor, int size, int first, int count) {
  const std::int64_t numel = tensor.numel() / size;
  return tensor.view({-1}).narrow(0, first * numel, count * numel);
}

}  // namespace

HostsCommunicator::HostsCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size,
                                     std::string name, double timeout_seconds,
                                     std::shared_ptr<ShmCommunicator> local)
    : GlooCommunicator(std::move(process_group), rank, size, std::move(name), timeout_seconds),
      local_(std::move(local)),
      host_(rank / local_->size()) {
  BMT_CHECK(ValueError, size % local_->size() == 0 && rank % local_->size() == local_->rank(),
            "communicator \"", this->name(), "\": rank ", rank, " of ", size, " cannot be rank ",
            local_->rank(), " of ", local_->size(), " of its host");
}

WorkPtr HostsCommunicator::perform(const Call& call) {
  if (call.is_message()) {
    return is_local(call.peer) ? perform_locally(call) : GlooCommunicator::perform(call);
  }
  if (call.op != Op::kAllGather && call.op != Op::kAllToAll) {
    return GlooCommunicator::perform(call);
  }
  // What stays within the host goes through shared memory, and of a gather also what its other ranks bring
  // in.
  const bool is_gather = call.op == Op::kAllGather;
  const auto is_shared = [this, is_gather](const Piece& piece) {
    return is_local(piece.peer) || (is_gather && piece.peer % local_->size() != local_->rank());
  };
  Exchange exchange = exchange_of(call);
  std::erase_if(exchange.receives, is_shared);
  if (is_gather) {
    const Piece all = exchange.sends.front();
    exchange.sends.clear();
    for (const Piece& receive : exchange.receives) {
      exchange.sends.push_back({all.data, all.bytes, receive.peer});
    }
    exchange.share = [local = local_, to = exchange.to, label = call.label, size = size()] {
      std::vector<WorkPtr> works;
      for (int first = 0; first < size; first += local->size()) {
        works.push_back(local->all_gather(slices_of(to, size, first, local->size()),
                                          slices_of(to, size, first + local->rank(), 1), label));
      }
      return works;
    };
  } else {
    std::erase_if(exchange.sends, is_shared);
    exchange.own = {};
    exchange.share = [local = local_, from = exchange.from, to = exchange.to, label = call.label,
                      size = size(), first = host_ * local_->size()] {
      return std::vector{local->all_to_all(slices_of(to, size, first, local->size()),
                                           slices_of(from, size, first, local->size()), label)};
    };
  }
  return carry_out(std::move(exchange));
}

WorkPtr HostsCommunicator::perform_locally(const Call& call) {
  Call local = call;
  local.peer = call.peer % local_->size();
  return local_->start(local);
}

void HostsCommunicator::abort(const std::string& reason) {
  local_->abort(reason);
  GlooCommunicator::abort(reason);
}

void HostsCommunicator::close() {
  local_->close();
  GlooCommunicator::close();
}

void HostsCommunicator::reset_traffic() {
  local_->reset_traffic();
  GlooCommunicator::reset_traffic();
}

}  // namespace bmtrain
