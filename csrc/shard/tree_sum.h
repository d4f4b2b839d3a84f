// TreeSum: the sum of a known sequence of tensors, added up by a binary tree whose shape depends on nothing
// but how many there are. For one thread at a time: that of the reductions that fill it.
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
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace bmtrain {

class TreeSum {
 public:
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
  std::int64_t num_leaves_ = 0;
};

}  // namespace bmtrain
