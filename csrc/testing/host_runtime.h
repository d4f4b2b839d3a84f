// A device runtime for the CPU, which has none of its own.
#pragma once

#include <string>

namespace bmtrain {

/// Takes the runtime of the CPU from a shared library, whose function
/// `bmtrain::DeviceRuntime* bmtrain_device_runtime()` returns an object that lives as long as the process. It
/// has to be built with common/device_runtime.h by the same compiler. StateError if it cannot be loaded.
void install_device_runtime(const std::string& library);

}  // namespace bmtrain
