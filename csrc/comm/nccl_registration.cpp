#include <c10/core/DeviceGuard.h>

#include "comm/nccl_handle.h"
#include "common/check.h"

namespace bmtrain {
namespace {

constexpr std::int64_t kTrial = std::int64_t{1} << 21;  // bytes

}  // namespace

// See [Note: Registered memory].
void NcclLink::register_memory(const NcclOperation& operation, const std::string& what) {
  for (const at::Tensor& tensor : operation.tensors) {
    const auto region = options_.library->regions().find(tensor.const_data_ptr());
    if (region && tensor.nbytes() > 0) {
      check(handle_->registrations.ensure(handle_->comm, *region), what + ": registering its memory");
    }
  }
}

void NcclLink::deregister(void* base) {
  std::shared_future<void> ended;
  {
    const std::unique_lock lock(handle_->mutex);
    if (handle_->comm != nullptr && !has_ended()) {
      handle_->registrations.drop(handle_->comm, base);
      return;
    }
    const std::lock_guard reason_lock(reason_mutex_);
    ended = ended_;
  }
  if (ended.valid()) {  // the registrations end with the communicator
    (void)ended.wait_for(kTakedownLimit);
  }
}

std::string NcclLink::try_registration() {
  if (!options_.library->can_register()) {
    return "NCCL " + nccl_version_text(options_.library->version()) + " has no functions for it";
  }
  const c10::DeviceGuard guard(options_.device);
  try {
    const c10::DataPtr memory = NcclMemory(options_.library, options_.device).allocate(kTrial);
    const std::unique_lock lock(handle_->mutex);
    check_usable("registering memory");
    const nccl::Result result =
        handle_->registrations.ensure(handle_->comm, {memory.get(), static_cast<std::size_t>(kTrial)});
    handle_->registrations.drop(handle_->comm, memory.get());
    return result == nccl::Result::kSuccess ? "" : "registering: " + options_.library->explain(result);
  } catch (const CommunicationError& error) {
    return error.what();
  }
}

}  // namespace bmtrain
