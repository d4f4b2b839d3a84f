#include "comm/single_communicator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "comm/done_work.h"
#include "common/check.h"

namespace bmtrain {

SingleCommunicator::SingleCommunicator(std::string name) : name_(std::move(name)) {}

void SingleCommunicator::begin(const char* op) {
  {
    const std::lock_guard lock(mutex_);
    BMT_CHECK(StateError, !closed_, describe(*this, op), ": the communicator is closed");
    BMT_CHECK(CommunicationError, !aborted_, describe(*this, op),
              ": the communicator was aborted: ", reason_);
  }
  traffic_.add(op, 0);
}

WorkPtr SingleCommunicator::copy(const char* op, const at::Tensor& output, const at::Tensor& input) {
  check_sizes(*this, op, "output", output, "input", input);
  begin(op);
  if (output.data_ptr() != input.data_ptr()) {
    const at::NoGradGuard no_grad;
    output.detach().view(-1).copy_(input.detach().view(-1));
  }
  return std::make_shared<DoneWork>();
}

WorkPtr SingleCommunicator::all_gather(at::Tensor output, at::Tensor input, const std::string& /*label*/) {
  return copy("all_gather", output, input);
}

WorkPtr SingleCommunicator::all_to_all(at::Tensor output, at::Tensor input, const std::string& /*label*/) {
  return copy("all_to_all", output, input);
}

WorkPtr SingleCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                           const std::string& /*label*/) {
  check_tensor(*this, "reduce_scatter", "input", input);
  check_reducible(*this, "reduce_scatter", input, op);
  return copy("reduce_scatter", output, input);
}

WorkPtr SingleCommunicator::all_reduce(at::Tensor tensor, ReduceOp op, const std::string& /*label*/) {
  check_tensor(*this, "all_reduce", "tensor", tensor);
  check_reducible(*this, "all_reduce", tensor, op);
  begin("all_reduce");
  return std::make_shared<DoneWork>();
}

WorkPtr SingleCommunicator::reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& /*label*/) {
  check_tensor(*this, "reduce", "tensor", tensor);
  check_reducible(*this, "reduce", tensor, op);
  check_rank(*this, "reduce", "root", root);
  begin("reduce");
  return std::make_shared<DoneWork>();
}

WorkPtr SingleCommunicator::broadcast(at::Tensor tensor, int root, const std::string& /*label*/) {
  check_tensor(*this, "broadcast", "tensor", tensor);
  check_rank(*this, "broadcast", "root", root);
  begin("broadcast");
  return std::make_shared<DoneWork>();
}

WorkPtr SingleCommunicator::send(at::Tensor tensor, int peer, const std::string& /*label*/) {
  check_tensor(*this, "send", "tensor", tensor);
  check_rank(*this, "send", "peer", peer);
  begin("send");
  const std::lock_guard lock(mutex_);
  mailbox_.push_back(tensor.detach().clone());
  return std::make_shared<DoneWork>();
}

WorkPtr SingleCommunicator::recv(at::Tensor tensor, int peer, const std::string& /*label*/) {
  check_tensor(*this, "recv", "tensor", tensor);
  check_rank(*this, "recv", "peer", peer);
  begin("recv");
  at::Tensor message;
  {
    const std::lock_guard lock(mutex_);
    BMT_CHECK(CommunicationError, !mailbox_.empty(), describe(*this, "recv"),
              ": nothing was sent, and with one rank nobody else ever will");
    message = std::move(mailbox_.front());
    mailbox_.pop_front();
  }
  BMT_CHECK(ValueError, message.scalar_type() == tensor.scalar_type() && message.numel() == tensor.numel(),
            describe(*this, "recv"), ": expected ", tensor.numel(), " elements of ", tensor.scalar_type(),
            ", got ", message.numel(), " of ", message.scalar_type());
  const at::NoGradGuard no_grad;
  tensor.detach().view(-1).copy_(message.view(-1));
  return std::make_shared<DoneWork>();
}

void SingleCommunicator::barrier(const std::string& /*label*/) { begin("barrier"); }

void SingleCommunicator::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!aborted_) {
    aborted_ = true;
    reason_ = reason;
  }
}

void SingleCommunicator::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  mailbox_.clear();
}

bool SingleCommunicator::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

std::vector<std::pair<std::string, Traffic>> SingleCommunicator::traffic() const {
  return traffic_.snapshot();
}

void SingleCommunicator::reset_traffic() { traffic_.reset(); }

}  // namespace bmtrain
