// Drives ThreadQueue with allocations that fail at the start of a transfer: see
// tests/unit/test_disk_queue.py, which gives the folder of the file.
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

// Whether a read starts with so many allocations.
bool starts(const Queue& queue, const File& file, int allocations) {
  allocations_left = allocations;
  bool is_started = true;
  try {
    queue->read(0, file, 0, bmtrain::kDiskAlignment);
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

}  // namespace

int main(int, char** arguments) {
  const auto file = std::make_shared<bmtrain::DiskFile>(arguments[1]);
  file->reserve(bmtrain::kDiskAlignment);
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
  std::puts("ok");
}
