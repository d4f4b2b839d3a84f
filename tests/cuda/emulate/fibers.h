// Between the scheduler (machine.cpp) and the checks of memory (accesses.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "machine.h"

namespace emulate {

constexpr std::size_t kStackBytes = std::size_t{64} << 10;

/// The thread that runs, as the checks see it.
struct Running {
  bool is_on = false;        // whether a kernel's thread runs at all
  std::uintptr_t stack = 0;  // its own memory: kStackBytes from here
  std::uint64_t thread = 0;  // counted through all blocks, from 1
  std::uint32_t phase = 0;   // barriers that its block has passed
};
extern Running running;

/// Ends the launch: the thread that runs never goes on.
[[noreturn]] void fail(const std::string& what);

void begin_launch();
void begin_block();
void end_launch();

}  // namespace emulate
