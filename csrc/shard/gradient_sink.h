// GradientSink: the autograd node that takes a bound parameter's gradient to
// its place in the flat buffer.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>
#include <vector>

namespace bmtrain {

class ShardGroup;

// torch counts references to nodes by c10::intrusive_ptr since 2.12 and by
// std::shared_ptr before.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const torch::autograd::Variable&>()));

class GradientSink final : public torch::autograd::Node {
 public:
  /// `full_view` gives the shape and dtype of the gradients to come.
  GradientSink(at::Tensor parameter, const at::Tensor& full_view, std::weak_ptr<ShardGroup> group,
               std::size_t index);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "bmtrain::GradientSink"; }

  // Hooks that users register on the parameter see the full gradient, before the reduction. They are not
  // autograd's own hooks of the parameter, because those also run on what arrives at the shard.
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept override {
    return hooks_;
  }
  /// `hooks`: a dict of Python functions.
  void set_hooks(PyObject* hooks);

 private:
  at::Tensor parameter_;
  std::weak_ptr<ShardGroup> group_;
  std::size_t index_;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks_;
};

template <typename Pointer>
struct NodeTraits;

template <typename T>
struct NodeTraits<std::shared_ptr<T>> {
  using Weak = std::weak_ptr<T>;
  template <typename N, typename... Args>
  static std::shared_ptr<N> make(Args&&... args) {
    // torch::autograd::deleteNode, found by the argument's type: it exists only
    // where nodes are std::shared_ptr.
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

using SinkPtr = decltype(NodeTraits<NodePtr>::make<GradientSink>(
    at::Tensor(), at::Tensor(), std::weak_ptr<ShardGroup>(), std::size_t{0}));

}  // namespace bmtrain
