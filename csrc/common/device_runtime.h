// Streams and events of a device, as far as a communicator needs them.
//
// [Note: A device behind an interface]
// The NCCL communicator orders its work by streams and events alone. It reaches them through this interface:
// over torch's own device interface for CUDA (no CUDA header is needed, so every build can use NCCL), and in
// tests over a fake, where operations complete when the test says so, or never.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace c10 {
struct Device;
}

namespace bmtrain {

/// A mark in a stream.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual void record(std::int64_t stream) = 0;
  /// Later work of `stream` waits for the mark; the host does not.
  virtual void block(std::int64_t stream) = 0;
  /// Whether everything before the mark is known to have completed; false where a graph that is being
  /// captured does not let us ask. Throws if the device failed.
  [[nodiscard]] virtual bool is_complete() = 0;
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  /// A stream that lives as long as the process.
  [[nodiscard]] virtual std::int64_t make_stream() = 0;
  /// The calling thread's stream.
  [[nodiscard]] virtual std::int64_t current_stream() = 0;
  /// What NCCL takes for a stream (a cudaStream_t).
  [[nodiscard]] virtual void* native_handle(std::int64_t stream) = 0;
  [[nodiscard]] virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  /// Blocks until the device has done everything that was asked of it.
  virtual void synchronize() = 0;
  /// Calls `work`, whose tensor operations become work of `stream`.
  virtual void run_on(std::int64_t stream, std::function<void()> work) = 0;

  /// What was asked of `stream` so far.
  [[nodiscard]] std::unique_ptr<DeviceEvent> mark(std::int64_t stream) {
    std::unique_ptr<DeviceEvent> event = make_event();
    event->record(stream);
    return event;
  }
  /// As run_on(); returns the mark of the end.
  [[nodiscard]] std::unique_ptr<DeviceEvent> run_and_mark(std::int64_t stream, std::function<void()> work) {
    run_on(stream, std::move(work));
    return mark(stream);
  }
};

/// Blocks until the device has come to the event.
void wait_on_host(DeviceEvent& event);

/// The runtime of a CUDA device, or that of the CPU if one was set. StateError if there is none.
[[nodiscard]] std::shared_ptr<DeviceRuntime> device_runtime(const c10::Device& device);

/// Whether work of a stream (a cudaStream_t) goes into a CUDA graph that is being captured.
[[nodiscard]] bool is_capturing(void* stream);

/// Lets the CPU, which has no runtime of its own, stand for a device.
void set_cpu_runtime(std::shared_ptr<DeviceRuntime> runtime);

}  // namespace bmtrain
