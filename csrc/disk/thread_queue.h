// ThreadQueue: transfers by threads that call pread and pwrite, for kernels and containers without io_uring.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "common/thread_annotations.h"
#include "disk/disk_queue.h"

namespace bmtrain {

class ThreadQueue final : public DiskQueue {
 public:
  ThreadQueue(int num_buffers, std::int64_t buffer_bytes);
  ~ThreadQueue() override;
  ThreadQueue(const ThreadQueue&) = delete;
  ThreadQueue& operator=(const ThreadQueue&) = delete;

  [[nodiscard]] const char* back_end() const override { return "threads"; }

 private:
  // What a thread needs of a transfer, copied.
  struct Job {
    int buffer, file;
    char* data;
    std::int64_t nbytes, offset;
    bool is_write;
  };
  // What the threads share with the caller.
  struct Shared {
    Mutex mutex;
    std::condition_variable wake, done;
    std::deque<Job> jobs BMT_GUARDED_BY(mutex);
    std::vector<std::int64_t> results BMT_GUARDED_BY(mutex);  // by buffer; kRunning until it has ended
    bool is_ending BMT_GUARDED_BY(mutex) = false;

    void work() BMT_EXCLUDES(mutex);
  };

  void submit(int buffer) override;
  std::int64_t complete(int buffer) override;

  std::unique_ptr<Shared> shared_;
  std::vector<std::thread> threads_;
};

}  // namespace bmtrain
