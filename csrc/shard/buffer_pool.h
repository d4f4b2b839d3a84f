// BufferPool: the short-lived large buffers of a step (gathered parameters, gradients on their way to the
// shards).
//
// A buffer is handed out as a c10::DataPtr whose deleter brings it back, so a buffer in use can never be
// handed out twice, whatever path an error takes. Idle buffers are kept up to `idle_per_class` of each size,
// and together not many more bytes than `idle_per_class` of the largest size, see [Note: What stays idle];
// the rest goes back to the operating system: large host buffers are mapped directly, because the C library
// keeps what it is given. For any thread; buffers come back from any thread.
//
// [Note: What stays idle]
// A model of many different blocks would otherwise keep idle_per_class buffers of each of their sizes: twice
// the whole model, on any number of ranks. Beyond the limit those go that have been idle longest. The limit
// leaves an eighth for the small buffers of blocks with several kinds of parameters, which would otherwise
// drive out a large one each time. Where memory runs out, all idle buffers go, and the allocation is tried
// once more.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/thread_annotations.h"

namespace bmtrain {

/// Owned by std::shared_ptr: buffers in use hold the pool that they return to.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  /// `poison`: fill new and returned buffers with 0xFF bytes (NaN in every floating dtype), to make any use
  /// after release loud.
  BufferPool(std::int64_t idle_per_class, bool poison);

  /// A buffer of at least `nbytes` with arbitrary contents; demand beyond the idle buffers allocates.
  [[nodiscard]] c10::DataPtr acquire(std::int64_t nbytes, c10::Device device) BMT_EXCLUDES(mutex_);

  /// Gives all idle buffers back to the system.
  void trim() BMT_EXCLUDES(mutex_);

  struct Stats {
    std::int64_t bytes_in_use = 0;
    std::int64_t peak_bytes_in_use = 0;
    std::int64_t buffers_in_use = 0;
    std::int64_t peak_buffers_in_use = 0;
    std::int64_t bytes_idle = 0;
  };
  [[nodiscard]] Stats stats() const BMT_EXCLUDES(mutex_);
  void reset_peaks() BMT_EXCLUDES(mutex_);

 private:
  // What may stand in for each other. On a device, memory is free in the order of the stream that has used
  // it.
  struct Class {
    std::int64_t nbytes;
    c10::DeviceIndex device;
    c10::StreamId stream;

    bool operator==(const Class&) const = default;
  };
  struct Idle {
    c10::DataPtr memory;
    Class kind;
  };
  // A buffer in use.
  struct Lease {
    std::shared_ptr<BufferPool> pool;
    c10::DataPtr memory;
    Class kind;
  };

  // The one that was used last; null if there is none.
  [[nodiscard]] c10::DataPtr take_idle(const Class& kind) BMT_REQUIRES(mutex_);
  [[nodiscard]] c10::DataPtr allocate_or_trim(std::int64_t nbytes, c10::Device device) BMT_EXCLUDES(mutex_);
  // Moves to `dropped` what is too much beside a new one, see [Note: What stays idle].
  void make_room_for(const Class& added, std::vector<Idle>& dropped) BMT_REQUIRES(mutex_);
  void drop(std::vector<Idle>::iterator place, std::vector<Idle>& dropped) BMT_REQUIRES(mutex_);
  // After the buffer is there: where there is no memory, none is in use.
  void count_use(std::int64_t nbytes) BMT_EXCLUDES(mutex_);
  static void give_back(void* lease);

  const std::int64_t idle_per_class_;
  const bool poison_;
  mutable Mutex mutex_;
  std::vector<Idle> idle_ BMT_GUARDED_BY(mutex_);    // that which has been idle longest first
  std::int64_t largest_ BMT_GUARDED_BY(mutex_) = 0;  // bytes of the largest buffer since the pool was trimmed
  Stats stats_ BMT_GUARDED_BY(mutex_);
};

}  // namespace bmtrain
