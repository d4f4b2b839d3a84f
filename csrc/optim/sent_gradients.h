// SentGradients: gradients that go to the host inside backward, before there is an update to use them.
//
// [Note: Gradients sent ahead]
// When the gradients of a block are complete, they can start on their way to the host; the update that step()
// posts finds them there. Nothing but time may depend on it, so:
// - The copy is of what the caller's stream had queued when it was made. Whoever changes gradients on the
//   device afterwards has made it useless, and it is dropped. Python finds out (optim/_ahead.py).
// - But for one change, that of clipping: gradients are multiplied on the device, by a number that the device
//   has computed. The number goes to the host too, and whoever computes the update multiplies its gradients
//   by it first, chunk by chunk, with the same bits. The device must not multiply before it has copied.
// - Memory that a copy reads is held until an update that uses the copy is over, or the caller's stream has
//   waited for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "optim/staging_lane.h"

namespace bmtrain {

/// One number of the device on its way to the host.
class SentNumber {
 public:
  /// Copies what the caller's stream computes in `number`. ValueError unless both are one fp64 number.
  SentNumber(const std::shared_ptr<StagingLane>& lane, const at::Tensor& number, const at::Tensor& on_host);
  /// Blocks until it is there.
  [[nodiscard]] double value();

 private:
  const std::shared_ptr<const StagedTensors> number_;
  std::shared_ptr<DeviceEvent> arrived_;
};

class SentGradients {
 public:
  /// Starts copies of what the caller's stream has queued. ValueError for lists that do not fit.
  SentGradients(std::shared_ptr<StagingLane> lane, const StagedTensors& gradients);

  /// What the caller's stream multiplies them by next, after those before. It waits until they are copied.
  void scale(std::shared_ptr<SentNumber> factor);
  /// The copies will not be used: memory of the device is referred to no more, and what the caller's stream
  /// does to it next comes after them.
  void drop();

  [[nodiscard]] std::shared_ptr<DeviceEvent> arrived() const { return arrived_; }
  /// Blocks until all numbers of scale() are there.
  [[nodiscard]] std::vector<double> factors() const;

 private:
  const std::shared_ptr<StagingLane> lane_;
  std::shared_ptr<const StagedTensors> gradients_;
  std::shared_ptr<DeviceEvent> arrived_;
  std::vector<std::shared_ptr<SentNumber>> factors_;
};

}  // namespace bmtrain
