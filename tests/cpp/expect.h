// What a driver of the core asserts.
#pragma once

#include <cstdio>
#include <cstdlib>

/// Ends the process, without waiting for its threads, if something is not as it should be.
inline void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::_Exit(1);
}
