// The border of an island: the graph inside a block, see [Note: A block call is an island] in
// bmtrain/_engine/island.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace bmtrain {

/// How many islands autograd is inside of right now, on whatever threads.
class OpenIslands {
 public:
  void enter() { ++count_; }
  void leave() { --count_; }
  [[nodiscard]] int count() const { return count_; }

 private:
  std::atomic<int> count_ = 0;
};

/// Looks after the leaves of a block's islands, whose gradients are for the block's own backward to hand on.
class IslandShore {
 public:
  /// `refusal`: what is said where a gradient reaches a leaf by another way.
  IslandShore(std::shared_ptr<const OpenIslands> open, std::string refusal);
  /// From now on a gradient that reaches `leaf` while no island is open is dropped, and raises a StateError.
  void guard(const at::Tensor& leaf) const;

 private:
  struct Guard;
  std::shared_ptr<const OpenIslands> open_;
  std::shared_ptr<const std::string> refusal_;
};

using Gradients = std::vector<at::Tensor>;  // undefined: none

/// Makes `outputs`, which have no history, the results of one node of the graph that `inputs` are in.
/// `backward`: gradients of the outputs -> gradients of the inputs, one for each or none at all.
void attach_island(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                   std::function<Gradients(const Gradients&)> backward);

}  // namespace bmtrain
