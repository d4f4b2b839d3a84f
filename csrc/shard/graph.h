// The graph of a block: its border, see [Note: A block call is an island] in bmtrain/_engine/call.py, and the
// nodes that take the parameters' gradients to their places in the flat buffer.
//
// Nodes and hooks run on autograd's threads; those that run the backward of one block are one at a time.
// Questions about a graph are asked by the thread that has made it, and by one that is about to run it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bmtrain {

class ShardedBuffer;

// torch counts references to nodes by c10::intrusive_ptr since 2.12 and by std::shared_ptr before.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const torch::autograd::Variable&>()));

template <typename Pointer>
struct NodeTraits;

template <typename T>
struct NodeTraits<std::shared_ptr<T>> {
  using Weak = std::weak_ptr<T>;
  template <typename N, typename... Args>
  static std::shared_ptr<N> make(Args&&... args) {
    // torch::autograd::deleteNode, found by the argument's type: it exists only where nodes are
    // std::shared_ptr.
    return std::shared_ptr<N>(new N(std::forward<Args>(args)...), [](auto* node) { deleteNode(node); });
  }
};

template <typename T>
struct NodeTraits<c10::intrusive_ptr<T>> {
  using Weak = c10::weak_intrusive_ptr<T>;
  template <typename N, typename... Args>
  static c10::intrusive_ptr<N> make(Args&&... args) {
    return c10::make_intrusive<N>(std::forward<Args>(args)...);
  }
};

/// The nodes that made `outputs`, also when these have left the graph since.
struct GraphRoots {
  explicit GraphRoots(const std::vector<at::Tensor>& outputs);

  std::vector<NodePtr> nodes;
};

/// Calls `visit` with each node that `roots` lead to, once, until it returns false.
void visit_graph(const GraphRoots& roots, const std::function<bool(torch::autograd::Node&)>& visit);

/// The sequence number that the next autograd node of this thread will get.
[[nodiscard]] std::uint64_t next_node_number();

/// The name of a node reachable from `outputs` that this thread made before node number `first`, or "" if
/// there is none: a graph recorded since `first` that reaches an older node has taken in a tensor with
/// history from outside.
[[nodiscard]] std::string find_older_node(const std::vector<at::Tensor>& outputs, std::uint64_t first);

/// How many islands autograd is inside of right now. For any thread.
class OpenIslands {
 public:
  void enter() { ++count_; }
  void leave() { --count_; }
  [[nodiscard]] int count() const { return count_; }

 private:
  std::atomic<int> count_ = 0;
};

/// Looks after the leaves of a block's islands, whose gradients are for the block's own backward to hand on:
/// the hook of each.
class IslandShore final : public torch::autograd::PostAccumulateGradHook {
 public:
  /// `refusal`: what is said where a gradient reaches a leaf by another way.
  IslandShore(std::shared_ptr<const OpenIslands> open, std::string refusal);
  /// From now on a gradient that reaches `leaf` while no island is open is dropped, and raises a StateError.
  void guard(const at::Tensor& leaf) const;
  void operator()(const torch::autograd::Variable& leaf) override;

 private:
  std::shared_ptr<const OpenIslands> open_;
  std::shared_ptr<const std::string> refusal_;
};

using Gradients = std::vector<at::Tensor>;  // undefined: none

/// Makes `outputs`, which have no history or are views, the results of one node of the graph that `inputs`
/// are in. `backward`: gradients of the outputs -> gradients of the inputs, one for each or none at all.
void attach_island(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                   std::function<Gradients(const Gradients&)> backward);

/// The node that takes a bound parameter's gradient to its place.
class GradientSink final : public torch::autograd::Node {
 public:
  /// `full_view` gives the shape and dtype of the gradients to come.
  GradientSink(const at::Tensor& full_view, std::weak_ptr<ShardedBuffer> buffer, std::size_t index);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "bmtrain::GradientSink"; }

  // Defined in products.cpp.

  /// Whether the gradient may come as two factors: that of a matrix, on the CPU or on any device.
  [[nodiscard]] bool takes_products(bool any_device) const;
  /// As apply() with the product of two matrices, which is made where it belongs if nothing is there yet.
  void take_product(const at::Tensor& left, const at::Tensor& right);

  // Hooks that users register on the parameter see the full gradient, before the reduction. They are not
  // autograd's own hooks of the parameter, because those also run on what arrives at the shard.
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept override {
    return hooks_;
  }
  void set_hook(std::unique_ptr<torch::autograd::FunctionPreHook> hook);

 private:
  // Raises if the parameter's Block is gone.
  [[nodiscard]] std::shared_ptr<ShardedBuffer> buffer() const;

  std::weak_ptr<ShardedBuffer> buffer_;
  std::size_t index_;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks_;
};

using SinkPtr = decltype(NodeTraits<NodePtr>::make<GradientSink>(at::Tensor(), std::weak_ptr<ShardedBuffer>(),
                                                                 std::size_t{0}));

}  // namespace bmtrain
