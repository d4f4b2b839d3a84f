// Ranks of a driver: threads of one process, and memory that several of them map.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <thread>
#include <vector>

#include "expect.h"

/// A file in memory of so many bytes; the caller closes it.
inline int memory_file(std::size_t bytes) {
  const int file = memfd_create("bmtrain", MFD_CLOEXEC);
  expect(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0, "a memory file");
  return file;
}

/// Runs `work(rank)` of every rank in a thread of its own, and waits for all of them.
template <typename Work>
void run_in_threads(int ranks, const Work& work) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&work, rank] { work(rank); });
  for (std::thread& thread : threads) thread.join();
}
