// The Work of a Gloo operation: messages under way, then what the caller's thread still has to do.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/gloo/gloo_link.h"
#include "common/thread_annotations.h"

namespace bmtrain {

/// Any thread may wait; one at a time drives the operation.
class GlooWork final : public Work {
 public:
  /// Numbers the operation and posts what needs no other rank's data.
  [[nodiscard]] static WorkPtr start(std::shared_ptr<GlooLink> link, GlooOperation operation);
  ~GlooWork() override;
  GlooWork(const GlooWork&) = delete;
  GlooWork& operator=(const GlooWork&) = delete;

  void wait() override BMT_EXCLUDES(mutex_);
  /// Gloo does not say which messages are through: true only after wait().
  [[nodiscard]] bool is_completed() override { return done_.load(std::memory_order_acquire); }
  /// Waits for phase 0 and posts phase 1.
  void carry_on() BMT_EXCLUDES(mutex_);

 private:
  GlooWork(std::shared_ptr<GlooLink> link, GlooOperation operation);
  void post(int phase) BMT_REQUIRES(mutex_);
  // Waits for the present phase and begins what follows; an error becomes that of the operation.
  void advance() BMT_REQUIRES(mutex_);
  // True if that was the last phase.
  [[nodiscard]] bool finish_phase() BMT_REQUIRES(mutex_);

  const std::shared_ptr<GlooLink> link_;
  Mutex mutex_;
  GlooOperation operation_ BMT_GUARDED_BY(mutex_);
  const std::int64_t carried_on_;  // collectives below this number go first; see GlooLink::carry_on_before
  int phase_ BMT_GUARDED_BY(mutex_) = 0;
  GlooTransfers transfers_ BMT_GUARDED_BY(mutex_);      // of the present phase
  std::vector<WorkPtr> shared_ BMT_GUARDED_BY(mutex_);  // what `operation_.share` has posted
  std::exception_ptr error_ BMT_GUARDED_BY(mutex_);
  std::atomic<bool> done_ = false;
};

}  // namespace bmtrain
