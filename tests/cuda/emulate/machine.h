// Runs kernels on the host, one thread of one block at a time, and looks at every access to memory.
//
// [Note: A kernel under emulation]
// The .cu files are compiled by the host's compiler against include/cuda_runtime.h, with -fsanitize=thread
// but without that sanitizer's library: the calls it puts before every load and store come here
// (accesses.cpp). The threads of a block are fibers that change places at barriers and shuffles, in an order
// drawn from a seed. What a device would not do right, or do with luck only, ends the launch with a message:
//   - an access outside the memory that the launch was given, or a write to what it may only read;
//   - an access whose address is no multiple of its size;
//   - a barrier that only some threads of a block reach, a shuffle that lanes of its mask do not reach;
//   - a read of shared memory that no thread has written, a race on it between two barriers;
//   - two threads at one byte of global memory of which one writes (no kernel here means to).
// What a device has and this has not: several blocks at a time, caches, clocks, and its own rounding of
// exp2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulate {

struct Index {
  unsigned x, y, z;
};
struct Position {
  Index thread, block, block_size, grid_size;
};
extern Position position;  // of the thread that runs

struct Launch {
  unsigned grid, block;
  void (*body)(void*);
  void* argument;  // the launch's own: it may be copied, byte by byte
  std::size_t argument_size;
  void* stream;
};
/// What a launch does: run(), unless a program that links this has streams (tests/cuda/simulated).
[[nodiscard]] bool start(const Launch& launch);
/// Whether all threads came to their end; otherwise failure() says why not.
[[nodiscard]] bool run(const Launch& launch);
/// Why the last run failed.
[[nodiscard]] const char* failure();

// What a thread calls.
void wait_for_block();
std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned source_lane);
void touch(const void* address, std::size_t size, bool writes, const void* instruction);

}  // namespace emulate
