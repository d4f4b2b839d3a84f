#include "comm/hosts/hosts_communicator.h"

#include <utility>

#include "comm/gloo/gloo_work.h"
#include "comm/host_tensor.h"
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

HostsCommunicator::~HostsCommunicator() { local_->close(); }

WorkPtr HostsCommunicator::finish(const GlooOperation& operation, GlooTransfers transfers,
                                  std::function<std::vector<WorkPtr>()> share, std::function<void()> publish,
                                  std::vector<at::Tensor> tensors) {
  GlooStep step;
  step.transfers = std::move(transfers);
  step.then = [share = std::move(share), publish = std::move(publish)] {
    GlooStep shared;
    shared.then = [works = share(), publish] {
      for (const WorkPtr& work : works) {
        work->wait();
      }
      publish();
      return GlooStep{};
    };
    return shared;
  };
  auto work = std::make_shared<GlooWork>(link_, operation, std::move(step), std::move(tensors));
  link_->add_two_step(operation.sequence, work);
  return work;
}

WorkPtr HostsCommunicator::all_gather(at::Tensor output, at::Tensor input, const std::string& label) {
  check_sizes(*this, "all_gather", "output", output, "input", input);
  const std::int64_t bytes = bytes_of(input);
  const GlooOperation operation = link_->begin("all_gather", label, bytes, 0);
  const at::Tensor from = staged(input);
  const at::Tensor to = staged_empty(output);
  const int num_local = local_->size();
  GlooTransfers transfers;
  for (int distance = num_local; distance < size(); distance += num_local) {
    const int r = (rank() + distance) % size();
    link_->post_recv(operation, data_of(to) + r * bytes, bytes, r, transfers);
    link_->post_send(operation, data_of(from), bytes, r, transfers);
  }
  copy_own(data_of(to) + rank() * bytes, data_of(from), bytes);
  const auto share = [local = local_, to, label, size = size()] {
    std::vector<WorkPtr> works;
    for (int first = 0; first < size; first += local->size()) {
      works.push_back(local->all_gather(slices_of(to, size, first, local->size()),
                                        slices_of(to, size, first + local->rank(), 1), label));
    }
    return works;
  };
  traffic_.add("all_gather", bytes * (size() - 1));
  return finish(operation, std::move(transfers), share, publisher(to, output), {output, input, from, to});
}

WorkPtr HostsCommunicator::all_to_all(at::Tensor output, at::Tensor input, const std::string& label) {
  Exchange exchange = post_exchange(output, input, label, [this](int r) { return !is_local(r); });
  const at::Tensor &from = exchange.from, &to = exchange.to;
  const auto share = [local = local_, from, to, label, size = size(), first = host_ * local_->size()] {
    return std::vector{local->all_to_all(slices_of(to, size, first, local->size()),
                                         slices_of(from, size, first, local->size()), label)};
  };
  return finish(exchange.operation, std::move(exchange.transfers), share, publisher(to, output),
                {output, input, from, to});
}

WorkPtr HostsCommunicator::send(at::Tensor tensor, int peer, const std::string& label) {
  if (peer == rank() || peer < 0 || peer >= size() || !is_local(peer)) {
    return GlooCommunicator::send(std::move(tensor), peer, label);
  }
  check_tensor(*this, "send", "tensor", tensor);
  const std::int64_t bytes = bytes_of(tensor);
  WorkPtr work = local_->send(std::move(tensor), peer % local_->size(), label);
  traffic_.add("send", bytes);
  return work;
}

WorkPtr HostsCommunicator::recv(at::Tensor tensor, int peer, const std::string& label) {
  if (peer == rank() || peer < 0 || peer >= size() || !is_local(peer)) {
    return GlooCommunicator::recv(std::move(tensor), peer, label);
  }
  check_tensor(*this, "recv", "tensor", tensor);
  WorkPtr work = local_->recv(std::move(tensor), peer % local_->size(), label);
  traffic_.add("recv", 0);
  return work;
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
