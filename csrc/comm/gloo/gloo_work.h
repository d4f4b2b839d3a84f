// The Work of a Gloo operation: messages under way, then what the caller's thread still has to do.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "comm/gloo/gloo_link.h"

namespace bmtrain {

/// Messages, and what follows their arrival: the local reduction, more messages, or nothing.
struct GlooStep {
  GlooTransfers transfers;
  std::function<GlooStep()> then;
};

class GlooWork final : public Work {
 public:
  /// `tensors` are kept alive until the operation is over.
  GlooWork(std::shared_ptr<GlooLink> link, GlooOperation operation, GlooStep step,
           std::vector<at::Tensor> tensors);
  ~GlooWork() override;
  GlooWork(const GlooWork&) = delete;
  GlooWork& operator=(const GlooWork&) = delete;

  void wait() override;
  /// Gloo does not say which messages are through: true only after wait().
  [[nodiscard]] bool is_completed() override { return done_.load(std::memory_order_acquire); }
  /// Waits for the first step and posts the next one.
  void carry_on();

 private:
  void advance();

  std::mutex mutex_;  // one thread at a time drives the operation; protects all but done_
  std::shared_ptr<GlooLink> link_;
  const GlooOperation operation_;
  GlooStep step_;
  std::vector<at::Tensor> tensors_;
  bool first_step_ = true;
  std::exception_ptr error_;
  std::atomic<bool> done_ = false;
};

}  // namespace bmtrain
