// This library's kernels as work of streams: compiled for the host and run by the emulated machine of
// tests/cuda/emulate, without its checks of memory.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "../emulate/fibers.h"
#include "../emulate/machine.h"

namespace emulate {
namespace {

struct Queued {
  Launch launch;
  std::vector<std::max_align_t> argument;
};

void run_queued(void* queued) {
  const std::unique_ptr<Queued> mine(static_cast<Queued*>(queued));
  mine->launch.argument = mine->argument.data();
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  if (run(mine->launch)) return;
  std::fprintf(stderr, "simulated CUDA: a kernel failed: %s\n", failure());
  std::_Exit(70);
}

}  // namespace

bool start(const Launch& launch) {
  const std::size_t words = (launch.argument_size + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
  auto queued = std::make_unique<Queued>(Queued{launch, std::vector<std::max_align_t>(words)});
  std::memcpy(queued->argument.data(), launch.argument, launch.argument_size);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  return cudaLaunchHostFunc(stream, run_queued, queued.release()) == cudaSuccess;
}

void begin_launch() {}
void begin_block() {}
void end_launch() {}
void touch(const void* /*address*/, std::size_t /*size*/, bool /*writes*/, const void* /*instruction*/) {}

}  // namespace emulate
