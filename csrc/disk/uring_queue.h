// UringQueue: transfers by io_uring, whose system calls are made directly: three of them, and two rings in
// memory.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "common/file_descriptor.h"
#include "disk/disk_queue.h"

struct io_uring_cqe;
struct io_uring_params;
struct io_uring_sqe;

namespace bmtrain {

class UringQueue final : public DiskQueue {
 public:
  /// DiskError where the kernel, a container or a limit forbids it.
  UringQueue(int num_buffers, std::int64_t buffer_bytes);
  ~UringQueue() override;
  UringQueue(const UringQueue&) = delete;
  UringQueue& operator=(const UringQueue&) = delete;

  [[nodiscard]] const char* back_end() const override { return "io_uring"; }

 private:
  void submit(int buffer) override;
  std::int64_t complete(int buffer) override;
  void map_rings(const io_uring_params& params);
  void reap();
  /// Returns 0 or an error number.
  int enter(unsigned num_new, unsigned num_awaited, unsigned flags);

  FileDescriptor ring_;
  void* rings_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  std::size_t rings_bytes_ = 0, entries_bytes_ = 0;
  // Parts of the rings, which the kernel reads and writes too.
  unsigned *submit_head_ = nullptr, *submit_tail_ = nullptr, *submit_order_ = nullptr;
  unsigned *ended_head_ = nullptr, *ended_tail_ = nullptr;
  unsigned submit_mask_ = 0, ended_mask_ = 0;
  io_uring_cqe* ended_ = nullptr;

  bool has_registered_ = false;  // the kernel knows the buffers' pages, and need not look them up each time
  std::vector<iovec> vectors_;   // by buffer, for transfers where it does not
  std::vector<std::int64_t> results_;
};

}  // namespace bmtrain
