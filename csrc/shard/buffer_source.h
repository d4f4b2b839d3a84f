// Where a BufferPool takes large buffers from, if not from torch's allocators.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace bmtrain {

class BufferSource {
 public:
  virtual ~BufferSource() = default;
  /// Memory that is freed, once the device is done with it, by its deleter; which may take long.
  [[nodiscard]] virtual c10::DataPtr allocate(std::int64_t nbytes) = 0;
  [[nodiscard]] virtual c10::Device device() const = 0;
};

}  // namespace bmtrain
