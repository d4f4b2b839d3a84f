#include "comm/single_communicator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "comm/arguments.h"
#include "common/check.h"

namespace bmtrain {
namespace {

void copy_into(const at::Tensor& output, const at::Tensor& input) {
  if (output.data_ptr() != input.data_ptr()) {
    const at::NoGradGuard no_grad;
    output.detach().view(-1).copy_(input.detach().view(-1));
  }
}

}  // namespace

SingleCommunicator::SingleCommunicator(std::string name) : Transport(0, 1, std::move(name)) {}

WorkPtr SingleCommunicator::perform(const Call& call) {
  at::Tensor message;
  {
    const Lock lock(mutex_);
    if (!standing_.is_open()) {
      standing_.refuse(describe(*this, name_of(call.op)));
    }
    if (call.op == Op::kSend) {
      mailbox_.push_back(call.input.detach().clone());
    } else if (call.op == Op::kRecv) {
      message = take_message(call.output);
    }
  }
  if (call.op == Op::kRecv) {
    copy_into(call.output, message);
  } else if (call.input.defined() && call.output.defined()) {
    copy_into(call.output, call.input);
  }
  return std::make_shared<DoneWork>();
}

at::Tensor SingleCommunicator::take_message(const at::Tensor& expected) {
  BMT_CHECK(CommunicationError, !mailbox_.empty(), describe(*this, "recv"),
            ": nothing was sent, and with one rank nobody else ever will");
  at::Tensor message = std::move(mailbox_.front());
  mailbox_.pop_front();
  BMT_CHECK(ValueError,
            message.scalar_type() == expected.scalar_type() && message.numel() == expected.numel(),
            describe(*this, "recv"), ": expected ", expected.numel(), " elements of ", expected.scalar_type(),
            ", got ", message.numel(), " of ", message.scalar_type());
  return message;
}

void SingleCommunicator::abort(const std::string& reason) {
  const Lock lock(mutex_);
  static_cast<void>(standing_.abort(reason));
}

void SingleCommunicator::close() {
  const Lock lock(mutex_);
  standing_ = {.is_closed = true, .reason = {}};  // what was aborted is closed, no less
  mailbox_.clear();
}

bool SingleCommunicator::closed() const {
  const Lock lock(mutex_);
  return standing_.is_closed;
}

}  // namespace bmtrain
