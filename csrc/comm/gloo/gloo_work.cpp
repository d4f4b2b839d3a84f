#include "comm/gloo/gloo_work.h"

#include <utility>

namespace bmtrain {

GlooWork::GlooWork(std::shared_ptr<GlooLink> link, GlooOperation operation, GlooStep step,
                   std::vector<at::Tensor> tensors)
    : link_(std::move(link)),
      operation_(std::move(operation)),
      step_(std::move(step)),
      tensors_(std::move(tensors)) {}

GlooWork::~GlooWork() {
  if (!done_ && !step_.transfers.empty()) {
    link_->keep_abandoned(std::move(step_.transfers), std::move(tensors_));
  }
}

void GlooWork::wait() {
  link_->carry_on_before(operation_.sequence);
  const std::lock_guard lock(mutex_);
  while (!done_) {
    advance();
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void GlooWork::carry_on() {
  const std::lock_guard lock(mutex_);
  if (first_step_ && !done_) {
    advance();
  }
}

void GlooWork::advance() {
  first_step_ = false;
  bool last = true;
  try {
    link_->await(operation_, step_.transfers);
    if (step_.then) {
      step_ = step_.then();
      last = false;
    }
  } catch (...) {
    error_ = std::current_exception();
  }
  if (last) {
    step_ = GlooStep{};
    tensors_.clear();
    done_.store(true, std::memory_order_release);
  }
}

}  // namespace bmtrain
