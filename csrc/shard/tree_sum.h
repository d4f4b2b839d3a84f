// TreeSum: a sum whose bits do not depend on who computes its parts.
//
// [Note: Virtual shards]
// The gradients of the virtual shards of a step are the leaves, in the order of the shards' numbers. In one
// micro-step each rank computes one virtual shard, and adjacent numbers are computed together: so the leaves
// of a micro-step are the ranks' slices in rank order, after those of the micro-step before. What runs where
// decides who computes a leaf, not where the leaf stands in the tree.
//
// The tree is built like a binary counter is increased: two neighbours of one height become one at once, so
// that there are never more than log2(leaves) + 1 sums. What is left at the end is added from the last to the
// first.
//
// Replicas of a shard build the tree of a piece of it each, of the slices of all ranks in rank order, and
// exchange the sums of their pieces at the end of the step: so the tree is the same with any number of
// replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace bmtrain {

/// The sum of a known sequence of tensors, see [Note: Virtual shards]. For one thread at a time.
class TreeSum {
 public:
  /// `capacity`: the number of leaves; push() ignores later ones.
  explicit TreeSum(std::int64_t capacity = std::numeric_limits<std::int64_t>::max()) : capacity_(capacity) {}

  /// Appends a leaf: a copy is kept, in fp32, or fp64 if it is that. All have one size, dtype and device.
  void push(const at::Tensor& leaf);
  [[nodiscard]] std::int64_t num_leaves() const { return num_leaves_; }
  /// The sum, in fp32 or fp64, a new tensor. There must be a leaf.
  [[nodiscard]] at::Tensor total() const;

 private:
  struct Node {
    at::Tensor sum;
    std::int64_t num_leaves;
  };
  std::vector<Node> nodes_;  // from the first leaf to the last, ever fewer leaves
  const std::int64_t capacity_;
  std::int64_t num_leaves_ = 0;
};

}  // namespace bmtrain
