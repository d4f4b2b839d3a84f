#include "shard/gradient_sink.h"

#include "common/check.h"
#include "shard/shard_group.h"

namespace bmtrain {

GradientSink::GradientSink(at::Tensor parameter, const at::Tensor& full_view, std::weak_ptr<ShardGroup> group,
                           std::size_t index)
    // As an accumulator: the highest sequence number, so that autograd runs it
    // as soon as it is ready.
    : Node(/*sequence_nr=*/UINT64_MAX),
      parameter_(std::move(parameter)),
      group_(std::move(group)),
      index_(index) {
  add_input_metadata(full_view);
}

torch::autograd::variable_list GradientSink::apply(torch::autograd::variable_list&& gradients) {
  const at::Tensor& gradient = gradients.at(0);
  if (gradient.defined()) {
    const std::shared_ptr<ShardGroup> group = group_.lock();
    BMT_CHECK(StateError, group != nullptr,
              "a gradient arrived for a parameter whose Block no longer exists");
    group->accumulate(index_, gradient);
  }
  return {};
}

}  // namespace bmtrain
