#include "testing/host_runtime.h"

#include <dlfcn.h>

#include <memory>

#include "common/check.h"
#include "common/device_runtime.h"

namespace bmtrain {

void install_device_runtime(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* error = handle == nullptr ? dlerror() : nullptr;
  BMT_CHECK(StateError, handle != nullptr, "device runtime: ", error == nullptr ? library.c_str() : error);
  using Maker = DeviceRuntime* (*)();
  const auto make = reinterpret_cast<Maker>(dlsym(handle, "bmtrain_device_runtime"));
  BMT_CHECK(StateError, make != nullptr, "device runtime: ", library, " has no bmtrain_device_runtime");
  set_cpu_runtime(std::shared_ptr<DeviceRuntime>(make(), [](DeviceRuntime*) {}));
}

}  // namespace bmtrain
