// Drives queues with allocations that fail at the start of a transfer: see tests/unit/test_disk_queue.py,
// which gives the folder of the file.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "common/check.h"
#include "cpu/isa.h"
#include "disk/disk_file.h"
#include "disk/disk_queue.h"
#include "expect.h"

namespace {

constexpr int kAll = -1;
thread_local int allocations_left = kAll;

}  // namespace

// Checksums need nothing else of the kernels.
bmtrain::cpu::IsaLevel bmtrain::cpu::isa_level() { return IsaLevel::kBase; }

void* operator new(std::size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using Queue = std::shared_ptr<bmtrain::DiskQueue>;
using File = std::shared_ptr<bmtrain::DiskFile>;

// Whether a transfer starts with so many allocations.
bool starts(const Queue& queue, const File& file, int allocations, bool is_write = false) {
  allocations_left = allocations;
  bool is_started = true;
  try {
    is_write ? queue->write(0, file, 0, bmtrain::kDiskAlignment)
             : queue->read(0, file, 0, bmtrain::kDiskAlignment);
  } catch (const std::bad_alloc&) {
    is_started = false;
  }
  allocations_left = kAll;
  return is_started;
}

// Whether the transfer that has not started is an error where it is awaited.
bool fails(const Queue& queue) {
  try {
    queue->wait(0);
  } catch (const bmtrain::DiskError& error) {
    return std::string(error.what()).find("Input/output error") != std::string::npos;
  }
  return false;
}

void start_reads(const File& file) {
  int allocations = 0;
  for (bool is_started = false; !is_started; ++allocations) {
    for (const bool is_awaited : {true, false}) {  // else the queue ends with it
      const Queue queue = bmtrain::DiskQueue::make("threads", 1, bmtrain::kDiskAlignment);
      is_started = starts(queue, file, allocations);
      if (is_started || !is_awaited) continue;
      expect(fails(queue), "an error");
      expect(starts(queue, file, kAll), "another transfer");
      queue->wait(0);
    }
  }
  expect(allocations > 2, "allocations that fail");
}

// What has no checksum is not written, and the result of the transfer before it is not taken for its own.
void start_writes(const File& file, const char* back_end) {
  Queue queue;
  try {
    queue = bmtrain::DiskQueue::make(back_end, 1, bmtrain::kDiskAlignment);
  } catch (const bmtrain::DiskError&) {
    return;  // not here
  }
  expect(starts(queue, file, kAll, /*is_write=*/true), "a write");
  queue->wait(0);
  int allocations = 0;
  for (; !starts(queue, file, allocations, /*is_write=*/true); ++allocations) {
    try {
      queue->wait(0);
    } catch (const bmtrain::DiskError&) {
      // Its checksum was there, and no thread.
    }
    expect(queue->bytes_written() == bmtrain::kDiskAlignment, "the first write alone");
  }
  queue->wait(0);
  expect(queue->bytes_written() == 2 * bmtrain::kDiskAlignment, "another write");
  expect(allocations > 1, "checksums that fail");
}

}  // namespace

int main(int, char** arguments) {
  const auto file = std::make_shared<bmtrain::DiskFile>(arguments[1]);
  file->reserve(bmtrain::kDiskAlignment);
  start_reads(file);
  for (const char* const back_end : {"threads", "io_uring"}) start_writes(file, back_end);
  std::puts("ok");
}
