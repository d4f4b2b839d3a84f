// BufferPool: the short-lived large buffers of a step (gathered parameters,
// gradients on their way to the shards).
//
// A buffer is handed out as a c10::DataPtr whose deleter brings it back, so a
// buffer in use can never be handed out twice, whatever path an error takes.
// Idle buffers are kept per size class, up to `idle_per_class`; the rest goes
// back to the operating system: large host buffers are mapped directly, because
// the C library keeps what it is given.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "shard/buffer_source.h"

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

  /// From here on, takes buffers of `least_bytes` and more on the source's device from there. They stay in
  /// the pool until it is trimmed, because freeing them would make the host wait. StateError if buffers are
  /// in use.
  void set_source(std::shared_ptr<BufferSource> source, std::int64_t least_bytes);

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
