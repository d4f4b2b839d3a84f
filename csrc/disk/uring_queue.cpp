#include "disk/uring_queue.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "common/check.h"

namespace bmtrain {
namespace {

constexpr std::int64_t kNoResult = INT64_MIN;

unsigned acquire(unsigned* number) {
  return std::atomic_ref<unsigned>(*number).load(std::memory_order_acquire);
}

void release(unsigned* number, unsigned value) {
  std::atomic_ref<unsigned>(*number).store(value, std::memory_order_release);
}

}  // namespace

UringQueue::UringQueue(int num_buffers, std::int64_t buffer_bytes)
    : DiskQueue(num_buffers, buffer_bytes),
      vectors_(static_cast<std::size_t>(num_buffers)),
      results_(static_cast<std::size_t>(num_buffers), kNoResult) {
  io_uring_params params{};
  // The descriptor is closed on exec.
  ring_ = FileDescriptor(static_cast<int>(syscall(SYS_io_uring_setup, num_buffers, &params)));
  BMT_CHECK(DiskError, ring_.is_open(), "io_uring_setup: ", std::strerror(errno));
  BMT_CHECK(DiskError, (params.features & IORING_FEAT_SINGLE_MMAP) != 0, "io_uring: the kernel is too old");
  map_rings(params);
  if (buffer_bytes == 0) return;
  std::vector<iovec> buffers;
  for (int i = 0; i < num_buffers; ++i) {
    buffers.push_back({.iov_base = buffer(i), .iov_len = static_cast<std::size_t>(buffer_bytes)});
  }
  // Old kernels count them as locked memory, of which there may be too little.
  has_registered_ =
      syscall(SYS_io_uring_register, ring_.get(), IORING_REGISTER_BUFFERS, buffers.data(), num_buffers) == 0;
}

void UringQueue::map_rings(const io_uring_params& params) {
  const auto map = [&](std::size_t nbytes, std::int64_t which) {
    void* const place =
        ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_.get(), which);
    BMT_CHECK(DiskError, place != MAP_FAILED, "io_uring: mapping a ring: ", std::strerror(errno));
    ::madvise(place, nbytes, MADV_DONTFORK);
    return place;
  };
  rings_bytes_ = std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                       params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
  entries_ = static_cast<io_uring_sqe*>(map(entries_bytes_, IORING_OFF_SQES));
  const auto at = [&](unsigned offset) {
    return reinterpret_cast<unsigned*>(static_cast<char*>(rings_) + offset);
  };
  submit_head_ = at(params.sq_off.head);
  submit_tail_ = at(params.sq_off.tail);
  submit_order_ = at(params.sq_off.array);
  submit_mask_ = *at(params.sq_off.ring_mask);
  ended_head_ = at(params.cq_off.head);
  ended_tail_ = at(params.cq_off.tail);
  ended_mask_ = *at(params.cq_off.ring_mask);
  ended_ = reinterpret_cast<io_uring_cqe*>(at(params.cq_off.cqes));
}

UringQueue::~UringQueue() {
  if (is_forked()) return;  // the rings are not mapped here
  drain();
  ::munmap(rings_, rings_bytes_);
  ::munmap(entries_, entries_bytes_);
}

int UringQueue::enter(unsigned num_new, unsigned num_awaited, unsigned flags) {
  count_call();
  const auto done = syscall(SYS_io_uring_enter, ring_.get(), num_new, num_awaited, flags, nullptr, 0);
  return done < 0 ? errno : 0;
}

void UringQueue::submit(int buffer) {
  const Transfer& now = transfer(buffer);
  const auto index = static_cast<std::size_t>(buffer);
  results_[index] = kNoResult;
  vectors_[index] = {.iov_base = data(now, buffer) + now.done,
                     .iov_len = static_cast<std::size_t>(now.nbytes - now.done)};
  const unsigned tail =
      *submit_tail_;  // written by this side only; there is room, since each buffer has one entry
  io_uring_sqe& entry = entries_[tail & submit_mask_];
  entry = {};
  entry.fd = now.file->descriptor();
  entry.off = static_cast<std::uint64_t>(now.offset + now.done);
  entry.user_data = static_cast<std::uint64_t>(buffer);
  if (has_registered_ && !now.memory) {
    entry.opcode = now.is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    entry.addr = reinterpret_cast<std::uint64_t>(vectors_[index].iov_base);
    entry.len = static_cast<std::uint32_t>(vectors_[index].iov_len);
    entry.buf_index = static_cast<std::uint16_t>(buffer);
  } else {
    entry.opcode = now.is_write ? IORING_OP_WRITEV : IORING_OP_READV;
    entry.addr = reinterpret_cast<std::uint64_t>(&vectors_[index]);
    entry.len = 1;
  }
  submit_order_[tail & submit_mask_] = tail & submit_mask_;
  release(submit_tail_, tail + 1);
  // Where the kernel takes no more just now, `complete` submits again.
  static_cast<void>(enter(1, 0, 0));
}

void UringQueue::reap() {
  unsigned head = *ended_head_;
  for (; head != acquire(ended_tail_); ++head) {
    const io_uring_cqe& end = ended_[head & ended_mask_];
    results_[static_cast<std::size_t>(end.user_data)] = end.res;
  }
  release(ended_head_, head);
}

std::int64_t UringQueue::complete(int buffer) {
  while (true) {
    reap();
    if (const std::int64_t result = results_[static_cast<std::size_t>(buffer)]; result != kNoResult)
      return result;
    // Exactly as many as wait to be submitted, usually none: told more, the kernel returns without a wait.
    const int failure = enter(*submit_tail_ - acquire(submit_head_), 1, IORING_ENTER_GETEVENTS);
    if (failure != 0 && failure != EINTR && failure != EAGAIN && failure != EBUSY) return -failure;
  }
}

}  // namespace bmtrain
