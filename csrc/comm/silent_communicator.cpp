#include "comm/silent_communicator.h"

#include <memory>
#include <utility>

#include "comm/done_work.h"
#include "comm/host_tensor.h"
#include "common/check.h"

namespace bmtrain {

namespace {

class OwnSlice final : public PeerSlices {
 public:
  void release() override {}
};

}  // namespace

SilentCommunicator::SilentCommunicator(std::shared_ptr<Communicator> replaced)
    : replaced_(std::move(replaced)) {
  BMT_CHECK(ValueError, replaced_ != nullptr, "replaced: expected a communicator, got None");
}

WorkPtr SilentCommunicator::done(const char* op) {
  traffic_.add(op, 0);
  return std::make_shared<DoneWork>();
}

WorkPtr SilentCommunicator::all_gather(at::Tensor output, at::Tensor input, const std::string& /*label*/) {
  check_sizes(*this, "all_gather", "output", output, "input", input);
  return done("all_gather");
}

WorkPtr SilentCommunicator::all_to_all(at::Tensor output, at::Tensor input, const std::string& /*label*/) {
  check_tensor(*this, "all_to_all", "output", output);
  check_tensor(*this, "all_to_all", "input", input);
  return done("all_to_all");
}

WorkPtr SilentCommunicator::all_to_all_in_place(at::Tensor input, std::shared_ptr<PeerSlices>& slices,
                                                const std::string& /*label*/) {
  check_tensor(*this, "all_to_all", "input", input);
  slices = std::make_shared<OwnSlice>();
  const std::int64_t bytes = bytes_of(input) / size();
  slices->by_rank.push_back(data_of(input) + rank() * bytes);
  return done("all_to_all");
}

WorkPtr SilentCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp /*op*/,
                                           const std::string& /*label*/) {
  check_sizes(*this, "reduce_scatter", "input", input, "output", output);
  return done("reduce_scatter");
}

WorkPtr SilentCommunicator::all_reduce(at::Tensor tensor, ReduceOp /*op*/, const std::string& /*label*/) {
  check_tensor(*this, "all_reduce", "tensor", tensor);
  return done("all_reduce");
}

WorkPtr SilentCommunicator::reduce(at::Tensor tensor, ReduceOp /*op*/, int root,
                                   const std::string& /*label*/) {
  check_tensor(*this, "reduce", "tensor", tensor);
  check_rank(*this, "reduce", "root", root);
  return done("reduce");
}

WorkPtr SilentCommunicator::broadcast(at::Tensor tensor, int root, const std::string& /*label*/) {
  check_tensor(*this, "broadcast", "tensor", tensor);
  check_rank(*this, "broadcast", "root", root);
  return done("broadcast");
}

WorkPtr SilentCommunicator::send(at::Tensor tensor, int peer, const std::string& /*label*/) {
  check_tensor(*this, "send", "tensor", tensor);
  check_rank(*this, "send", "peer", peer);
  return done("send");
}

WorkPtr SilentCommunicator::recv(at::Tensor tensor, int peer, const std::string& /*label*/) {
  check_tensor(*this, "recv", "tensor", tensor);
  check_rank(*this, "recv", "peer", peer);
  return done("recv");
}

void SilentCommunicator::barrier(const std::string& /*label*/) { traffic_.add("barrier", 0); }

void SilentCommunicator::abort(const std::string& /*reason*/) {}

void SilentCommunicator::close() {}

std::vector<std::pair<std::string, Traffic>> SilentCommunicator::traffic() const {
  return traffic_.snapshot();
}

void SilentCommunicator::reset_traffic() { traffic_.reset(); }

}  // namespace bmtrain
