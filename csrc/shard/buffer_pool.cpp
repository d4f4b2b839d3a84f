#include "shard/buffer_pool.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/delays.h"

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

// What comes later in `owner` comes after what `user` has queued.
void order(c10::Device device, c10::StreamId owner, c10::StreamId user) {
  c10::Event used(device.type());
  used.record(c10::Stream(c10::Stream::UNSAFE, device, user));
  used.block(c10::Stream(c10::Stream::UNSAFE, device, owner));
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

class BufferPool::Shelf : public std::enable_shared_from_this<BufferPool::Shelf> {
 public:
  Shelf(std::int64_t idle_per_class, bool poison) : idle_per_class_(idle_per_class), poison_(poison) {}

  c10::DataPtr acquire(std::int64_t nbytes, c10::Device device) {
    c10::DataPtr memory;
    const c10::StreamId stream = current_stream(device);
    std::shared_ptr<BufferSource> source;
    {
      const std::lock_guard lock(mutex_);
      source = source_for(nbytes, device);
      auto& idle = idle_[{nbytes, device.index(), stream}];
      if (!idle.empty()) {
        memory = std::move(idle.back());
        idle.pop_back();
        stats_.bytes_idle -= nbytes;
      }
    }
    const bool is_fresh = !memory;
    if (is_fresh) {
      memory = source ? source->allocate(nbytes) : allocate(nbytes, device);
      if (poison_) {
        poison(memory, nbytes);
      }
    }
    count_use(nbytes, is_fresh);
    void* address = memory.get();
    auto lease = std::make_unique<Lease>(
        Lease{shared_from_this(), std::move(memory), nbytes, stream, source != nullptr});
    return {address, lease.release(), &Shelf::give_back, device};
  }

  void set_source(std::shared_ptr<BufferSource> source, std::int64_t least_bytes) {
    trim();  // else whether a buffer is of the source would depend on what was idle
    const std::lock_guard lock(mutex_);
    BMT_CHECK(StateError, stats_.buffers_in_use == 0, "buffer source: ", stats_.buffers_in_use,
              " buffers are in use");
    source_ = std::move(source);
    least_bytes_ = least_bytes;
  }

  void trim() {
    decltype(idle_) dropped;  // freed after the lock is released
    const std::lock_guard lock(mutex_);
    dropped.swap(idle_);
    stats_.bytes_idle = 0;
  }

  Stats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_peaks() {
    const std::lock_guard lock(mutex_);
    stats_.peak_bytes_in_use = stats_.bytes_in_use;
    stats_.peak_buffers_in_use = stats_.buffers_in_use;
  }

 private:
  struct Lease {
    std::shared_ptr<Shelf> shelf;
    c10::DataPtr memory;
    std::int64_t nbytes;
    c10::StreamId stream;
    bool is_from_source;
  };

  [[nodiscard]] std::shared_ptr<BufferSource> source_for(std::int64_t nbytes, c10::Device device) const {
    return source_ && nbytes >= least_bytes_ && source_->device() == device ? source_ : nullptr;
  }

  // After the buffer is there: where there is no memory, none is in use.
  void count_use(std::int64_t nbytes, bool is_fresh) {
    const std::lock_guard lock(mutex_);
    stats_.bytes_in_use += nbytes;
    stats_.buffers_in_use += 1;
    stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
    stats_.peak_buffers_in_use = std::max(stats_.peak_buffers_in_use, stats_.buffers_in_use);
    stats_.allocations += is_fresh ? 1 : 0;
  }

  static void give_back(void* context) {
    const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
    Shelf& shelf = *lease->shelf;
    delay();
    if (shelf.poison_) {
      poison(lease->memory, lease->nbytes);
    }
    const c10::Device device = lease->memory.device();
    const c10::StreamId stream = current_stream(device);
    const bool moves = stream != lease->stream;
    if (moves && lease->is_from_source) {
      order(device, lease->stream, stream);
    } else if (moves) {  // torch's allocator sees to it that nobody has it before this stream is done
      const c10::impl::VirtualGuardImpl guard(device.type());
      guard.recordDataPtrOnStream(lease->memory, c10::Stream(c10::Stream::UNSAFE, device, stream));
    }
    const std::lock_guard lock(shelf.mutex_);
    shelf.stats_.bytes_in_use -= lease->nbytes;
    shelf.stats_.buffers_in_use -= 1;
    if (moves && !lease->is_from_source) {
      return;
    }
    auto& idle = shelf.idle_[{lease->nbytes, device.index(), lease->stream}];
    if (lease->is_from_source || static_cast<std::int64_t>(idle.size()) < shelf.idle_per_class_) {
      idle.push_back(std::move(lease->memory));
      shelf.stats_.bytes_idle += lease->nbytes;
    }
  }

  const std::int64_t idle_per_class_;
  const bool poison_;
  std::shared_ptr<BufferSource> source_;  // may be null
  std::int64_t least_bytes_ = 0;
  mutable std::mutex mutex_;  // protects everything below; buffers may come back
                              // from any thread
  // By size, device and stream: on a device, memory is free in the order of the stream that has used it.
  std::map<std::tuple<std::int64_t, c10::DeviceIndex, c10::StreamId>, std::vector<c10::DataPtr>> idle_;
  Stats stats_;
};

BufferPool::BufferPool(std::int64_t idle_per_class, bool poison)
    : shelf_(std::make_shared<Shelf>(idle_per_class, poison)) {
  BMT_CHECK(ValueError, idle_per_class >= 0, "idle_per_class: expected at least 0, got ", idle_per_class);
}

BufferPool::~BufferPool() = default;

c10::DataPtr BufferPool::acquire(std::int64_t nbytes, c10::Device device) {
  BMT_CHECK(ValueError, nbytes >= 0, "nbytes: expected at least 0, got ", nbytes);
  return shelf_->acquire(nbytes, device);
}

void BufferPool::set_source(std::shared_ptr<BufferSource> source, std::int64_t least_bytes) {
  shelf_->set_source(std::move(source), least_bytes);
}

void BufferPool::trim() { shelf_->trim(); }
BufferPool::Stats BufferPool::stats() const { return shelf_->stats(); }
void BufferPool::reset_peaks() { shelf_->reset_peaks(); }

}  // namespace bmtrain
