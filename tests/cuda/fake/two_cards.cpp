// A guard for CUDA devices that has none: it notes on which of them this process would have a context. It
// changes devices where torch's own does (c10/cuda/impl/CUDAGuardImpl.h), and a change opens a device, as
// cudaSetDevice does.
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/device_runtime.h"

namespace {

thread_local c10::DeviceIndex current = 0;
std::atomic<int> opened = 0;  // bit d: device d
std::atomic<int> num_events = 0;

constexpr int kRelaxed = 2;
thread_local int mode = 0;  // of captures: global
std::atomic<bool> is_capturing = false, is_broken = false;

c10::Device card(c10::DeviceIndex index) { return c10::Device(c10::DeviceType::CUDA, index); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit Guard(c10::DeviceType /*type*/ = c10::DeviceType::CUDA) {}
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return card(current); }
  void setDevice(c10::Device device) const override {
    if (device.index() != current) opened |= 1 << device.index();
    current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  // Opens nothing: a device without a context is chosen when it is needed.
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 3);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    const c10::Device before = getDevice();
    setDevice(stream.device());
    if (*event == nullptr) {
      *event = ::operator new(1);
      num_events += 1;
    }
    setDevice(before);
  }
  void block(void* /*event*/, const c10::Stream& stream) const override {
    const c10::Device before = getDevice();
    setDevice(stream.device());
    setDevice(before);
  }
  // As cudaEventQuery: it works on the thread's device, and is refused while somebody captures a graph, which
  // it ends, unless the thread is in the relaxed mode.
  bool queryEvent(void* /*event*/) const override {
    opened |= 1 << current;
    if (is_capturing && mode != kRelaxed) {
      is_broken = true;
      throw std::runtime_error("CUDA error: operation not permitted when stream is capturing");
    }
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex index) const noexcept override {
    if (event == nullptr) return;
    const c10::Device before = getDevice();
    setDevice(card(index));
    ::operator delete(event);
    num_events -= 1;
    setDevice(before);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

std::atomic<int> last_buffer = -1;  // the device of

// As torch's: memory of the calling thread's device.
class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes > 0) last_buffer = current;
    void* const memory = ::operator new(bytes);
    return {memory, memory, [](void* context) { ::operator delete(context); }, card(current)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &allocator)

}  // namespace

extern "C" {
#ifndef WITHOUT_MODES  // as where the CUDA runtime is linked into torch, and its functions cannot be found by
                       // name
int cudaThreadExchangeStreamCaptureMode(int* wanted) {
  std::swap(*wanted, mode);
  return 0;
}
#endif
void cards_capture(int on) { is_capturing = on != 0; }
int cards_capture_is_broken() { return is_broken; }
/// What the library's runtime of card 1 says about an event there, in a thread that has chosen no card; and
/// whether it left the thread's mode as it was (2 if not).
int cards_ask() {
  int answer = 0;
  std::thread([&answer] {
    const auto event = bmtrain::device_runtime(card(1))->make_event();
    event->record(3);
    answer = event->is_complete() ? 1 : 0;
    if (mode != 0) answer = 2;
  }).join();
  return answer;
}
void cards_use(int device) { Guard().setDevice(card(static_cast<c10::DeviceIndex>(device))); }
int cards_opened() { return opened; }
int cards_num_events() { return num_events; }
int cards_last_buffer() { return last_buffer; }
}
