#include "disk/disk_queue.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/race_point.h"
#include "disk/thread_queue.h"
#include "disk/transfer_fault.h"
#include "disk/uring_queue.h"

namespace bmtrain {

std::shared_ptr<DiskQueue> DiskQueue::make(const std::string& back_end, int num_buffers,
                                           std::int64_t buffer_bytes) {
  BMT_CHECK(ValueError, back_end == "auto" || back_end == "io_uring" || back_end == "threads",
            "back end of the disk tier: expected 'auto', 'io_uring' or 'threads', got '", back_end, "'");
  std::string reason;
  if (back_end != "threads") {
    try {
      return std::make_shared<UringQueue>(num_buffers, buffer_bytes);
    } catch (const DiskError& error) {
      if (back_end == "io_uring") throw;
      reason = error.what();
    }
  }
  std::shared_ptr<DiskQueue> queue = std::make_shared<ThreadQueue>(num_buffers, buffer_bytes);
  queue->reason_ = std::move(reason);
  return queue;
}

DiskQueue::DiskQueue(int num_buffers, std::int64_t buffer_bytes)
    : buffer_bytes_(buffer_bytes), owner_(getpid()), transfers_(static_cast<std::size_t>(num_buffers)) {
  BMT_CHECK(ValueError, num_buffers > 0 && buffer_bytes >= 0 && buffer_bytes % kDiskAlignment == 0,
            "disk queue: expected some buffers of a multiple of ", kDiskAlignment, " bytes, got ",
            num_buffers, " of ", buffer_bytes);
  if (buffer_bytes == 0) return;
  const auto nbytes = static_cast<std::size_t>(num_buffers * buffer_bytes);
  void* const memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  BMT_CHECK(DiskError, memory != MAP_FAILED, "disk queue: no memory for ", nbytes,
            " bytes of buffers: ", std::strerror(errno));
  // A child would share these pages until one of both writes, while the drive does.
  ::madvise(memory, nbytes, MADV_DONTFORK);
  memory_ = static_cast<char*>(memory);
}

DiskQueue::~DiskQueue() {
  if (memory_ != nullptr && !is_forked()) {
    ::munmap(memory_, static_cast<std::size_t>(num_buffers() * buffer_bytes_));
  }
}

bool DiskQueue::is_forked() const { return getpid() != owner_; }

void DiskQueue::read(int buffer, std::shared_ptr<DiskFile> file, std::int64_t offset, std::int64_t nbytes,
                     std::shared_ptr<char> memory) {
  start(buffer, {.file = std::move(file), .memory = std::move(memory), .offset = offset, .nbytes = nbytes});
}

void DiskQueue::write(int buffer, std::shared_ptr<DiskFile> file, std::int64_t offset, std::int64_t nbytes,
                      std::shared_ptr<char> memory) {
  start(buffer, {.file = std::move(file),
                 .memory = std::move(memory),
                 .offset = offset,
                 .nbytes = nbytes,
                 .is_write = true});
}

void DiskQueue::start(int number, Transfer transfer) {
  BMT_CHECK(StateError, !is_forked(), "disk queue: this process was forked after the queue was made");
  BMT_CHECK(ValueError, number >= 0 && number < num_buffers(), "disk queue: expected a buffer from 0 to ",
            num_buffers() - 1, ", got ", number);
  Transfer& slot = transfers_[static_cast<std::size_t>(number)];
  BMT_CHECK(StateError, !slot.file, "disk queue: buffer ", number, " has a transfer already");
  const auto [offset, nbytes] = std::pair(transfer.offset, transfer.nbytes);
  BMT_CHECK(ValueError,
            offset >= 0 && nbytes > 0 && (transfer.memory || nbytes <= buffer_bytes_) &&
                offset % kDiskAlignment == 0 && nbytes % kDiskAlignment == 0 &&
                offset + nbytes <= transfer.file->size() &&
                reinterpret_cast<std::uintptr_t>(transfer.memory.get()) % kDiskAlignment == 0,
            transfer.file->name(), ": expected an aligned range of ", transfer.file->size(),
            " bytes, at most a buffer of ", buffer_bytes_, ", got ", nbytes, " at ", offset);
  // Sealed before it is there: a write that fails is an error, after which nothing is read.
  if (transfer.is_write) transfer.file->seal(offset, nbytes, data(transfer, number));
  slot = std::move(transfer);  // from here on it is awaited
  submit(number);
}

void DiskQueue::wait(int number) {
  BMT_CHECK(StateError, !is_forked(), "disk queue: this process was forked after the queue was made");
  Transfer& transfer = transfers_.at(static_cast<std::size_t>(number));
  if (!transfer.file) return;
  race_point();
  while (transfer.done < transfer.nbytes) {
    std::int64_t result = complete(number);
    if (const TransferFault fault = transfer_fault.load(std::memory_order_relaxed); fault != nullptr) {
      result = fault(transfer.is_write, transfer.offset + transfer.done, result);
    }
    if (result == -EINTR || result == -EAGAIN)
      result = 0;
    else if (result <= 0) {
      const std::shared_ptr<DiskFile> file = std::move(transfer.file);
      transfer.memory = nullptr;
      throw DiskError(
          detail::join(file->name(), ": ", transfer.is_write ? "writing " : "reading ", transfer.nbytes,
                       " bytes at offset ", transfer.offset, ": ",
                       result < 0 ? std::strerror(static_cast<int>(-result))
                                  : detail::join("the file ended after ", transfer.done, " bytes").c_str()));
    }
    transfer.done += result;
    if (transfer.done < transfer.nbytes) submit(number);
  }
  (transfer.is_write ? bytes_written_ : bytes_read_) += transfer.nbytes;
  const Transfer ended = std::exchange(transfer, {});
  if (!ended.is_write) {
    ended.file->check(ended.offset, ended.nbytes, data(ended, number));
  }
}

void DiskQueue::drain() noexcept {
  if (is_forked()) return;
  for (int number = 0; number < num_buffers(); ++number) {
    if (transfers_[static_cast<std::size_t>(number)].file) static_cast<void>(complete(number));
    transfers_[static_cast<std::size_t>(number)] = {};
  }
}

}  // namespace bmtrain
