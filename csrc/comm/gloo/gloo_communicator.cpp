#include "comm/gloo/gloo_communicator.h"

#include <ATen/ATen.h>

#include <utility>

#include "comm/gloo/gloo_work.h"
#include "comm/host_tensor.h"
#include "comm/ordered_reduce.h"
#include "common/check.h"

namespace bmtrain {
namespace {

// What ends an operation: `last` on the caller's thread, then nothing.
std::function<GlooStep()> finally(std::function<void()> last) {
  return [last = std::move(last)] {
    last();
    return GlooStep{};
  };
}

// The receives that fill `received` as in_rank_order reads it.
void post_recv_others(GlooLink& link, const GlooOperation& operation, const at::Tensor& received,
                      std::int64_t bytes, GlooTransfers& transfers) {
  for (int r = 0, slot = 0; r < link.size(); ++r) {
    if (r != link.rank()) {
      link.post_recv(operation, data_of(received) + slot++ * bytes, bytes, r, transfers);
    }
  }
}

// Peers in the order rank + 1, rank + 2, ...: so that not all ranks send to the same one first.
template <typename F>
void for_each_peer(const GlooLink& link, F&& visit) {
  for (int distance = 1; distance < link.size(); ++distance) {
    visit((link.rank() + distance) % link.size());
  }
}

}  // namespace

GlooCommunicator::GlooCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size,
                                   std::string name, double timeout_seconds)
    : link_(std::make_shared<GlooLink>(std::move(process_group), rank, size, std::move(name),
                                       timeout_seconds)) {}

GlooCommunicator::~GlooCommunicator() { link_->close(); }

WorkPtr GlooCommunicator::all_gather(at::Tensor output, at::Tensor input, const std::string& label) {
  check_sizes(*this, "all_gather", "output", output, "input", input);
  const std::int64_t bytes = bytes_of(input);
  const GlooOperation operation = link_->begin("all_gather", label, bytes, 0);
  const at::Tensor from = staged(input);
  const at::Tensor to = staged_empty(output);
  GlooStep step;
  for_each_peer(*link_, [&](int r) {
    link_->post_recv(operation, data_of(to) + r * bytes, bytes, r, step.transfers);
    link_->post_send(operation, data_of(from), bytes, r, step.transfers);
  });
  copy_own(data_of(to) + rank() * bytes, data_of(from), bytes);
  step.then = finally(publisher(to, output));
  traffic_.add("all_gather", bytes * (size() - 1));
  return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{output, input, from, to});
}

GlooCommunicator::Exchange GlooCommunicator::post_exchange(const at::Tensor& output, const at::Tensor& input,
                                                           const std::string& label,
                                                           const std::function<bool(int)>& with) {
  check_exchange(*this, output, input);
  const std::int64_t bytes = bytes_of(input) / size();
  Exchange exchange{link_->begin("all_to_all", label, bytes, 0), staged(input), staged_empty(output), {}};
  for_each_peer(*link_, [&](int r) {
    if (with(r)) {
      link_->post_recv(exchange.operation, data_of(exchange.to) + r * bytes, bytes, r, exchange.transfers);
      link_->post_send(exchange.operation, data_of(exchange.from) + r * bytes, bytes, r, exchange.transfers);
    }
  });
  traffic_.add("all_to_all", bytes * (size() - 1));
  return exchange;
}

WorkPtr GlooCommunicator::all_to_all(at::Tensor output, at::Tensor input, const std::string& label) {
  Exchange exchange = post_exchange(output, input, label, [](int) { return true; });
  const std::int64_t own = rank() * exchange.operation.bytes;
  copy_own(data_of(exchange.to) + own, data_of(exchange.from) + own, exchange.operation.bytes);
  GlooStep step;
  step.transfers = std::move(exchange.transfers);
  step.then = finally(publisher(exchange.to, output));
  return std::make_shared<GlooWork>(link_, exchange.operation, std::move(step),
                                    std::vector{output, input, exchange.from, exchange.to});
}

WorkPtr GlooCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                         const std::string& label) {
  check_sizes(*this, "reduce_scatter", "input", input, "output", output);
  check_reducible(*this, "reduce_scatter", input, op);
  const std::int64_t bytes = bytes_of(output);
  const GlooOperation operation =
      link_->begin("reduce_scatter", label, bytes, detail_of(input.scalar_type(), op));
  const at::Tensor from = staged(input);
  const at::Tensor to = staged_empty(output);
  const at::Tensor received = scratch(bytes * (size() - 1));
  GlooStep step;
  post_recv_others(*link_, operation, received, bytes, step.transfers);
  for_each_peer(*link_, [&](int r) {
    link_->post_send(operation, data_of(from) + r * bytes, bytes, r, step.transfers);
  });
  step.then = finally([=, rank = rank(), size = size(), publish = publisher(to, output)] {
    const auto inputs = in_rank_order(rank, size, data_of(from) + rank * bytes, received, bytes);
    ordered_reduce(data_of(to), inputs, to.numel(), to.scalar_type(), op);
    publish();
  });
  traffic_.add("reduce_scatter", bytes * (size() - 1));
  return std::make_shared<GlooWork>(link_, operation, std::move(step),
                                    std::vector{output, input, from, received});
}

WorkPtr GlooCommunicator::all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) {
  check_tensor(*this, "all_reduce", "tensor", tensor);
  check_reducible(*this, "all_reduce", tensor, op);
  const std::int64_t bytes = bytes_of(tensor);
  const GlooOperation operation =
      link_->begin("all_reduce", label, bytes, detail_of(tensor.scalar_type(), op));
  const at::Tensor host = staged(tensor);
  if (bytes <= kSmallAllReduceBytes) {
    return all_reduce_small(host, op, operation, publisher(host, tensor));
  }
  return all_reduce_large(host, op, operation, publisher(host, tensor));
}

WorkPtr GlooCommunicator::all_reduce_small(const at::Tensor& tensor, ReduceOp op,
                                           const GlooOperation& operation, std::function<void()> publish) {
  const std::int64_t bytes = operation.bytes;
  const at::Tensor received = scratch(bytes * (size() - 1));
  GlooStep step;
  post_recv_others(*link_, operation, received, bytes, step.transfers);
  for_each_peer(*link_,
                [&](int r) { link_->post_send(operation, data_of(tensor), bytes, r, step.transfers); });
  step.then = finally([=, rank = rank(), size = size()] {
    const auto inputs = in_rank_order(rank, size, data_of(tensor), received, bytes);
    ordered_reduce(data_of(tensor), inputs, tensor.numel(), tensor.scalar_type(), op);
    publish();
  });
  traffic_.add("all_reduce", bytes * (size() - 1));
  return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{tensor, received});
}

WorkPtr GlooCommunicator::all_reduce_large(const at::Tensor& tensor, ReduceOp op,
                                           const GlooOperation& operation, std::function<void()> publish) {
  const std::int64_t element = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t numel = tensor.numel();
  const Slice own = slice_of(numel, size(), rank());
  char* const own_data = data_of(tensor) + own.begin * element;
  const std::int64_t own_bytes = own.numel * element;
  const at::Tensor received = scratch(own_bytes * (size() - 1));
  // Reduce every slice on its own rank ...
  GlooStep step;
  post_recv_others(*link_, operation, received, own_bytes, step.transfers);
  for_each_peer(*link_, [&](int r) {
    const Slice slice = slice_of(numel, size(), r);
    link_->post_send(operation, data_of(tensor) + slice.begin * element, slice.numel * element, r,
                     step.transfers);
  });
  // ... then gather the slices. Messages with one tag keep their order, so both steps share it.
  step.then = [=, link = link_, publish = std::move(publish)] {
    const auto inputs = in_rank_order(link->rank(), link->size(), own_data, received, own_bytes);
    ordered_reduce(own_data, inputs, own.numel, tensor.scalar_type(), op);
    GlooStep gather;
    for_each_peer(*link, [&](int r) {
      const Slice slice = slice_of(numel, link->size(), r);
      link->post_recv(operation, data_of(tensor) + slice.begin * element, slice.numel * element, r,
                      gather.transfers);
      link->post_send(operation, own_data, own_bytes, r, gather.transfers);
    });
    gather.then = finally(publish);
    return gather;
  };
  traffic_.add("all_reduce", numel * element - own_bytes + own_bytes * (size() - 1));
  auto work = std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{tensor, received});
  link_->add_two_step(operation.sequence, work);
  return work;
}

WorkPtr GlooCommunicator::reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) {
  check_tensor(*this, "reduce", "tensor", tensor);
  check_reducible(*this, "reduce", tensor, op);
  check_rank(*this, "reduce", "root", root);
  const std::int64_t bytes = bytes_of(tensor);
  const GlooOperation operation =
      link_->begin("reduce", label, bytes, detail_of(tensor.scalar_type(), op, root));
  const at::Tensor host = staged(tensor);
  GlooStep step;
  if (rank() != root) {
    link_->post_send(operation, data_of(host), bytes, root, step.transfers);
    traffic_.add("reduce", bytes);
    return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{host});
  }
  const at::Tensor received = scratch(bytes * (size() - 1));
  post_recv_others(*link_, operation, received, bytes, step.transfers);
  step.then = finally([=, rank = rank(), size = size(), publish = publisher(host, tensor)] {
    const auto inputs = in_rank_order(rank, size, data_of(host), received, bytes);
    ordered_reduce(data_of(host), inputs, host.numel(), host.scalar_type(), op);
    publish();
  });
  traffic_.add("reduce", 0);
  return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{host, received});
}

WorkPtr GlooCommunicator::broadcast(at::Tensor tensor, int root, const std::string& label) {
  check_tensor(*this, "broadcast", "tensor", tensor);
  check_rank(*this, "broadcast", "root", root);
  const std::int64_t bytes = bytes_of(tensor);
  const GlooOperation operation = link_->begin("broadcast", label, bytes, root);
  GlooStep step;
  if (rank() == root) {
    const at::Tensor host = staged(tensor);
    for_each_peer(*link_,
                  [&](int r) { link_->post_send(operation, data_of(host), bytes, r, step.transfers); });
    traffic_.add("broadcast", bytes * (size() - 1));
    return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{host});
  }
  const at::Tensor host = staged_empty(tensor);
  link_->post_recv(operation, data_of(host), bytes, root, step.transfers);
  step.then = finally(publisher(host, tensor));
  traffic_.add("broadcast", 0);
  return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{tensor, host});
}

WorkPtr GlooCommunicator::send(at::Tensor tensor, int peer, const std::string& label) {
  check_tensor(*this, "send", "tensor", tensor);
  check_rank(*this, "send", "peer", peer);
  BMT_CHECK(ValueError, peer != rank(), bmtrain::describe(*this, "send"), ": peer must be another rank");
  const std::int64_t bytes = bytes_of(tensor);
  const GlooOperation operation = link_->begin_message(true, peer, label, bytes);
  const at::Tensor host = staged(tensor);
  GlooStep step;
  link_->post_send(operation, data_of(host), bytes, peer, step.transfers);
  traffic_.add("send", bytes);
  return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{host});
}

WorkPtr GlooCommunicator::recv(at::Tensor tensor, int peer, const std::string& label) {
  check_tensor(*this, "recv", "tensor", tensor);
  check_rank(*this, "recv", "peer", peer);
  BMT_CHECK(ValueError, peer != rank(), bmtrain::describe(*this, "recv"), ": peer must be another rank");
  const std::int64_t bytes = bytes_of(tensor);
  const GlooOperation operation = link_->begin_message(false, peer, label, bytes);
  const at::Tensor host = staged_empty(tensor);
  GlooStep step;
  link_->post_recv(operation, data_of(host), bytes, peer, step.transfers);
  step.then = finally(publisher(host, tensor));
  traffic_.add("recv", 0);
  return std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{tensor, host});
}

void GlooCommunicator::barrier(const std::string& label) {
  const GlooOperation operation = link_->begin("barrier", label, 1, 0);
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kByte));
  const at::Tensor received = scratch(size() - 1);
  GlooStep step;
  post_recv_others(*link_, operation, received, 1, step.transfers);
  for_each_peer(*link_, [&](int r) { link_->post_send(operation, data_of(token), 1, r, step.transfers); });
  traffic_.add("barrier", size() - 1);
  std::make_shared<GlooWork>(link_, operation, std::move(step), std::vector{token, received})->wait();
}

void GlooCommunicator::abort(const std::string& reason) { link_->abort(reason); }

void GlooCommunicator::close() { link_->close(); }

bool GlooCommunicator::closed() const { return link_->closed(); }

std::vector<std::pair<std::string, Traffic>> GlooCommunicator::traffic() const { return traffic_.snapshot(); }

void GlooCommunicator::reset_traffic() { traffic_.reset(); }

}  // namespace bmtrain
