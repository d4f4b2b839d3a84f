// What of an NCCL communicator outlives its link: see nccl_link.h. Not for others to include.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/nccl/nccl_link.h"
#include "comm/nccl/pause.h"

namespace bmtrain {

// How long NCCL may take to end a communicator before we go on without it.
inline constexpr std::chrono::seconds kGracefulLimit{5};
inline constexpr std::chrono::seconds kTakedownLimit{10};

struct NcclLink::Handle {
  explicit Handle(std::shared_ptr<NcclLibrary> used) : library(std::move(used)) {}

  // Ends the communicator. In a thread of its own, since NCCL may wait for other ranks here.
  void end(bool gracefully) {
    // A thread that is inside NCCL sees that the communicator is ending and leaves; should it be stuck there,
    // abort is what frees it.
    const std::unique_lock lock(mutex, kGracefulLimit);
    const nccl::Comm ending = std::atomic_ref(comm).exchange(nullptr);
    const std::shared_ptr<Handle> unfinished = std::exchange(part, nullptr);
    if (lock.owns_lock()) {
      retire_quietly();
    }
    if (ending != nullptr && !(gracefully && lock.owns_lock() && finalize(ending))) {
      is_cut = true;
      (void)library->call().CommAbort(ending);
    }
    if (unfinished != nullptr) {
      unfinished->end(false);  // NCCL has ended the split, and has told by now what it had made
    }
  }

  // `mutex` is held.
  [[nodiscard]] bool finalize(nccl::Comm ending) {
    const auto deadline = NcclClock::now() + kGracefulLimit;
    if (!drain(deadline)) {
      return false;
    }
    nccl::Result result = library->call().CommFinalize(ending);
    Pause pause;
    while (result == nccl::Result::kInProgress && NcclClock::now() < deadline) {
      pause();
      if (library->call().CommGetAsyncError(ending, &result) != nccl::Result::kSuccess) {
        return false;
      }
    }
    return result == nccl::Result::kSuccess && library->call().CommDestroy(ending) == nccl::Result::kSuccess;
  }

  // Waits until everything queued has completed; false if that takes too long, or the device failed. `mutex`
  // is held.
  [[nodiscard]] bool drain(NcclClock::time_point deadline) {
    Pause pause;
    try {
      for (retire(); !pending.empty() && NcclClock::now() < deadline; retire()) {
        pause();
      }
    } catch (const std::exception&) {
      return false;
    }
    return pending.empty();
  }

  // `mutex` is held.
  void retire() {
    while (!pending.empty() && pending.front()->done->is_complete()) {
      pending.front()->is_over = true;
      over.push_back(std::exchange(pending.front()->tensors, {}));
      pending.pop_front();
      if (!pending.empty()) {
        pending.front()->started = NcclClock::now();
      }
    }
  }

  void retire_quietly() {
    try {
      retire();
    } catch (const std::exception&) {
      // The device failed: what it did last is not to be used.
    }
  }

  const std::shared_ptr<NcclLibrary> library;
  std::timed_mutex mutex;  // one thread at a time calls NCCL; protects all below, and more of the link
  nccl::Comm comm = nullptr;
  std::atomic<bool> is_cut = false;  // what was under way then is not over, see nccl_link.h
  std::shared_ptr<Handle> part;      // of a split under way: NCCL writes its communicator when it has made it
  std::deque<NcclOperationPtr> pending;
  std::vector<std::vector<at::Tensor>> over;  // of completed operations, for a caller to drop
  // At its end what is being launched; before it launches that failed half-way, whose tensors NCCL may use
  // until it has ended.
  std::vector<NcclOperationPtr> launching;
};

}  // namespace bmtrain
