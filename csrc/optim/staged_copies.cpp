#include "optim/staged_copies.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "common/check.h"

namespace bmtrain {

StagedCopies::StagedCopies(std::shared_ptr<StagingLane> lane, int slot, const StagedTensors& gradients,
                           const StagedTensors& parameters, const std::vector<at::Tensor>& sources,
                           std::shared_ptr<SentGradients> sent)
    : lane_(std::move(lane)),
      slot_(static_cast<std::size_t>(slot)),
      gradients_(plain(gradients)),
      parameters_(plain(parameters)),
      sources_(plain(sources)),
      sent_(std::move(sent)) {
  BMT_CHECK(ValueError, slot >= 0 && slot_ < lane_->slots_.size(), "slot: expected less than ",
            lane_->slots_.size(), ", got ", slot);
  check_pairs(gradients_, "gradients");
  check_pairs(parameters_, "parameters");
  BMT_CHECK(ValueError, sources_.size() == parameters_.on_host.size(),
            "sources: expected one, perhaps None, for each of ", parameters_.on_host.size(),
            " parameters, got ", sources_.size());
}

void StagedCopies::submit(std::shared_ptr<Update> update) {
  const std::lock_guard lock(mutex_);
  caller_stream_ = lane_->runtime_->current_stream();
  submitted_ = lane_->runtime_->mark(caller_stream_);
  const std::lock_guard slots_lock(lane_->mutex_);
  predecessor_ = std::exchange(slot().latest, std::move(update));
}

void StagedCopies::precede(std::shared_ptr<StagedCopies> next) {
  const std::lock_guard lock(mutex_);
  next_ = std::move(next);
}

void StagedCopies::begin_if_free() {
  const std::lock_guard lock(mutex_);
  if (!has_begun_ && (predecessor_ == nullptr || predecessor_->is_over())) {
    begin();
  }
}

void StagedCopies::begin() {
  {
    const std::lock_guard slots_lock(lane_->mutex_);
    slot_read_ = slot().returned;
  }
  submitted_->block(
      lane_->to_host_);  // what is sent already may be multiplied still, before it is zeroed here
  if (sent_ != nullptr) {
    arrived_ = sent_->arrived();
  } else {
    arrived_ = lane_->runtime_->run_and_mark(lane_->to_host_, [this] { copy_to_host(gradients_); });
  }
  if (wants_zero_) {
    zero();
  }
  predecessor_ = nullptr;
  has_begun_ = true;  // only now: what has thrown is tried again by the next thread that needs it
}

void StagedCopies::zero() {
  zeroed_ = lane_->runtime_->run_and_mark(lane_->to_host_, [this] {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& gradient : gradients_.on_device) {
      gradient.zero_();
    }
  });
}

void StagedCopies::zero_gradients() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(wants_zero_, true) && has_begun_) {
    zero();
  }
}

std::vector<double> StagedCopies::arrive() {
  std::shared_ptr<Update> predecessor;
  std::shared_ptr<StagedCopies> next;
  {
    const std::lock_guard lock(mutex_);
    predecessor = predecessor_;
  }
  if (predecessor != nullptr) {  // out of turn: somebody needs this update before its slot is free
    predecessor->help();
  }
  std::shared_ptr<DeviceEvent> arrived, slot_read;
  {
    const std::lock_guard lock(mutex_);
    if (!has_begun_) {
      begin();
    }
    arrived = arrived_;
    slot_read = slot_read_;
    next = std::exchange(next_, nullptr);
  }
  if (next != nullptr) {
    next->begin_if_free();
  }
  wait_on_host(*arrived);
  if (slot_read != nullptr) {
    wait_on_host(*slot_read);
  }
  return sent_ == nullptr ? std::vector<double>() : sent_->factors();
}

void StagedCopies::give_back() {
  const std::lock_guard lock(mutex_);
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      if (sources_[i].defined()) {
        parameters_.on_host[i].copy_(sources_[i]);
      }
    }
  }
  submitted_->block(lane_->to_device_);
  returned_ = lane_->runtime_->run_and_mark(lane_->to_device_, [this] {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters_.on_host.size(); ++i) {
      parameters_.on_device[i].copy_(parameters_.on_host[i], /*non_blocking=*/true);
    }
  });
  const std::lock_guard slots_lock(lane_->mutex_);
  slot().returned = returned_;
}

void StagedCopies::join() {
  const std::lock_guard lock(mutex_);
  const std::int64_t current = lane_->runtime_->current_stream();
  for (const auto& event : {arrived_, zeroed_, returned_}) {
    if (event == nullptr) {
      continue;
    }
    event->block(caller_stream_);
    if (current != caller_stream_) {
      event->block(current);
    }
  }
}

}  // namespace bmtrain
