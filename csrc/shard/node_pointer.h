// How torch counts references to the nodes of an autograd graph.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace bmtrain {

// torch counts references to nodes by c10::intrusive_ptr since 2.12 and by
// std::shared_ptr before.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const torch::autograd::Variable&>()));

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

}  // namespace bmtrain
