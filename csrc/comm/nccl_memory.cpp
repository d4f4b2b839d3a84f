#include "comm/nccl_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <exception>
#include <utility>

#include "common/check.h"
#include "common/device_runtime.h"

namespace bmtrain {
namespace {

using nccl::Result;

struct Piece {
  std::shared_ptr<NcclLibrary> library;
  c10::Device device;
  void* base;
};

void free_piece(void* context) {
  const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
  try {
    const c10::DeviceGuard guard(piece->device);
    device_runtime(piece->device)->synchronize();  // NCCL unmaps it at once
    piece->library->release_region(piece->base);
    (void)piece->library->call().MemFree(piece->base);
  } catch (const std::exception&) {
    // The device has failed, as everybody else will be told: the memory goes with the process.
  }
}

// Torch keeps freed memory for itself, of which NCCL could have some.
void empty_cache_of_torch(c10::Device device) {
  if (device.is_cuda()) {
    c10::getDeviceAllocator(device.type())->emptyCache();
  }
}

}  // namespace

void NcclRegions::add(NcclRegion region) {
  const std::lock_guard lock(mutex_);
  sizes_[reinterpret_cast<std::uintptr_t>(region.base)] = region.size;
}

void NcclRegions::remove(const void* base) {
  const std::lock_guard lock(mutex_);
  sizes_.erase(reinterpret_cast<std::uintptr_t>(base));
}

std::optional<NcclRegion> NcclRegions::find(const void* address) const {
  const auto place = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  const auto after = sizes_.upper_bound(place);
  if (after == sizes_.begin()) {
    return std::nullopt;
  }
  const auto& [base, size] = *std::prev(after);
  if (place - base >= size) {
    return std::nullopt;
  }
  return NcclRegion{reinterpret_cast<void*>(base), size};
}

Result NcclRegistrations::ensure(nccl::Comm comm, NcclRegion region) {
  if (handles_.contains(region.base)) {
    return Result::kSuccess;
  }
  void* handle = nullptr;
  const Result result = call_.CommRegister(comm, region.base, region.size, &handle);
  if (result == Result::kSuccess) {
    handles_.emplace(region.base, handle);
  }
  return result;
}

void NcclRegistrations::drop(nccl::Comm comm, void* base) {
  const auto found = handles_.find(base);
  if (found != handles_.end()) {
    (void)call_.CommDeregister(comm, found->second);
    handles_.erase(found);
  }
}

void NcclRegistrations::drop_all(nccl::Comm comm) {
  for (const auto& [base, handle] : handles_) {
    (void)call_.CommDeregister(comm, handle);
  }
  handles_.clear();
}

NcclMemory::NcclMemory(std::shared_ptr<NcclLibrary> library, c10::Device device)
    : library_(std::move(library)), device_(device) {
  BMT_CHECK(StateError, library_->can_register(), "NCCL: ", library_->path(),
            " cannot allocate and register memory");
}

c10::DataPtr NcclMemory::allocate(std::int64_t nbytes) {
  const c10::DeviceGuard guard(device_);
  const auto size = static_cast<std::size_t>(nbytes);
  void* base = nullptr;
  Result result = library_->call().MemAlloc(&base, size);
  if (result != Result::kSuccess) {
    empty_cache_of_torch(device_);
    result = library_->call().MemAlloc(&base, size);
  }
  BMT_CHECK(CommunicationError, result == Result::kSuccess && base != nullptr, "NCCL could not allocate ",
            nbytes, " bytes (BMTRAIN_NCCL_REGISTER=0 takes buffers from torch): ", library_->explain(result));
  auto piece = std::make_unique<Piece>(Piece{library_, device_, base});
  library_->regions().add({base, size});
  return {base, piece.release(), &free_piece, device_};
}

}  // namespace bmtrain
