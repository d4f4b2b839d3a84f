#include "shard/buffer_pool.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/race_point.h"
#include "common/thread_annotations.h"

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

class BufferPool::Shelf : public std::enable_shared_from_this<BufferPool::Shelf> {
 private:
  // A buffer that nobody uses.
  struct Idle {
    c10::DataPtr memory;
    std::int64_t nbytes;
    c10::DeviceIndex device;
    c10::StreamId stream;  // on a device, memory is free in the order of the stream that has used it

    [[nodiscard]] bool is_like(const Idle& other) const {
      return nbytes == other.nbytes && device == other.device && stream == other.stream;
    }
  };

 public:
  Shelf(std::int64_t idle_per_class, bool poison) : idle_per_class_(idle_per_class), poison_(poison) {}

  c10::DataPtr acquire(std::int64_t nbytes, c10::Device device) BMT_EXCLUDES(mutex_) {
    c10::DataPtr memory;
    const c10::StreamId stream = current_stream(device);
    {
      const Lock lock(mutex_);
      memory = take_idle(nbytes, device.index(), stream);
    }
    const bool is_fresh = !memory;
    if (is_fresh) {
      memory = allocate_or_trim(nbytes, device);
      if (poison_) {
        poison(memory, nbytes);
      }
    }
    count_use(nbytes, is_fresh);
    void* address = memory.get();
    auto lease = std::make_unique<Lease>(Lease{shared_from_this(), std::move(memory), nbytes, stream});
    return {address, lease.release(), &Shelf::give_back, device};
  }

  // Returns whether there was anything to give back.
  bool trim() BMT_EXCLUDES(mutex_) {
    std::vector<Idle> dropped;  // freed after the lock is released
    const Lock lock(mutex_);
    dropped.swap(idle_);
    stats_.bytes_idle = 0;
    largest_ = 0;
    return !dropped.empty();
  }

  Stats stats() const BMT_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return stats_;
  }

  void reset_peaks() BMT_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    stats_.peak_bytes_in_use = stats_.bytes_in_use;
    stats_.peak_buffers_in_use = stats_.buffers_in_use;
  }

 private:
  struct Lease {
    std::shared_ptr<Shelf> shelf;
    c10::DataPtr memory;
    std::int64_t nbytes;
    c10::StreamId stream;
  };

  // The one that was used last; null if there is none.
  [[nodiscard]] c10::DataPtr take_idle(std::int64_t nbytes, c10::DeviceIndex device, c10::StreamId stream)
      BMT_REQUIRES(mutex_) {
    const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [&](const Idle& idle) {
      return idle.nbytes == nbytes && idle.device == device && idle.stream == stream;
    });
    if (found == idle_.rend()) {
      return {};
    }
    c10::DataPtr memory = std::move(found->memory);
    idle_.erase(std::next(found).base());
    stats_.bytes_idle -= nbytes;
    return memory;
  }

  [[nodiscard]] c10::DataPtr allocate_or_trim(std::int64_t nbytes, c10::Device device) BMT_EXCLUDES(mutex_) {
    try {
      return allocate(nbytes, device);
    } catch (const std::exception&) {  // torch's allocators and the C++ library have errors of their own
      if (!trim()) {
        throw;
      }
    }
    return allocate(nbytes, device);
  }

  // Moves to `dropped` what is too much beside a new one, see [Note: What stays idle].
  void make_room_for(const Idle& added, std::vector<Idle>& dropped) BMT_REQUIRES(mutex_) {
    const auto is_like = [&](const Idle& idle) { return idle.is_like(added); };
    if (std::count_if(idle_.begin(), idle_.end(), is_like) >= idle_per_class_) {
      drop(std::find_if(idle_.begin(), idle_.end(), is_like), dropped);
    }
    largest_ = std::max(largest_, added.nbytes);
    std::int64_t excess = added.nbytes - idle_per_class_ * largest_ - largest_ / 8;
    for (const Idle& idle : idle_) {
      excess += idle.nbytes;
    }
    while (excess > 0) {
      excess -= idle_.front().nbytes;
      drop(idle_.begin(), dropped);
    }
  }

  void drop(std::vector<Idle>::iterator place, std::vector<Idle>& dropped) BMT_REQUIRES(mutex_) {
    stats_.bytes_idle -= place->nbytes;
    dropped.push_back(std::move(*place));
    idle_.erase(place);
  }

  // After the buffer is there: where there is no memory, none is in use.
  void count_use(std::int64_t nbytes, bool is_fresh) BMT_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    stats_.bytes_in_use += nbytes;
    stats_.buffers_in_use += 1;
    largest_ = std::max(largest_, nbytes);
    stats_.peak_bytes_in_use = std::max(stats_.peak_bytes_in_use, stats_.bytes_in_use);
    stats_.peak_buffers_in_use = std::max(stats_.peak_buffers_in_use, stats_.buffers_in_use);
    stats_.allocations += is_fresh ? 1 : 0;
  }

  static void give_back(void* context) {
    const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
    Shelf& shelf = *lease->shelf;
    race_point();
    if (shelf.poison_) {
      poison(lease->memory, lease->nbytes);
    }
    const c10::Device device = lease->memory.device();
    const c10::StreamId stream = current_stream(device);
    const bool moves = stream != lease->stream;
    if (moves) {  // torch's allocator sees to it that nobody has it before this stream is done
      const c10::impl::VirtualGuardImpl guard(device.type());
      guard.recordDataPtrOnStream(lease->memory, c10::Stream(c10::Stream::UNSAFE, device, stream));
    }
    std::vector<Idle> dropped;  // freed after the lock is released
    const Lock lock(shelf.mutex_);
    shelf.stats_.bytes_in_use -= lease->nbytes;
    shelf.stats_.buffers_in_use -= 1;
    if (moves || shelf.idle_per_class_ == 0) {
      return;
    }
    Idle idle{.memory = std::move(lease->memory),
              .nbytes = lease->nbytes,
              .device = device.index(),
              .stream = lease->stream};
    shelf.make_room_for(idle, dropped);
    shelf.idle_.push_back(std::move(idle));
    shelf.stats_.bytes_idle += lease->nbytes;
  }

  const std::int64_t idle_per_class_;
  const bool poison_;
  mutable Mutex mutex_;
  std::vector<Idle> idle_ BMT_GUARDED_BY(mutex_);    // that which has been idle longest first
  std::int64_t largest_ BMT_GUARDED_BY(mutex_) = 0;  // bytes of the largest buffer since the pool was trimmed
  Stats stats_ BMT_GUARDED_BY(mutex_);
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

void BufferPool::trim() { shelf_->trim(); }
BufferPool::Stats BufferPool::stats() const { return shelf_->stats(); }
void BufferPool::reset_peaks() { shelf_->reset_peaks(); }

}  // namespace bmtrain
