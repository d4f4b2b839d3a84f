#include "shard/host_lane.h"

#include "common/check.h"

namespace bmtrain {

HostLane::HostLane(const c10::Device& device)
    : runtime_(device_runtime(device)),
      to_device_(runtime_->make_stream()),
      to_host_(runtime_->make_stream()) {}

void HostLane::check_capture() const {
  BMT_CHECK(StateError, !is_capturing(runtime_->native_handle(runtime_->current_stream())),
            "BlockPolicy(parameters=): expected 'device' for Blocks in a CUDA graph, got 'host' or 'disk': a "
            "replay would not wait for their copies; capture no call of these Blocks, or keep them on the "
            "device");
}

std::unique_ptr<DeviceEvent> HostLane::mark() const { return runtime_->mark(runtime_->current_stream()); }

void HostLane::follow(DeviceEvent& mark) const { mark.block(runtime_->current_stream()); }

std::unique_ptr<DeviceEvent> HostLane::to_device(DeviceEvent* start,
                                                 const std::function<void()>& work) const {
  return run(to_device_, start, work);
}

std::unique_ptr<DeviceEvent> HostLane::to_host(DeviceEvent* start, const std::function<void()>& work) const {
  return run(to_host_, start, work);
}

std::unique_ptr<DeviceEvent> HostLane::run(std::int64_t stream, DeviceEvent* start,
                                           const std::function<void()>& work) const {
  check_capture();
  if (start != nullptr) {
    start->block(stream);
  }
  return runtime_->run_and_mark(stream, work);
}

}  // namespace bmtrain
