#include "common/device_runtime.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

c10::Stream stream_of(c10::Device device, std::int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

// [Note: Threads of our own]
// A thread that has chosen no device is on device 0. torch's events change to their own and then back, and
// going back by setDevice makes CUDA open device 0 in this process, which takes memory of that device for
// each rank of the host. A DeviceGuard around them goes back without that.

// [Note: Queries during a capture]
// While a program records a CUDA graph in torch's default mode, CUDA refuses queries of events to every
// thread of the process, and ends the recording. A thread in the relaxed mode may ask about events that were
// recorded outside of the graph, and disturbs nothing. What is refused all the same is no failure of the
// device: whoever asked asks again later.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  static constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed
  using Exchange = int (*)(int* mode);

  // The thread's mode becomes `mode_`, which becomes the thread's. No CUDA header: [Note: A device behind an
  // interface].
  void exchange() {
    static const auto call =
        reinterpret_cast<Exchange>(dlsym(RTLD_DEFAULT, "cudaThreadExchangeStreamCaptureMode"));
    if (call != nullptr) {
      static_cast<void>(call(&mode_));
    }
  }

  int mode_ = kRelaxed;
};

// CUDA has a dozen results that refuse something during a capture (900 to 908); all of their texts say so.
bool is_about_capture(const std::exception& error) {
  return std::string_view(error.what()).find("captur") != std::string_view::npos;
}

// An event in torch's streams.
class TorchEvent final : public DeviceEvent {
 public:
  explicit TorchEvent(c10::Device device) : device_(device), event_(std::in_place, device.type()) {}
  ~TorchEvent() override {
    try {
      const c10::DeviceGuard guard(device_);
      event_.reset();
    } catch (const std::exception&) {
      // The process ends, and the device has gone before.
    }
  }
  TorchEvent(const TorchEvent&) = delete;
  TorchEvent& operator=(const TorchEvent&) = delete;
  void record(std::int64_t stream) override {
    const c10::DeviceGuard guard(device_);
    event_->record(stream_of(device_, stream));
  }
  void block(std::int64_t stream) override {
    const c10::DeviceGuard guard(device_);
    event_->block(stream_of(device_, stream));
  }
  [[nodiscard]] bool is_complete() override {
    const c10::DeviceGuard guard(device_);
    const RelaxedCapture relaxed;
    try {
      return event_->query();
    } catch (const std::exception& error) {
      if (is_about_capture(error)) {
        return false;
      }
      throw;
    }
  }

 private:
  c10::Device device_;
  std::optional<c10::Event> event_;
};

// Streams of torch's pool, so that the caching allocator and torch.cuda.Stream know them.
class TorchRuntime final : public DeviceRuntime {
 public:
  explicit TorchRuntime(c10::Device device) : device_(device), guard_(device.type()) {}

  [[nodiscard]] std::int64_t make_stream() override {
    return guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true).id();
  }
  [[nodiscard]] std::int64_t current_stream() override { return guard_.getStream(device_).id(); }
  [[nodiscard]] void* native_handle(std::int64_t stream) override {
    return guard_.getStreamNativeHandle(stream_of(device_, stream));
  }
  [[nodiscard]] std::unique_ptr<DeviceEvent> make_event() override {
    return std::make_unique<TorchEvent>(device_);
  }
  void synchronize() override {
    const c10::DeviceGuard guard(device_);
    guard_.synchronizeDevice(device_.index());
  }
  void run_on(std::int64_t stream, std::function<void()> work) override {
    const c10::StreamGuard guard(stream_of(device_, stream));
    work();
  }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
};

std::mutex mutex;  // protects of_cpu
std::shared_ptr<DeviceRuntime> of_cpu;

}  // namespace

std::shared_ptr<DeviceRuntime> device_runtime(const c10::Device& device) {
  if (device.is_cuda()) {
    return std::make_shared<TorchRuntime>(device);
  }
  const std::lock_guard lock(mutex);
  BMT_CHECK(StateError, device.is_cpu() && of_cpu != nullptr, "NCCL: expected a CUDA device, got ", device);
  return of_cpu;
}

bool is_capturing(void* stream) {
  using Query = int (*)(void* stream, int* status);
  static const auto query = reinterpret_cast<Query>(dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
  int status = 0;  // cudaStreamCaptureStatusNone
  return query != nullptr && query(stream, &status) == 0 && status != 0;
}

void set_cpu_runtime(std::shared_ptr<DeviceRuntime> runtime) {
  const std::lock_guard lock(mutex);
  of_cpu = std::move(runtime);
}

}  // namespace bmtrain
