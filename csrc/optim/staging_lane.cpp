#include "optim/staging_lane.h"

#include <ATen/core/grad_mode.h>

#include "common/check.h"

namespace bmtrain {

StagingLane::StagingLane(c10::Device device, int num_slots)
    : runtime_(device_runtime(device)),
      to_host_(runtime_->make_stream()),
      to_device_(runtime_->make_stream()),
      slots_(static_cast<std::size_t>(num_slots > 0 ? num_slots : 0)) {
  BMT_CHECK(ValueError, num_slots > 0, "num_slots: expected at least 1, got ", num_slots);
}

std::vector<at::Tensor> plain(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> aliases;
  aliases.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    aliases.push_back(tensor.defined() ? tensor.variable_data() : tensor);
  }
  return aliases;
}

StagedTensors plain(const StagedTensors& tensors) {
  return {plain(tensors.on_device), plain(tensors.on_host)};
}

void copy_to_host(const StagedTensors& tensors) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.on_host.size(); ++i) {
    tensors.on_host[i].copy_(tensors.on_device[i], /*non_blocking=*/true);
  }
}

void check_pairs(const StagedTensors& tensors, const char* what) {
  BMT_CHECK(ValueError, tensors.on_device.size() == tensors.on_host.size(), what,
            ": expected host memory for each of ", tensors.on_device.size(), " tensors, got ",
            tensors.on_host.size());
  for (std::size_t i = 0; i < tensors.on_device.size(); ++i) {
    const at::Tensor &device = tensors.on_device[i], &host = tensors.on_host[i];
    BMT_CHECK(ValueError,
              host.is_cpu() && host.numel() == device.numel() && host.scalar_type() == device.scalar_type(),
              what, "[", i, "]: expected ", device.numel(), " elements of ", device.scalar_type(),
              " in host memory, got ", host.numel(), " of ", host.scalar_type(), " on ", host.device());
  }
}

}  // namespace bmtrain
