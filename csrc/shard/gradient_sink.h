// GradientSink: the autograd node that takes a bound parameter's gradient to its place in the flat buffer.
// Autograd's threads run it; those that run the backward of one block are one at a time.
//
// [Note: Products in place]
// The gradient of a weight that a product was taken with is a product itself. Autograd gives it memory of its
// own, from which the sink copies it to its place in the flat buffer: for a transformer nearly all gradients
// are moved once more than need be. So before the backward of a block runs, the products in its graph that
// lead to a sink and nowhere else are found. The edge to the sink is taken away, so that autograd's node
// leaves the product out, and a hook of the node makes it instead, with the same call on the same operands
// and so with the same bits, in the flat buffer. What the graph does otherwise is left to autograd: weights
// used twice, results in another dtype, nodes that somebody watches, detect_anomaly(). A tensor that
// saved-tensor hooks have packed is unpacked here, and autograd's node finds it unpacked: hooks like those of
// torch.utils.checkpoint refuse a second time. One that waits on the host is left to autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shard/island.h"

namespace bmtrain {

class ShardedBuffer;

class GradientSink final : public torch::autograd::Node {
 public:
  /// `full_view` gives the shape and dtype of the gradients to come.
  GradientSink(const at::Tensor& full_view, std::weak_ptr<ShardedBuffer> buffer, std::size_t index);

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

/// Lets the products in the graph of `roots` write in place, see [Note: Products in place]; with `packed`
/// also those that have to unpack for it what they were taken with. On the CPU. Returns how many did not yet.
std::int64_t write_products_in_place(const GraphRoots& roots, bool packed);

}  // namespace bmtrain
