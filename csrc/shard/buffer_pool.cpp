#include "shard/buffer_pool.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "common/check.h"
#include "common/race_point.h"

namespace bmtrain {
namespace {

constexpr std::int64_t kMapThreshold = std::int64_t{1} << 20;
constexpr std::int64_t kHugePage = std::int64_t{1} << 21;

struct Mapping {
  void* address;
  std::size_t length;
};

void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  ::munmap(mapping->address, mapping->length);
  delete mapping;
}

c10::DataPtr map_host(std::int64_t nbytes) {
  const auto length = static_cast<std::size_t>(nbytes);
  void* address = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  BMT_CHECK(StateError, address != MAP_FAILED, "cannot map a buffer of ", nbytes, " bytes: out of memory");
  if (nbytes >= kHugePage) {
    ::madvise(address, length,
              MADV_HUGEPAGE);  // only a hint: its failure costs speed, not correctness
  }
  auto owner = std::make_unique<Mapping>(Mapping{address, length});
  return {address, owner.release(), &unmap, c10::Device(c10::kCPU)};
}

// On a device in the order of the current stream, as whoever gives a buffer back is done with it there.
void poison(const c10::DataPtr& memory, std::int64_t nbytes) {
  if (memory.device().is_cpu()) {
    std::memset(memory.get(), 0xFF, static_cast<std::size_t>(nbytes));
  } else {
    at::from_blob(memory.get(), {nbytes}, at::TensorOptions().dtype(at::kByte).device(memory.device()))
        .fill_(0xFF);
  }
}

// The calling thread's stream of a device; the CPU has one.
c10::StreamId current_stream(c10::Device device) {
  return device.is_cpu() ? 0 : c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

c10::DataPtr allocate(std::int64_t nbytes, c10::Device device) {
  const c10::DeviceGuard guard(device);  // torch's allocators take memory of the calling thread's device
  if (device.is_cpu() && nbytes >= kMapThreshold) {
    return map_host(nbytes);
  }
  return c10::GetAllocator(device.type())->allocate(static_cast<std::size_t>(nbytes));
}

}  // namespace

BufferPool::BufferPool(std::int64_t idle_per_class, bool poison)
    : idle_per_class_(idle_per_class), poison_(poison) {
  BMT_CHECK(ValueError, idle_per_class >= 0, "idle_per_class: expected at least 0, got ", idle_per_class);
}

c10::DataPtr BufferPool::acquire(std::int64_t nbytes, c10::Device device) {
  BMT_CHECK(ValueError, nbytes >= 0, "nbytes: expected at least 0, got ", nbytes);
  const Class kind{nbytes, device.index(), current_stream(device)};
  c10::DataPtr memory;
  {
    const Lock lock(mutex_);
    memory = take_idle(kind);
  }
  if (!memory) {
    memory = allocate_or_trim(nbytes, device);
    if (poison_) {
      poison(memory, nbytes);
    }
  }
  count_use(nbytes);
  void* address = memory.get();
  auto lease = std::make_unique<Lease>(Lease{shared_from_this(), std::move(memory), kind});
  return {address, lease.release(), &BufferPool::give_back, device};
}

void BufferPool::trim() {
  std::vector<Idle> dropped;  // freed after the lock is released
  const Lock lock(mutex_);
  dropped.swap(idle_);
  stats_.bytes_idle = 0;
  largest_ = 0;
}

BufferPool::Stats BufferPool::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

void BufferPool::reset_peaks() {
  const Lock lock(mutex_);
  stats_.peak_bytes_in_use = stats_.bytes_in_use;
  stats_.peak_buffers_in_use = stats_.buffers_in_use;
}

c10::DataPtr BufferPool::take_idle(const Class& kind) {
  const auto found =
      std::find_if(idle_.rbegin(), idle_.rend(), [&](const Idle& idle) { return idle.kind == kind; });
  if (found == idle_.rend()) {
    return {};
  }
  c10::DataPtr memory = std::move(found->memory);
  idle_.erase(std::next(found).base());
  stats_.bytes_idle -= kind.nbytes;
  return memory;
}

c10::DataPtr BufferPool::allocate_or_trim(std::int64_t nbytes, c10::Device device) {
  try {
    return allocate(nbytes, device);
  } catch (const std::exception&) {  // torch's allocators and the C++ library have errors of their own
    trim();
  }
  return allocate(nbytes, device);
}

void BufferPool::make_room_for(const Class& added, std::vector<Idle>& dropped) {
  const auto is_like = [&](const Idle& idle) { return idle.kind == added; };
  if (std::count_if(idle_.begin(), idle_.end(), is_like) >= idle_per_class_) {
    drop(std::find_if(idle_.begin(), idle_.end(), is_like), dropped);
  }
  largest_ = std::max(largest_, added.nbytes);
  std::int64_t excess = added.nbytes - idle_per_class_ * largest_ - largest_ / 8;
  for (const Idle& idle : idle_) {
    excess += idle.kind.nbytes;
  }
  while (excess > 0) {
    excess -= idle_.front().kind.nbytes;
    drop(idle_.begin(), dropped);
  }
}

void BufferPool::drop(std::vector<Idle>::iterator place, std::vector<Idle>& dropped) {
  stats_.bytes_idle -= place->kind.nbytes;
  dropped.push_back(std::move(*place));
  idle_.erase(place);
}

void BufferPool::count_use(std::int64_t nbytes) {
  const Lock lock(mutex_);
  stats_.bytes_in_use += nbytes;
  stats_.buffers_in_use += 1;
  largest_ = std::max(largest_, nbytes);
  stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
  stats_.peak_buffers_in_use = std::max(stats_.peak_buffers_in_use, stats_.buffers_in_use);
}

void BufferPool::give_back(void* context) {
  const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
  BufferPool& pool = *lease->pool;
  const Class& kind = lease->kind;
  race_point();
  if (pool.poison_) {
    poison(lease->memory, kind.nbytes);
  }
  const c10::Device device = lease->memory.device();
  const c10::StreamId stream = current_stream(device);
  const bool moves = stream != kind.stream;
  if (moves) {  // torch's allocator sees to it that nobody has it before this stream is done
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.recordDataPtrOnStream(lease->memory, c10::Stream(c10::Stream::UNSAFE, device, stream));
  }
  std::vector<Idle> dropped;  // freed after the lock is released
  const Lock lock(pool.mutex_);
  pool.stats_.bytes_in_use -= kind.nbytes;
  pool.stats_.buffers_in_use -= 1;
  if (moves || pool.idle_per_class_ == 0) {
    return;
  }
  pool.make_room_for(kind, dropped);
  pool.idle_.push_back({std::move(lease->memory), kind});
  pool.stats_.bytes_idle += kind.nbytes;
}

}  // namespace bmtrain
