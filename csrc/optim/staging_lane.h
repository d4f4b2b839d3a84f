// StagingLane: the way of gradients and parameters between a device and host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/device_runtime.h"
#include "optim/update_queue.h"

namespace bmtrain {

/// The streams and slots of one device, which outlive the updates.
class StagingLane {
 public:
  /// ValueError without slots; StateError if there is no such device.
  StagingLane(c10::Device device, int num_slots);

 private:
  friend class SentGradients;
  friend class SentNumber;
  friend class StagedCopies;
  struct Slot {
    std::shared_ptr<Update> latest;         // that uses its memory
    std::shared_ptr<DeviceEvent> returned;  // when its memory for parameters has been read; may be null
  };

  const std::shared_ptr<DeviceRuntime> runtime_;
  const std::int64_t to_host_, to_device_;
  std::mutex mutex_;  // protects the slots
  std::vector<Slot> slots_;
};

/// Host memory for tensors of a device.
struct StagedTensors {
  std::vector<at::Tensor> on_device, on_host;
};

/// The same memory without the tensors' Python objects, which only a holder of the interpreter may drop, and
/// with version counters of its own.
[[nodiscard]] std::vector<at::Tensor> plain(const std::vector<at::Tensor>& tensors);
[[nodiscard]] StagedTensors plain(const StagedTensors& tensors);

/// Asks the current stream for the copies.
void copy_to_host(const StagedTensors& tensors);

/// ValueError, which says `what`, for lists that do not fit.
void check_pairs(const StagedTensors& tensors, const char* what);

}  // namespace bmtrain
