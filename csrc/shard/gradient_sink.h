// GradientSink: the autograd node that takes a bound parameter's gradient to
// its place in the flat buffer.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <vector>

#include "shard/node_pointer.h"

namespace bmtrain {

class ShardedBuffer;

class GradientSink final : public torch::autograd::Node {
 public:
  /// `full_view` gives the shape and dtype of the gradients to come.
  GradientSink(at::Tensor parameter, const at::Tensor& full_view, std::weak_ptr<ShardedBuffer> group,
               std::size_t index);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "bmtrain::GradientSink"; }

  /// Whether the gradient may come as two factors: that of a matrix, on the CPU.
  [[nodiscard]] bool takes_products() const;
  /// As apply() with the product of two matrices, which is made where it belongs if nothing is there yet.
  void take_product(const at::Tensor& left, const at::Tensor& right);

  // Hooks that users register on the parameter see the full gradient, before the reduction. They are not
  // autograd's own hooks of the parameter, because those also run on what arrives at the shard.
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept override {
    return hooks_;
  }
  /// `hooks`: a dict of Python functions.
  void set_hooks(PyObject* hooks);

 private:
  // Raises if the parameter's Block is gone.
  [[nodiscard]] std::shared_ptr<ShardedBuffer> group() const;

  at::Tensor parameter_;
  std::weak_ptr<ShardedBuffer> group_;
  std::size_t index_;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks_;
};

using SinkPtr = decltype(NodeTraits<NodePtr>::make<GradientSink>(
    at::Tensor(), at::Tensor(), std::weak_ptr<ShardedBuffer>(), std::size_t{0}));

}  // namespace bmtrain
