#include "disk/thread_queue.h"

#include <c10/core/thread_pool.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace bmtrain {

constexpr int kMaxThreads = 16;

ThreadQueue::ThreadQueue(int num_buffers, std::int64_t buffer_bytes)
    : DiskQueue(num_buffers, buffer_bytes),
      threads_(std::make_unique<c10::ThreadPool>(std::min(num_buffers, kMaxThreads))),
      results_(static_cast<std::size_t>(num_buffers)) {}

ThreadQueue::~ThreadQueue() {
  if (is_forked()) {  // the threads are not here, but what they wait for believes so
    [[maybe_unused]] const c10::ThreadPool* left = threads_.release();
    return;
  }
  drain();
}

void ThreadQueue::submit(int buffer) {
  const Transfer& now = transfer(buffer);
  const auto move = [file = now.file->descriptor(), is_write = now.is_write, offset = now.offset + now.done,
                     memory = iovec{.iov_base = data(now, buffer) + now.done,
                                    .iov_len = static_cast<std::size_t>(now.nbytes - now.done)}] {
    const ssize_t moved =
        is_write ? ::pwritev2(file, &memory, 1, offset, 0) : ::preadv2(file, &memory, 1, offset, 0);
    return moved < 0 ? -static_cast<std::int64_t>(errno) : moved;
  };
  const auto task = std::make_shared<std::packaged_task<std::int64_t()>>(move);
  std::future<std::int64_t> result = task->get_future();
  threads_->run([task] { (*task)(); });
  results_[static_cast<std::size_t>(buffer)] = std::move(result);
}

std::int64_t ThreadQueue::complete(int buffer) {
  std::future<std::int64_t>& result = results_[static_cast<std::size_t>(buffer)];
  return result.valid() ? result.get() : -EIO;  // none if `submit` threw
}

}  // namespace bmtrain
