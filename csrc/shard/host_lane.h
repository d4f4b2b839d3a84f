// HostLane: the way of parameters and gradients between a device and shards in memory of the host.
//
// [Note: Shards on the host]
// A buffer on a device may have its shard and its gradient shard in page-locked memory of the host. Then the
// parameters are tensors of the host, and all that reads or changes them works as on CPU ranks: optimizers,
// norms, checkpoints. Two places know of it. A gather copies the shard to its place in the gathered buffer,
// on one stream; the ranks gather in place, and a single rank is done. A reduction is summed on the device,
// and its result copied to the host, on another stream: the directions of a bus are independent.
//
// The host writes to memory of its own without a stream. So it waits where others may see the memory: for the
// copy of the shard when the parameters become shards again, by when the copy has long been made (it was
// asked for before the block in front of this one); and for the copy of gradients before `.grad` shows them,
// while the device runs the next block's backward. A gather that is not used is never waited for: where
// parameters have changed meanwhile, it is dropped.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "common/device_runtime.h"

namespace bmtrain {

/// The streams of one device. For any thread.
class HostLane {
 public:
  /// StateError if there is no such device.
  explicit HostLane(const c10::Device& device);

  /// StateError while the current stream's work goes into a CUDA graph, which would keep the bytes of today.
  void check_capture() const;
  /// What was asked of the current stream so far.
  [[nodiscard]] std::unique_ptr<DeviceEvent> mark() const;
  /// Later work of the current stream waits for the mark.
  void follow(DeviceEvent& mark) const;
  /// Calls `work`, whose operations become work of the stream of copies to the device or to the host, behind
  /// the mark `start` if there is one. Returns the mark of their end.
  std::unique_ptr<DeviceEvent> to_device(DeviceEvent* start, const std::function<void()>& work) const;
  std::unique_ptr<DeviceEvent> to_host(DeviceEvent* start, const std::function<void()>& work) const;

 private:
  [[nodiscard]] std::unique_ptr<DeviceEvent> run(std::int64_t stream, DeviceEvent* start,
                                                 const std::function<void()>& work) const;

  const std::shared_ptr<DeviceRuntime> runtime_;
  const std::int64_t to_device_, to_host_;
};

}  // namespace bmtrain
