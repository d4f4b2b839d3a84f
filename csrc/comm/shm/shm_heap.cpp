#include "comm/shm/shm_heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "common/check.h"
#include "common/sizes.h"

namespace bmtrain {
namespace {

constexpr std::uint64_t kAlignment = std::uint64_t{1} << 21;  // of a huge page
// Far beyond what rank 0 uses for its own buffers; files take memory only where they are used.
constexpr std::uint64_t kCommonBegin = std::uint64_t{1} << 40;
// Gradients of one size: those of the block at hand, and those that are being summed meanwhile.
constexpr int kOwnBuffers = 2;
// Gathered parameters of one size: of the block at hand and of the next. More where they are in use.
constexpr int kCommonBuffers = 2;
// Of a buffer that so many uses of others have passed over, the memory is given back.
constexpr std::uint64_t kIdleUses = 4096;

}  // namespace

ShmHeap::ShmHeap(const std::vector<int>& files, std::vector<ShmHeapTable*> tables, int rank,
                 std::uint64_t begin)
    : rank_(rank),
      tables_(std::move(tables)),
      own_end_(round_up(begin, kAlignment)),
      common_end_(kCommonBegin) {
  for (const int file : files) {
    files_.emplace_back(fcntl(file, F_DUPFD_CLOEXEC, 0));
    BMT_CHECK(CommunicationError, files_.back().is_open(),
              "shared memory: cannot keep a memory file open: ", std::strerror(errno));
  }
  page_map_ = FileDescriptor(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
}

ShmHeap::~ShmHeap() {
  for (const auto& [address, length] : mappings_) {
    munmap(address, length);
  }
}

char* ShmHeap::try_map(int file, std::uint64_t offset, std::int64_t bytes, bool is_private) {
  const auto length = static_cast<std::size_t>(bytes);
  // Makes the file long enough, and never shorter: several ranks may be here at once.
  const auto last = static_cast<off_t>(offset + length - 1);
  void* address = MAP_FAILED;
  int failed = 0;
  do {
    failed = fallocate(file, 0, last, 1);
  } while (failed != 0 && errno == EINTR);  // a signal came: a timer's, a child's
  if (failed == 0) {
    address = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                   (is_private ? MAP_PRIVATE : MAP_SHARED) | MAP_NORESERVE, file, static_cast<off_t>(offset));
  }
  if (address == MAP_FAILED) {
    return nullptr;
  }
  madvise(address, length, MADV_HUGEPAGE);  // a hint: its failure costs speed, not correctness
  mappings_.emplace_back(address, length);
  return static_cast<char*>(address);
}

char* ShmHeap::map(int file, std::uint64_t offset, std::int64_t bytes, bool is_private) {
  char* const address = try_map(file, offset, bytes, is_private);
  BMT_CHECK(CommunicationError, address != nullptr, "shared memory: cannot map a buffer of ", bytes,
            " bytes: ", std::strerror(errno),
            ": raise the limits on address space and on memory (ulimit -v, vm.overcommit_memory, the "
            "container's), or set BMTRAIN_CPU_TRANSPORT=gloo, which maps less");
  return address;
}

std::int64_t ShmHeap::bytes() const {
  std::int64_t own = 0;
  std::int64_t common = 0;
  for (int slot = 0; slot < num_own_; ++slot) {
    own += own_[slot].is_empty ? 0 : own_[slot].bytes;
  }
  for (int slot = 0; slot < num_common_; ++slot) {
    common += common_[slot].is_empty ? 0 : common_[slot].bytes;
  }
  return own + common / static_cast<std::int64_t>(tables_.size());
}

int ShmHeap::borrow_own(std::int64_t bytes) {
  int alike = 0;
  bool is_read = false;
  for (int slot = 0; slot < num_own_; ++slot) {
    if (own_[slot].bytes == bytes) {
      ++alike;
      if (is_free(slot)) {
        return lend_own(slot);
      }
      is_read |= !own_[slot].lent.load();
    }
  }
  if (is_read) {
    return kBeingRead;
  }
  if (alike == kOwnBuffers || num_own_ == ShmHeapTable::kSlots) {
    return kNone;
  }
  Own& buffer = own_[num_own_];
  buffer.data = try_map(files_[index(rank_)].get(), own_end_, bytes, /*is_private=*/false);
  if (buffer.data == nullptr) {
    return kNone;
  }
  buffer.bytes = bytes;
  buffer.offset = own_end_;
  own_end_ = round_up(own_end_ + static_cast<std::uint64_t>(bytes), kAlignment);
  return lend_own(num_own_++);
}

bool ShmHeap::is_free(int own_slot) const {
  return !own_[own_slot].lent.load(std::memory_order_acquire) &&
         tables_[index(rank_)]->readers[own_slot].load() == 0;
}

int ShmHeap::lend_own(int slot) {
  Own& buffer = own_[slot];
  buffer.lent.store(true);
  buffer.is_empty = false;
  buffer.use = ++own_uses_;
  give_own_memory_back(kIdleUses);
  return slot;
}

void ShmHeap::give_own_memory_back(std::uint64_t least_uses) {
  for (int slot = 0; slot < num_own_; ++slot) {
    Own& buffer = own_[slot];
    if (!buffer.is_empty && own_uses_ - buffer.use >= least_uses && is_free(slot)) {
      empty(files_[index(rank_)].get(), buffer.offset, buffer.bytes);
      buffer.is_empty = true;
    }
  }
}

void ShmHeap::empty(int file, std::uint64_t offset, std::int64_t bytes) const {
  const auto length = static_cast<off_t>(round_up(static_cast<std::uint64_t>(bytes), kPage));
  fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), length);
}

int ShmHeap::find_own(const char* data, std::int64_t bytes) const {
  for (int slot = 0; slot < num_own_; ++slot) {
    if (own_[slot].data == data && own_[slot].bytes == bytes) {
      return slot;
    }
  }
  return kNone;
}

void ShmHeap::expect_readers(int slot) {
  tables_[index(rank_)]->readers[slot].store(static_cast<std::uint32_t>(tables_.size() - 1));
}

const char* ShmHeap::map_peer(int peer, std::uint64_t offset, std::int64_t bytes) {
  const char*& address = peers_[{peer, offset}];
  if (address == nullptr) {
    address = map(files_[index(peer)].get(), offset, bytes, /*is_private=*/false);
  }
  return address;
}

int ShmHeap::borrow_common(std::int64_t bytes) {
  int alike = 0;
  int oldest = kNone;
  for (int slot = 0; slot < num_common_; ++slot) {
    Common& buffer = common_[slot];
    buffer.lent = buffer.lent && !is_retired(slot);
    if (buffer.bytes == bytes) {
      ++alike;
      if (!buffer.lent && (oldest == kNone || buffer.use < common_[oldest].use)) {
        oldest = slot;
      }
    }
  }
  if (oldest == kNone || alike < kCommonBuffers) {
    if (num_common_ == ShmHeapTable::kSlots) {
      return kNone;
    }
    oldest = make_common(bytes);
  }
  Common& buffer = common_[oldest];
  begin_use(buffer);
  buffer.lent = true;
  buffer.is_empty = false;
  give_memory_back();
  return oldest;
}

int ShmHeap::make_common(std::int64_t bytes) {
  Common& made = common_[num_common_];
  made.view = map(files_[0].get(), common_end_, bytes, /*is_private=*/true);
  made.shared = map(files_[0].get(), common_end_, bytes, /*is_private=*/false);
  made.bytes = bytes;
  made.offset = common_end_;
  common_end_ = round_up(common_end_ + static_cast<std::uint64_t>(bytes), kAlignment);
  return num_common_++;
}

void ShmHeap::begin_use(Common& buffer) {
  buffer.before = buffer.use;
  buffer.use = ++uses_;
  buffer.since = settled_;
}

void ShmHeap::end_use(int slot) { tables_[index(rank_)]->given_back[slot].store(common_[index(slot)].use); }

void ShmHeap::give_back_common(int slot) {
  Common& buffer = common_[index(slot)];
  drop_private_pages(buffer);
  buffer.lent = false;
  end_use(slot);
}

void ShmHeap::retire_common(int slot, std::uint64_t use, std::uint64_t num_posted) {
  const Common& buffer = common_[index(slot)];
  if (buffer.lent && buffer.use == use) {
    drop_private_pages(buffer);
    tables_[index(rank_)]->retired[slot].store(num_posted + 1);
    end_use(slot);
  }
}

bool ShmHeap::is_retired(int slot) const {
  return std::all_of(tables_.begin(), tables_.end(), [&](const ShmHeapTable* table) {
    const std::uint64_t at = table->retired[slot].load();
    return common_[index(slot)].since < at && at <= settled_;
  });
}

void ShmHeap::give_memory_back() {
  for (int slot = 0; slot < num_common_; ++slot) {
    Common& buffer = common_[slot];
    if (buffer.lent || buffer.is_empty || uses_ - buffer.use < kIdleUses) {
      continue;
    }
    // A use of its own, of which all ranks have to let go before the next: the last one to be done with the
    // memory frees it before it says so.
    begin_use(buffer);
    buffer.is_empty = true;
    if ((tables_[0]->emptied[slot].fetch_add(1) + 1) % tables_.size() == 0) {
      empty(files_[0].get(), buffer.offset, buffer.bytes);
    }
    end_use(slot);
  }
}

int ShmHeap::find_common(const char* view, std::int64_t bytes) const {
  for (int slot = 0; slot < num_common_; ++slot) {
    if (common_[slot].view == view && common_[slot].bytes == bytes) {
      return slot;
    }
  }
  return kNone;
}

bool ShmHeap::has_given_back(int peer, int slot) const {
  return tables_[index(peer)]->given_back[slot].load() >= common_[index(slot)].before;
}

void ShmHeap::drop_private_pages(const Common& buffer) const {
  // Of each page: bit 63, whether it is there; bit 61, whether it is the file's and not a copy of ours.
  constexpr std::uint64_t kEntry = sizeof(std::uint64_t);
  constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
  constexpr std::uint64_t kFile = std::uint64_t{1} << 61;
  constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t first = reinterpret_cast<std::uint64_t>(buffer.view) / page;
  const std::uint64_t count = (static_cast<std::uint64_t>(buffer.bytes) + page - 1) / page;
  std::array<std::uint64_t, 1024> entries{};
  bool is_clean = page_map_.is_open();
  for (std::uint64_t at = 0; at < count && is_clean; at += entries.size()) {
    const std::uint64_t wanted = std::min<std::uint64_t>(entries.size(), count - at);
    const auto got =
        pread(page_map_.get(), entries.data(), wanted * kEntry, static_cast<off_t>((first + at) * kEntry));
    is_clean = got == static_cast<ssize_t>(wanted * kEntry) &&
               std::none_of(entries.begin(), entries.begin() + wanted, [](std::uint64_t entry) {
                 return (entry & kSwapped) != 0 || ((entry & kPresent) != 0 && (entry & kFile) == 0);
               });
  }
  if (!is_clean) {
    madvise(buffer.view, static_cast<std::size_t>(buffer.bytes), MADV_DONTNEED);
  }
}

}  // namespace bmtrain
