#include "common/thread_pool.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "common/float_environment.h"
#include "common/latch.h"
#include "common/per_process.h"
#include "common/race_point.h"

namespace bmtrain {
namespace {

thread_local bool inside_task = false;

// Of this process, for all threads that have something to do.
std::atomic<int> num_processors{static_cast<int>(std::thread::hardware_concurrency())};

// One participant's contiguous share of the tasks, so that with a fixed number of threads the same thread
// meets the same memory in every call (first touch, caches). Others help once their own share is done.
struct alignas(128) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
};

// A pool thread, from the caller's side.
struct alignas(128) Worker {
  Latch called;  // by the caller, for one loop
};

class Pool {
 public:
  // Runs the tasks unless another thread is using the pool.
  bool try_run(std::int64_t num_tasks, int num_threads, void (*task)(void*, std::int64_t), void* context,
               Sharing sharing) {
    const std::unique_lock<std::mutex> user(user_mutex_, std::try_to_lock);
    if (!user.owns_lock()) return false;
    while (static_cast<int>(shares_.size()) < num_threads) shares_.emplace_back();
    while (static_cast<int>(workers_.size()) < num_threads - 1) start_worker();
    for (int i = 0; i < num_threads; ++i) {
      shares_[i].next.store(num_tasks * i / num_threads, std::memory_order_relaxed);
      shares_[i].end = num_tasks * (i + 1) / num_threads;
    }
    task_ = task;
    context_ = context;
    num_threads_ = num_threads;
    num_shares_of_each_ = sharing == Sharing::kHelp ? num_threads : 1;
    environment_ = float_environment();
    waiting_ =
        num_threads <= num_processors.load(std::memory_order_relaxed) ? Waiting::kWatch : Waiting::kSleep;
    done_.reset(num_threads - 1);
    for (int i = 0; i < num_threads - 1; ++i) workers_[i].called.count_down();
    work(0);
    if (sharing == Sharing::kHelp) excuse_the_late(num_threads - 1);
    done_.wait(waiting_);
    if (has_failed_.exchange(false, std::memory_order_relaxed)) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
    return true;
  }

 private:
  void start_worker() {
    Worker& worker = workers_.emplace_back();
    worker.called.reset(1);
    try {
      // Detached: the pool lives until the process ends, and exit must not wait for idle threads.
      const auto index = static_cast<int>(workers_.size());
      std::thread([this, &worker, index] { worker_loop(worker, index); }).detach();
    } catch (...) {
      workers_.pop_back();  // nobody would answer its calls
      throw;
    }
  }

  void worker_loop(Worker& worker, int index) {
    inside_task = true;
    for (Waiting waiting = Waiting::kSleep;;) {
      worker.called.wait(waiting);
      if (!worker.called.take()) continue;
      waiting = waiting_;
      std::fesetenv(&environment_);
      work(index);
      done_.count_down();
    }
  }

  // All tasks have been taken: a worker that has not even begun, because others use its processor, is not
  // waited for.
  void excuse_the_late(int num_called) {
    for (int i = 0; i < num_called; ++i)
      if (workers_[i].called.take()) done_.count_down();
  }

  void work(int index) {
    const bool outer = inside_task;
    inside_task = true;
    for (int k = 0; k < num_shares_of_each_; ++k) {
      Share& share = shares_[(index + k) % num_threads_];
      for (;;) {
        const std::int64_t i = share.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= share.end) break;
        race_point();
        try {
          task_(context_, i);
        } catch (...) {  // of the loop, whichever thread is here; of several the first
          if (!has_failed_.exchange(true, std::memory_order_relaxed)) {
            error_ = std::current_exception();
          }
        }
      }
    }
    inside_task = outer;
  }

  std::mutex user_mutex_;  // held by the thread whose tasks run: its own is everything below
  std::deque<Worker> workers_;
  std::deque<Share> shares_;
  // Of one loop: written before the workers are called, read by those that are until the loop is done.
  int num_threads_ = 0;
  int num_shares_of_each_ = 0;  // that a thread looks at, its own first
  std::fenv_t environment_ = {};
  Waiting waiting_ = Waiting::kSleep;
  void (*task_)(void*, std::int64_t) = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> has_failed_{false};
  std::exception_ptr error_;  // written by the thread that set has_failed_
  Latch done_;
};

}  // namespace

void set_processor_share(int count) { num_processors.store(count, std::memory_order_relaxed); }

void parallel_for(std::int64_t num_tasks, void (*task)(void* context, std::int64_t index), void* context,
                  Sharing sharing) {
  const auto num_threads = static_cast<int>(std::min<std::int64_t>(at::get_num_threads(), num_tasks));
  if (num_threads > 1 && !inside_task &&
      per_process<Pool>().try_run(num_tasks, num_threads, task, context, sharing))
    return;
  for (std::int64_t i = 0; i < num_tasks; ++i) task(context, i);
}

}  // namespace bmtrain
