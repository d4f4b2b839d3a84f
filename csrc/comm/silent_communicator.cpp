#include "comm/silent_communicator.h"

#include "comm/host_tensor.h"
#include "common/check.h"

namespace bmtrain {
namespace {

class OwnSlice final : public PeerSlices {
 public:
  void release() override {}
};

const Communicator& required(const std::shared_ptr<Communicator>& replaced) {
  BMT_CHECK(ValueError, replaced != nullptr, "replaced: expected a communicator, got None");
  return *replaced;
}

}  // namespace

SilentCommunicator::SilentCommunicator(const std::shared_ptr<Communicator>& replaced)
    : Transport(required(replaced).rank(), required(replaced).size(), required(replaced).name()),
      replaced_(replaced) {}

WorkPtr SilentCommunicator::perform(const Call& call) {
  if (call.slices != nullptr) {
    const std::int64_t bytes = bytes_of(call.input) / size();
    *call.slices = std::make_shared<OwnSlice>();
    (*call.slices)->by_rank.push_back(data_of(call.input) + rank() * bytes);
  }
  return std::make_shared<DoneWork>();
}

}  // namespace bmtrain
