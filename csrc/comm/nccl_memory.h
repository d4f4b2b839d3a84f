// Device memory that NCCL has allocated and that communicators register before they use it.
//
// [Note: Registered memory]
// NCCL moves data straight between buffers that it knows (over NVLink SHARP and InfiniBand), and through
// buffers of its own otherwise. It has to allocate such memory itself, and each communicator has to register
// it. What it asks for in return: of one collective either all ranks' buffers are registered or none is, and
// they are registered alike. So ranks decide together, before there is a buffer, whether memory of this kind
// is used; then whether a buffer is of it depends on its size alone, never on what a rank has at hand, and a
// failure that comes later is a failure of the communicator, as any other.
//
// A communicator registers a piece when an operation first uses it. It is deregistered by every communicator
// before it is freed, and by a communicator before that is destroyed. An aborted communicator deregisters
// nothing itself: kernels that wait in vain may still use the memory until NCCL has ended them, and ends the
// registrations with them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/nccl_api.h"
#include "shard/buffer_source.h"

namespace bmtrain {

/// A piece of memory, whole.
struct NcclRegion {
  void* base;
  std::size_t size;
};

/// The pieces that there are.
class NcclRegions {
 public:
  void add(NcclRegion region);
  void remove(const void* base);
  /// The piece that `address` lies in.
  [[nodiscard]] std::optional<NcclRegion> find(const void* address) const;

 private:
  mutable std::mutex mutex_;  // protects all
  std::map<std::uintptr_t, std::size_t> sizes_;
};

/// What one communicator has registered. Not thread-safe.
class NcclRegistrations {
 public:
  explicit NcclRegistrations(const nccl::Functions& call) : call_(call) {}

  [[nodiscard]] nccl::Result ensure(nccl::Comm comm, NcclRegion region);
  void drop(nccl::Comm comm, void* base);
  void drop_all(nccl::Comm comm);
  /// The communicator was aborted, and its registrations with it.
  void forget() { handles_.clear(); }

 private:
  const nccl::Functions& call_;
  std::map<void*, void*> handles_;
};

/// Allocates such memory on one device.
class NcclMemory final : public BufferSource {
 public:
  NcclMemory(std::shared_ptr<NcclLibrary> library, c10::Device device);

  /// CommunicationError if NCCL has none to give.
  [[nodiscard]] c10::DataPtr allocate(std::int64_t nbytes) override;
  [[nodiscard]] c10::Device device() const override { return device_; }

 private:
  const std::shared_ptr<NcclLibrary> library_;
  const c10::Device device_;
};

}  // namespace bmtrain
