// The scheduler: fibers, barriers, shuffles. See [Note: A kernel under emulation] in machine.h.
#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fibers.h"

namespace emulate {

Position position;
Running running;

namespace {

constexpr unsigned kWarp = 32;

enum class State {
  kReady,
  kAtBarrier,  // until all threads of the block are
  kAtShuffle,  // until all lanes of its mask are
  kDone,
};

struct Fiber {
  ucontext_t context;
  State state;
  unsigned mask, source_lane;  // of the shuffle it waits at
  std::uint64_t value;         // what it gives there, and then what it got
};

std::mt19937_64 order(0);
// Never destroyed: a launch may go on while the process ends (tests/cuda/simulated).
std::vector<unsigned>& only_blocks = *new std::vector<unsigned>();
std::string& failure_text = *new std::string();
std::vector<Fiber>& fibers = *new std::vector<Fiber>();

char* stacks = nullptr;
ucontext_t scheduler;
const Launch* launch = nullptr;
Fiber* current = nullptr;

void enter() {
  launch->body(launch->argument);
  current->state = State::kDone;
  swapcontext(&current->context, &scheduler);
}

void make_fibers() {
  if (stacks == nullptr) {
    void* const memory = mmap(nullptr, 1024 * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks = static_cast<char*>(memory);
    fibers.resize(1024);
  }
  for (unsigned t = 0; t < launch->block; ++t) {
    Fiber& fiber = fibers[t];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + t * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    fiber.state = State::kReady;
  }
}

void resume(unsigned thread) {
  current = &fibers[thread];
  position.thread = {thread, 0, 0};
  running.is_on = true;
  running.stack = reinterpret_cast<std::uintptr_t>(stacks + thread * kStackBytes);
  running.thread = std::uint64_t{position.block.x} * launch->block + thread + 1;
  swapcontext(&scheduler, &current->context);
  running.is_on = false;
}

void leave(State state) {
  current->state = state;
  swapcontext(&current->context, &scheduler);
}

// Hands over values in the warps whose lanes have all come.
bool complete_shuffles() {
  bool any = false;
  for (unsigned first = 0; first < launch->block; first += kWarp) {
    const unsigned count = std::min(kWarp, launch->block - first);
    for (unsigned lane = 0; lane < count; ++lane) {
      const unsigned mask = fibers[first + lane].mask;
      if (fibers[first + lane].state != State::kAtShuffle) continue;
      const auto here = [&](unsigned other) {
        const Fiber& fiber = fibers[first + other];
        return other < count && fiber.state == State::kAtShuffle && fiber.mask == mask;
      };
      bool complete = true;
      for (unsigned other = 0; other < kWarp; ++other) {
        if ((mask >> other & 1u) != 0) complete = complete && here(other);
      }
      if (!complete) continue;
      std::uint64_t given[kWarp] = {};
      for (unsigned other = 0; other < count; ++other) given[other] = fibers[first + other].value;
      for (unsigned other = 0; other < count; ++other) {
        if ((mask >> other & 1u) == 0) continue;
        fibers[first + other].value = given[fibers[first + other].source_lane];
        fibers[first + other].state = State::kReady;
      }
      any = true;
    }
  }
  return any;
}

unsigned count_of(State state) {
  return static_cast<unsigned>(std::count_if(fibers.begin(), fibers.begin() + launch->block,
                                             [state](const Fiber& fiber) { return fiber.state == state; }));
}

// Lets waiting threads go on. Whether any can.
bool release() {
  if (complete_shuffles()) return true;
  const unsigned waiting = count_of(State::kAtBarrier);
  if (waiting == 0 && count_of(State::kAtShuffle) == 0) return false;
  if (waiting != launch->block) {
    failure_text = "block " + std::to_string(position.block.x) + ": " + std::to_string(waiting) +
                   " threads wait at a barrier, " + std::to_string(count_of(State::kAtShuffle)) +
                   " at a shuffle, " + std::to_string(count_of(State::kDone)) + " have ended";
    return false;
  }
  ++running.phase;
  for (unsigned t = 0; t < launch->block; ++t) fibers[t].state = State::kReady;
  return true;
}

void run_block(unsigned block) {
  position.block = {block, 0, 0};
  running.phase = 0;
  begin_block();
  make_fibers();
  std::vector<unsigned> turns(launch->block);
  std::iota(turns.begin(), turns.end(), 0u);
  do {
    std::shuffle(turns.begin(), turns.end(), order);
    for (const unsigned thread : turns) {
      if (fibers[thread].state == State::kReady) resume(thread);
      if (!failure_text.empty()) return;
    }
  } while (release());
}

}  // namespace

void fail(const std::string& what) {
  failure_text = "block " + std::to_string(position.block.x) + ", thread " +
                 std::to_string(position.thread.x) + ": " + what;
  running.is_on = false;
  swapcontext(&current->context, &scheduler);
  __builtin_unreachable();
}

[[gnu::weak]] bool start(const Launch& what) { return run(what); }

const char* failure() { return failure_text.c_str(); }

bool run(const Launch& what) {
  launch = &what;
  failure_text.clear();
  position.block_size = {what.block, 1, 1};
  position.grid_size = {what.grid, 1, 1};
  std::vector<unsigned> blocks(only_blocks);
  if (blocks.empty()) {
    blocks.resize(what.grid);
    std::iota(blocks.begin(), blocks.end(), 0u);
  }
  std::shuffle(blocks.begin(), blocks.end(), order);
  begin_launch();
  for (const unsigned block : blocks) {
    if (block < what.grid && failure_text.empty()) run_block(block);
  }
  end_launch();
  return failure_text.empty();
}

void wait_for_block() { leave(State::kAtBarrier); }

std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned source_lane) {
  const unsigned lane = position.thread.x % kWarp;
  if ((mask >> lane & 1u) == 0) fail("a shuffle without the lane that calls it");
  if (source_lane >= kWarp || (mask >> source_lane & 1u) == 0) fail("a shuffle from a lane outside its mask");
  Fiber* const self = current;
  self->mask = mask;
  self->source_lane = source_lane;
  self->value = value;
  leave(State::kAtShuffle);
  return self->value;
}

}  // namespace emulate

extern "C" {

/// Empty if the last launch went well.
const char* emulate_failure() { return emulate::failure(); }

/// Another order of blocks and threads.
void emulate_seed(std::uint64_t seed) { emulate::order.seed(seed); }

/// The next launches run these blocks alone; with none given, all.
void emulate_only_blocks(const unsigned* blocks, int count) {
  emulate::only_blocks.assign(blocks, blocks + count);
}
}
