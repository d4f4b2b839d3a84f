// ThreadQueue: transfers by threads that call pread and pwrite, for kernels and containers without io_uring.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <vector>

#include "disk/disk_queue.h"

namespace c10 {
class ThreadPool;
}

namespace bmtrain {

class ThreadQueue final : public DiskQueue {
 public:
  ThreadQueue(int num_buffers, std::int64_t buffer_bytes);
  ~ThreadQueue() override;
  ThreadQueue(const ThreadQueue&) = delete;
  ThreadQueue& operator=(const ThreadQueue&) = delete;

  [[nodiscard]] const char* back_end() const override { return "threads"; }

 private:
  void submit(int buffer) override;
  std::int64_t complete(int buffer) override;

  std::unique_ptr<c10::ThreadPool> threads_;
  std::vector<std::future<std::int64_t>> results_;  // by buffer
};

}  // namespace bmtrain
