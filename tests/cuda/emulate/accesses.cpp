// Every access to memory: allowed, aligned, written before, raced for; and counted.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "fibers.h"

namespace emulate {
namespace {

// Who touched a byte: 0 nobody, kMany several.
using Who = std::uint32_t;
constexpr Who kMany = ~Who{0};

// Memory that a launch was given.
struct Region {
  std::uintptr_t begin, end;
  bool is_writable;
  std::string name;
  Who *written, *read;  // for every byte; nullptr for memory too large for it
  std::uint64_t bytes_read = 0, bytes_written = 0;
};
constexpr std::size_t kMostShadowed = std::size_t{64} << 20;

std::vector<Region> regions;  // by address
Region* last_found = nullptr;

// What lanes of a warp ask for in one instruction: the sectors of 32 bytes that it needs.
struct Request {
  std::uint64_t warp, instruction, turn, sector;
  bool operator<(const Request& b) const {
    return std::tie(warp, instruction, turn, sector) < std::tie(b.warp, b.instruction, b.turn, b.sector);
  }
  bool operator==(const Request& b) const = default;
};
bool counts_requests = false;
std::vector<Request> requests;
std::unordered_map<std::uint64_t, std::uint64_t> turns;  // of each thread at each instruction
std::uint64_t bytes_requested = 0;

// [Note: Where shared memory lies]
// A __shared__ variable is a thread-local one here, so all of them lie in one segment of this library, which
// the loader knows the bounds of. Blocks run one after another, and each finds it full of garbage.
struct SharedByte {
  Who writer, reader;
  std::uint32_t written_in, read_in;  // the phase
};
thread_local char segment_is_there;
std::uintptr_t shared_begin = 0, shared_end = 0;
std::vector<SharedByte> shared;

int find_segment(dl_phdr_info* info, std::size_t /*size*/, void* here) {
  const auto address = reinterpret_cast<std::uintptr_t>(here);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto begin = reinterpret_cast<std::uintptr_t>(info->dlpi_tls_data);
    const std::size_t size = info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type != PT_TLS || address < begin || address >= begin + size) continue;
    shared_begin = begin;
    shared_end = begin + size;
    return 1;
  }
  return 0;
}

Who* new_shadow(std::size_t bytes) {
  if (bytes == 0 || bytes > kMostShadowed) return nullptr;
  return static_cast<Who*>(mmap(nullptr, bytes * sizeof(Who), PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

void clear_shadow(const Region& region) {
  const std::size_t bytes = (region.end - region.begin) * sizeof(Who);
  if (region.written == nullptr) return;
  madvise(region.written, bytes, MADV_DONTNEED);
  madvise(region.read, bytes, MADV_DONTNEED);
}

std::string where(std::uintptr_t address) {
  for (const Region& region : regions) {
    if (address + 64 < region.begin || address >= region.end + 64) continue;
    const auto offset = static_cast<std::int64_t>(address - region.begin);
    return "byte " + std::to_string(offset) + " of " + region.name + " (" +
           std::to_string(region.end - region.begin) + " bytes)";
  }
  return "memory that the launch was not given";
}

void check_shared(std::uintptr_t address, std::size_t size, bool writes) {
  const auto self = static_cast<Who>(running.thread);
  for (std::size_t k = 0; k < size; ++k) {
    SharedByte& byte = shared[address - shared_begin + k];
    const bool raced = byte.writer != 0 && byte.writer != self && byte.written_in == running.phase;
    const bool read_by_others = byte.reader != 0 && byte.reader != self && byte.read_in == running.phase;
    if (raced || (writes && read_by_others)) fail("a race on shared memory between two barriers");
    if (writes) {
      byte.writer = self;
      byte.written_in = running.phase;
    } else {
      if (byte.writer == 0) fail("a read of shared memory that no thread of the block has written");
      byte.reader = byte.read_in == running.phase && byte.reader != 0 && byte.reader != self ? kMany : self;
      byte.read_in = running.phase;
    }
  }
}

Region* find_region(std::uintptr_t address, std::size_t size) {
  const auto holds = [&](const Region& r) { return address >= r.begin && address + size <= r.end; };
  if (last_found != nullptr && holds(*last_found)) return last_found;
  for (Region& region : regions) {
    if (holds(region)) return last_found = &region;
  }
  return nullptr;
}

void check_races(const Region& region, std::uintptr_t address, std::size_t size, bool writes) {
  const auto self = static_cast<Who>(running.thread);
  for (std::size_t k = 0; k < size; ++k) {
    const std::size_t at = address - region.begin + k;
    Who &writer = region.written[at], &reader = region.read[at];
    const bool raced = (writer != 0 && writer != self) || (writes && reader != 0 && reader != self);
    if (raced) fail("two threads at " + where(address + k) + ", of which one writes");
    if (writes) {
      writer = self;
    } else {
      reader = reader == 0 || reader == self ? self : kMany;
    }
  }
}

void count_request(std::uintptr_t address, std::size_t size, const void* instruction) {
  const auto pc = reinterpret_cast<std::uint64_t>(instruction);
  const std::uint64_t turn = turns[running.thread << 40 ^ pc]++;
  const std::uint64_t warp = std::uint64_t{position.block.x} * 64 + position.thread.x / 32;
  for (std::uint64_t s = address / 32; s <= (address + size - 1) / 32; ++s)
    requests.push_back({warp, pc, turn, s});
  bytes_requested += size;
}

}  // namespace

void begin_launch() {
  if (shared_begin == 0) {
    segment_is_there = 1;
    dl_iterate_phdr(find_segment, &segment_is_there);
    shared.resize(shared_end - shared_begin);
  }
  last_found = nullptr;
  for (const Region& region : regions) clear_shadow(region);
}

void begin_block() {
  std::memset(reinterpret_cast<void*>(shared_begin), 0xff, shared_end - shared_begin);  // NaN as any float
  std::fill(shared.begin(), shared.end(), SharedByte{});
}

void end_launch() {}

void touch(const void* pointer, std::size_t size, bool writes, const void* instruction) {
  if (!running.is_on) return;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address - running.stack < kStackBytes) return;
  if (address - reinterpret_cast<std::uintptr_t>(&position) < sizeof(position) && !writes) return;
  if ((size == 1 || size == 2 || size == 4 || size == 8 || size == 16) && address % size != 0)
    fail("an access of " + std::to_string(size) + " bytes at " + where(address) + ", which is not aligned");
  if (address >= shared_begin && address + size <= shared_end) return check_shared(address, size, writes);
  Region* const region = find_region(address, size);
  if (region == nullptr)
    fail("an access of " + std::to_string(size) + " bytes out of bounds, at " + where(address));
  if (writes && !region->is_writable) fail("a write to " + where(address) + ", which is input");
  if (region->written != nullptr) check_races(*region, address, size, writes);
  (writes ? region->bytes_written : region->bytes_read) += size;
  if (counts_requests) count_request(address, size, instruction);
}

}  // namespace emulate

extern "C" {

/// Gives the next launches memory. Its counters start at 0.
void emulate_give(void* begin, std::int64_t bytes, int is_writable, const char* name) {
  using namespace emulate;  // NOLINT(google-build-using-namespace)
  const auto size = static_cast<std::size_t>(bytes);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  regions.push_back({address, address + size, is_writable != 0, name, new_shadow(size), new_shadow(size)});
}

/// Bytes read and written in the memory given as number `index` since then.
void emulate_counts(int index, std::int64_t* read, std::int64_t* written) {
  *read = static_cast<std::int64_t>(emulate::regions[static_cast<std::size_t>(index)].bytes_read);
  *written = static_cast<std::int64_t>(emulate::regions[static_cast<std::size_t>(index)].bytes_written);
}

/// Takes all memory back.
void emulate_take_back() {
  using namespace emulate;  // NOLINT(google-build-using-namespace)
  for (const Region& region : regions) {
    const std::size_t bytes = (region.end - region.begin) * sizeof(Who);
    if (region.written == nullptr) continue;
    munmap(region.written, bytes);
    munmap(region.read, bytes);
  }
  regions.clear();
  last_found = nullptr;
}

/// From now on, sectors that warps ask for are counted (slow), or (0) no more.
void emulate_count_requests(int on) {
  emulate::counts_requests = on != 0;
  emulate::requests.clear();
  emulate::turns.clear();
  emulate::bytes_requested = 0;
}

/// Bytes that threads have asked for, and those of the sectors that this took.
void emulate_requests(std::int64_t* bytes, std::int64_t* sector_bytes) {
  auto& all = emulate::requests;
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  *bytes = static_cast<std::int64_t>(emulate::bytes_requested);
  *sector_bytes = static_cast<std::int64_t>(all.size() * 32);
}

#define BMT_HOOK(size)                                                       \
  void __tsan_read##size(void* at) {                                         \
    emulate::touch(at, size, /*writes=*/false, __builtin_return_address(0)); \
  }                                                                          \
  void __tsan_write##size(void* at) {                                        \
    emulate::touch(at, size, /*writes=*/true, __builtin_return_address(0));  \
  }
BMT_HOOK(1)
BMT_HOOK(2)
BMT_HOOK(4)
BMT_HOOK(8)
BMT_HOOK(16)

void __tsan_read_range(void* at, std::size_t size) {
  emulate::touch(at, size, /*writes=*/false, __builtin_return_address(0));
}
void __tsan_write_range(void* at, std::size_t size) {
  emulate::touch(at, size, /*writes=*/true, __builtin_return_address(0));
}
void __tsan_vptr_update(void** at, void* /*value*/) {
  emulate::touch(at, sizeof(void*), /*writes=*/true, __builtin_return_address(0));
}
void __tsan_func_entry(void* /*caller*/) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
