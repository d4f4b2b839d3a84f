#include "common/thread_pool.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "common/delays.h"
#include "common/float_environment.h"
#include "common/per_process.h"

namespace bmtrain {
namespace {

thread_local bool inside_task = false;

// One participant's contiguous share of the tasks, so that with a fixed number of threads the same thread
// meets the same memory in every call (first touch, caches). Others help once their own share is done.
struct alignas(128) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
};

class Pool {
 public:
  // Runs the tasks unless another thread is using the pool.
  bool try_run(std::int64_t num_tasks, int num_threads, void (*task)(void*, std::int64_t), void* context,
               Sharing sharing) {
    const std::unique_lock<std::mutex> user(user_mutex_, std::try_to_lock);
    if (!user.owns_lock()) return false;
    while (static_cast<int>(shares_.size()) < num_threads) shares_.emplace_back();
    while (num_workers_ < num_threads - 1) start_worker();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 0; i < num_threads; ++i) {
        shares_[i].next.store(num_tasks * i / num_threads, std::memory_order_relaxed);
        shares_[i].end = num_tasks * (i + 1) / num_threads;
      }
      task_ = task;
      context_ = context;
      num_threads_ = num_threads;
      num_shares_of_each_ = sharing == Sharing::kHelp ? num_threads : 1;
      num_busy_ = num_threads - 1;
      environment_ = float_environment();
      ++generation_;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return num_busy_ == 0; });
    return true;
  }

 private:
  void start_worker() {
    const int index = ++num_workers_;
    // Detached: the pool lives until the process ends, and exit must not wait for idle threads.
    std::thread([this, index, seen = generation_] { worker_loop(index, seen); }).detach();
  }

  void worker_loop(int index, std::uint64_t seen) {
    inside_task = true;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (index >= num_threads_) continue;
      set_float_environment(environment_);
      lock.unlock();
      work(index);
      lock.lock();
      if (--num_busy_ == 0) done_.notify_one();
    }
  }

  void work(int index) {
    const bool outer = inside_task;
    inside_task = true;
    for (int k = 0; k < num_shares_of_each_; ++k) {
      Share& share = shares_[(index + k) % num_threads_];
      for (;;) {
        const std::int64_t i = share.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= share.end) break;
        delay();
        task_(context_, i);
      }
    }
    inside_task = outer;
  }

  std::mutex user_mutex_;  // held by the thread whose tasks run
  std::mutex mutex_;       // protects everything below but the counters in shares_
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<Share> shares_;
  int num_workers_ = 0;
  int num_threads_ = 0;
  int num_shares_of_each_ = 0;  // that a thread looks at, its own first
  int num_busy_ = 0;
  std::uint64_t generation_ = 0;
  unsigned environment_ = 0;
  void (*task_)(void*, std::int64_t) = nullptr;
  void* context_ = nullptr;
};

}  // namespace

void parallel_for(std::int64_t num_tasks, void (*task)(void* context, std::int64_t index), void* context,
                  Sharing sharing) {
  const auto num_threads = static_cast<int>(std::min<std::int64_t>(at::get_num_threads(), num_tasks));
  if (num_threads > 1 && !inside_task &&
      per_process<Pool>().try_run(num_tasks, num_threads, task, context, sharing))
    return;
  for (std::int64_t i = 0; i < num_tasks; ++i) task(context, i);
}

}  // namespace bmtrain
