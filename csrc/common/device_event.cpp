#include <chrono>
#include <thread>

#include "common/device_runtime.h"

namespace bmtrain {
namespace {

constexpr std::chrono::microseconds kPause{20};

}  // namespace

void wait_on_host(DeviceEvent& event) {
  while (!event.is_complete()) {
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace bmtrain
