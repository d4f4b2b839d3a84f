// Objects with threads of their own, of which a forked child needs another one.
#pragma once

#include <unistd.h>

#include <atomic>

namespace bmtrain {

/// The T of this process, made at its first use and kept until the process ends. A forked child has none of
/// its parent's threads and may have inherited locked mutexes, so it gets a T of its own and leaves the
/// parent's alone.
template <typename T>
T& per_process() {
  struct Owned {
    pid_t pid;
    T object;
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* mine = current.load(std::memory_order_acquire);
  const pid_t pid = getpid();
  while (mine == nullptr || mine->pid != pid) {
    auto* fresh = new Owned{.pid = pid, .object = {}};  // lives as long as the process
    if (current.compare_exchange_strong(mine, fresh, std::memory_order_acq_rel)) {
      mine = fresh;
    } else {
      delete fresh;
    }
  }
  return mine->object;
}

}  // namespace bmtrain
