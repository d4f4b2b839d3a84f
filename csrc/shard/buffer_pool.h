// BufferPool: the short-lived large buffers of a step (gathered parameters,
// gradients on their way to the shards).
//
// A buffer is handed out as a c10::DataPtr whose deleter brings it back, so a
// buffer in use can never be handed out twice, whatever path an error takes.
// Idle buffers are kept up to `idle_per_class` of each size, and together not
// many more bytes than `idle_per_class` of the largest size, see [Note: What stays
// idle]; the rest goes back to the operating system: large host buffers are mapped
// directly, because the C library keeps what it is given. For any thread; buffers come back from any thread.
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

#include <cstdint>
#include <memory>

namespace bmtrain {

class BufferPool {
 public:
  /// `poison`: fill new and returned buffers with 0xFF bytes (NaN in every floating
  /// dtype), to make any use after release loud.
  BufferPool(std::int64_t idle_per_class, bool poison);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// A buffer of at least `nbytes` with arbitrary contents; demand beyond the
  /// idle buffers allocates, never waits.
  [[nodiscard]] c10::DataPtr acquire(std::int64_t nbytes, c10::Device device);

  /// Gives all idle buffers back to the system.
  void trim();

  struct Stats {
    std::int64_t bytes_in_use = 0;
    std::int64_t peak_bytes_in_use = 0;
    std::int64_t buffers_in_use = 0;
    std::int64_t peak_buffers_in_use = 0;
    std::int64_t bytes_idle = 0;
    std::int64_t allocations = 0;
  };
  [[nodiscard]] Stats stats() const;
  void reset_peaks();

  class Shelf;  // shared with the buffers handed out, so that they may outlive
                // the pool

 private:
  std::shared_ptr<Shelf> shelf_;
};

}  // namespace bmtrain
