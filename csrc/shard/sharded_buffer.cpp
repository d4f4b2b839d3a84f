#include "shard/sharded_buffer.h"

#include "common/check.h"

namespace bmtrain {

ShardedBuffer::ShardedBuffer(BufferOptions options)
    : spec_(std::move(options)),
      shard_(spec_),
      gradient_shard_(spec_),
      gathered_(spec_, shard_),
      reduction_(std::make_shared<Reduction>(spec_, gradient_shard_)) {}

std::pair<std::int64_t, std::int64_t> ShardedBuffer::num_references() const {
  return {shard_.num_references() + gathered_.num_references_to_shard(), gradient_shard_.num_references()};
}

std::int64_t ShardedBuffer::version() const {
  std::int64_t sum = 0;
  for (const at::Tensor& parameter : spec_.parameters) {
    sum += parameter._version();
  }
  return sum;
}

std::vector<bool> ShardedBuffer::requires_grad() const {
  std::vector<bool> flags;
  flags.reserve(spec_.num_parameters());
  for (const at::Tensor& parameter : spec_.parameters) {
    flags.push_back(parameter.requires_grad());
  }
  return flags;
}

bool ShardedBuffer::adopt_data() {
  if (gathered_.is_bound() || !shard_.has_new_data()) {
    return false;
  }
  shard_.adopt_data(gathered_.num_references_to_shard());
  gathered_.follow_shard();
  return true;
}

void ShardedBuffer::bind() {
  make_sinks();
  gathered_.bind(sinks_);
  if (reduction_->stage() != Reduction::Stage::kSummed && gradient_shard_.drop_if_unused()) {
    static_cast<void>(spec_.reduce_comm->borrow_input(0));  // frees what gradients have travelled in
  }
}

void ShardedBuffer::begin_backward(const std::vector<bool>& trains,
                                   const std::vector<std::shared_ptr<ShardedBuffer>>& under_way,
                                   bool in_turn) {
  BMT_CHECK(StateError, reduction_->stage() == Reduction::Stage::kEnded, spec_.label,
            ": a backward is under way already");
  std::vector<std::weak_ptr<Reduction>> others;
  for (const std::shared_ptr<ShardedBuffer>& buffer : under_way) {
    others.push_back(buffer->reduction_);
  }
  const auto next = std::make_shared<Reduction>(spec_, gradient_shard_);
  next->begin(trains, std::move(others), in_turn);
  reduction_ = next;
}

void ShardedBuffer::make_sinks() {
  if (sinks_.empty()) {
    for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
      sinks_.push_back(NodeTraits<NodePtr>::make<GradientSink>(gathered_.views()[i], weak_from_this(), i));
    }
  }
}

void ShardedBuffer::set_hook(std::size_t index, std::unique_ptr<torch::autograd::FunctionPreHook> hook) {
  spec_.check_index(index);
  make_sinks();
  sinks_[index]->set_hook(std::move(hook));
}

}  // namespace bmtrain
