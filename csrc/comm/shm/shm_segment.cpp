#include "comm/shm/shm_segment.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t) &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "a futex is a plain 32-bit word");

long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void ShmBell::ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    futex(&count_, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void ShmBell::sleep(std::uint32_t seen, int milliseconds) {
  const timespec timeout{milliseconds / 1000, (milliseconds % 1000) * 1'000'000L};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  futex(&count_, FUTEX_WAIT, seen, &timeout);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

ShmSegment::ShmSegment(int file, std::size_t bytes) : bytes_(bytes) {
  struct stat status{};
  BMT_CHECK(CommunicationError,
            fstat(file, &status) == 0 && static_cast<std::size_t>(status.st_size) == bytes,
            "shared memory: expected a file of ", bytes, " bytes, got ", status.st_size);
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  BMT_CHECK(CommunicationError, address != MAP_FAILED, "shared memory: cannot map ", bytes,
            " bytes: ", std::strerror(errno));
  data_ = static_cast<char*>(address);
}

ShmSegment::~ShmSegment() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
}

ShmSegment::ShmSegment(ShmSegment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

ShmSegment& ShmSegment::operator=(ShmSegment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace bmtrain
