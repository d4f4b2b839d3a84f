#include "optim/sent_gradients.h"

#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

std::shared_ptr<const StagedTensors> shared(const StagedTensors& tensors, const char* what) {
  check_pairs(tensors, what);
  return std::make_shared<const StagedTensors>(plain(tensors));
}

// Copies to the host, behind what the caller's stream has queued; the event of their end.
std::shared_ptr<DeviceEvent> send(DeviceRuntime& runtime, std::int64_t stream,
                                  const std::shared_ptr<const StagedTensors>& tensors) {
  runtime.mark(runtime.current_stream())->block(stream);
  return runtime.run_and_mark(stream, [tensors] { copy_to_host(*tensors); });
}

}  // namespace

SentNumber::SentNumber(const std::shared_ptr<StagingLane>& lane, const at::Tensor& number,
                       const at::Tensor& on_host)
    : number_(shared({{number}, {on_host}}, "number")) {
  BMT_CHECK(ValueError, number.numel() == 1 && number.scalar_type() == at::kDouble,
            "number: expected one of fp64, got ", number.numel(), " of ", number.scalar_type());
  arrived_ = send(*lane->runtime_, lane->to_host_, number_);
}

double SentNumber::value() {
  wait_on_host(*arrived_);
  return *number_->on_host[0].const_data_ptr<double>();
}

SentGradients::SentGradients(std::shared_ptr<StagingLane> lane, const StagedTensors& gradients)
    : lane_(std::move(lane)), gradients_(shared(gradients, "gradients")) {
  arrived_ = send(*lane_->runtime_, lane_->to_host_, gradients_);
}

void SentGradients::scale(std::shared_ptr<SentNumber> factor) {
  arrived_->block(lane_->runtime_->current_stream());
  factors_.push_back(std::move(factor));
}

void SentGradients::drop() {
  arrived_->block(lane_->runtime_->current_stream());
  gradients_ = nullptr;
}

std::vector<double> SentGradients::factors() const {
  std::vector<double> values;
  values.reserve(factors_.size());
  for (const std::shared_ptr<SentNumber>& factor : factors_) {
    values.push_back(factor->value());
  }
  return values;
}

}  // namespace bmtrain
