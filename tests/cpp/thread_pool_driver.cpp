// Drives the thread pool from several threads, for ThreadSanitizer: see tests/unit/test_thread_pool_races.py.
#include <ATen/Parallel.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/thread_pool.h"
#include "expect.h"
#include "testing/disturbance.h"

namespace {

constexpr int kCallers = 3;
constexpr int kRounds = 300;

// Plain memory: written by whichever thread runs a task, read by the caller afterwards.
void every_task_once(int num_tasks) {
  constexpr int kInner = 2;
  std::vector<int> values(static_cast<std::size_t>(num_tasks * kInner), 0);
  bmtrain::parallel_for(num_tasks, [&](std::int64_t i) {
    bmtrain::parallel_for(kInner,
                          [&](std::int64_t j) { ++values[static_cast<std::size_t>(i * kInner + j)]; });
  });
  for (const int value : values) expect(value == 1, "every task once, and each of its inner ones");
}

// With Sharing::kOwnOnly a task's thread depends on the numbers of tasks and threads alone.
void every_share_by_its_owner(int num_tasks) {
  std::vector<std::thread::id> owners(static_cast<std::size_t>(num_tasks));
  for (int round = 0; round < kRounds; ++round) {
    bmtrain::parallel_for(
        num_tasks,
        [&](std::int64_t i) {
          std::thread::id& owner = owners[static_cast<std::size_t>(i)];
          expect(round == 0 || owner == std::this_thread::get_id(), "the owner runs its share");
          owner = std::this_thread::get_id();
        },
        bmtrain::Sharing::kOwnOnly);
  }
  expect(owners.front() == std::this_thread::get_id(), "the first share is the caller's");
  expect(owners.back() != owners.front(), "several owners");
}

// An error of a task is the caller's, whichever thread ran the task, and the pool works on.
void errors_of_tasks(int num_tasks) {
  for (int failing = 0; failing < num_tasks; ++failing) {
    bool raised = false;
    try {
      bmtrain::parallel_for(num_tasks, [failing](std::int64_t i) {
        if (i == failing) throw std::runtime_error("a task");
      });
    } catch (const std::runtime_error&) {
      raised = true;
    }
    expect(raised, "the error of a task");
    every_task_once(num_tasks);
  }
}

// With as many processors as threads whoever waits watches first, with fewer it sleeps at once.
constexpr int kFew = 1;
constexpr int kEnough = 8;

}  // namespace

int main() {
  at::set_num_threads(4);
  for (const int num_processors : {kFew, kEnough}) {
    bmtrain::set_processor_share(num_processors);
    every_share_by_its_owner(3);
    every_share_by_its_owner(29);
    errors_of_tasks(20);
  }
  bmtrain::set_random_delays(1, 20);
  std::vector<std::thread> callers;  // one has the pool, the others work alone
  for (int c = 0; c < kCallers; ++c) {
    callers.emplace_back([c] {
      at::set_num_threads(2 + c);
      for (int round = 0; round < kRounds; ++round) {
        bmtrain::set_processor_share(round % 2 == 0 ? kFew : kEnough);
        every_task_once(1 + round % 37);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  std::puts("ok");
}
