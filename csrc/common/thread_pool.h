// A small persistent pool for loops over memory.
#pragma once

#include <cstdint>

namespace bmtrain {

/// What a thread does whose own share of the tasks is done. The share depends on the numbers of tasks and of
/// threads alone, and is the same in both cases.
enum class Sharing : std::uint8_t {
  kHelp,     // takes tasks of the others
  kOwnOnly,  // nothing: a thread's share is run by that thread, unless the pool is in use by another
};

/// Calls task(context, i) once for every i in [0, num_tasks), on the calling thread and up to
/// torch.get_num_threads() - 1 pool threads, and returns when all calls have. Which thread runs which i is
/// unspecified but for Sharing::kOwnOnly, so a task's result must depend on i alone; neighbouring tasks
/// mostly run on one thread. What a task throws is thrown here, once all have ended. Calls from inside a task
/// that the pool runs, and calls while another thread uses the pool, run on the calling thread only.
void parallel_for(std::int64_t num_tasks, void (*task)(void* context, std::int64_t index), void* context,
                  Sharing sharing = Sharing::kHelp);

/// The same for a callable.
template <typename Task>
void parallel_for(std::int64_t num_tasks, Task&& task, Sharing sharing = Sharing::kHelp) {
  parallel_for(
      num_tasks, [](void* context, std::int64_t index) { (*static_cast<Task*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&task)), sharing);
}

/// Says how many processors this process may count on; all that it may use, if never called. A loop of more
/// threads sleeps wherever it waits: see [Note: Watching before sleeping].
void set_processor_share(int count);

}  // namespace bmtrain
