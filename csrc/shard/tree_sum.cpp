#include "shard/tree_sum.h"

#include "common/check.h"
#include "shard/buffer_spec.h"

namespace bmtrain {

void TreeSum::push(const at::Tensor& leaf) {
  const PlainMode plain;
  BMT_CHECK(TypeError, leaf.is_floating_point(), "leaf: expected a floating-point tensor, got ",
            leaf.scalar_type());
  BMT_CHECK(ValueError, nodes_.empty() || nodes_.back().sum.sizes() == leaf.sizes(), "leaf: expected shape ",
            nodes_.empty() ? leaf.sizes() : nodes_.back().sum.sizes(), " like the ones before, got ",
            leaf.sizes());
  if (num_leaves_ == capacity_) {
    return;
  }
  ++num_leaves_;
  if (!nodes_.empty() && nodes_.back().num_leaves == 1) {
    nodes_.back().sum.add_(leaf);  // widened as it is read
    nodes_.back().num_leaves = 2;
  } else {
    const at::ScalarType wide = leaf.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    nodes_.push_back({leaf.to(wide, /*non_blocking=*/false, /*copy=*/true), 1});
  }
  while (nodes_.size() > 1 && nodes_[nodes_.size() - 2].num_leaves == nodes_.back().num_leaves) {
    Node& left = nodes_[nodes_.size() - 2];
    left.sum.add_(nodes_.back().sum);
    left.num_leaves *= 2;
    nodes_.pop_back();
  }
}

at::Tensor TreeSum::total() const {
  const PlainMode plain;
  BMT_CHECK(StateError, !nodes_.empty(), "there is nothing to sum");
  at::Tensor sum = nodes_.back().sum.clone();
  for (std::size_t i = nodes_.size() - 1; i > 0; --i) {
    sum.add_(nodes_[i - 1].sum);
  }
  return sum;
}

}  // namespace bmtrain
