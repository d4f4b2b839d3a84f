#include "disk/thread_queue.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace bmtrain {
namespace {

constexpr std::int64_t kRunning = INT64_MIN;
constexpr int kMaxThreads = 16;

}  // namespace

ThreadQueue::ThreadQueue(int num_buffers, std::int64_t buffer_bytes)
    : DiskQueue(num_buffers, buffer_bytes), shared_(std::make_unique<Shared>()) {
  shared_->results.resize(static_cast<std::size_t>(num_buffers), kRunning);
  for (int i = 0; i < std::min(num_buffers, kMaxThreads); ++i) {
    threads_.emplace_back([shared = shared_.get()] { shared->work(); });
  }
}

ThreadQueue::~ThreadQueue() {
  if (is_forked()) {  // the threads are not here, but what they wait for believes so
    for (std::thread& thread : threads_) thread.detach();
    [[maybe_unused]] const Shared* left = shared_.release();
    return;
  }
  drain();
  {
    const Lock lock(shared_->mutex);
    shared_->is_ending = true;
  }
  shared_->wake.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadQueue::submit(int buffer) {
  const Transfer& now = transfer(buffer);
  {
    const Lock lock(shared_->mutex);
    shared_->results[static_cast<std::size_t>(buffer)] = kRunning;
    shared_->jobs.push_back({.buffer = buffer,
                             .file = now.file->descriptor(),
                             .data = this->data(buffer) + now.done,
                             .nbytes = now.nbytes - now.done,
                             .offset = now.offset + now.done,
                             .is_write = now.is_write});
  }
  shared_->wake.notify_one();
}

std::int64_t ThreadQueue::complete(int buffer) {
  Shared& shared = *shared_;
  Lock lock(shared.mutex);
  std::int64_t result = kRunning;
  shared.done.wait(lock, [&]() BMT_REQUIRES(shared.mutex) {
    result = shared.results[static_cast<std::size_t>(buffer)];
    return result != kRunning;
  });
  return result;
}

void ThreadQueue::Shared::work() {
  Lock lock(mutex);
  while (true) {
    wake.wait(lock, [this]() BMT_REQUIRES(mutex) { return is_ending || !jobs.empty(); });
    if (jobs.empty()) return;
    const Job job = jobs.front();
    jobs.pop_front();
    lock.unlock();
    const iovec memory{.iov_base = job.data, .iov_len = static_cast<std::size_t>(job.nbytes)};
    const ssize_t moved = job.is_write ? ::pwritev2(job.file, &memory, 1, job.offset, 0)
                                       : ::preadv2(job.file, &memory, 1, job.offset, 0);
    const std::int64_t result = moved < 0 ? -static_cast<std::int64_t>(errno) : moved;
    lock.lock();
    results[static_cast<std::size_t>(job.buffer)] = result;
    done.notify_all();
  }
}

}  // namespace bmtrain
