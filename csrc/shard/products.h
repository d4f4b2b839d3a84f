// Gradients of weights that products were taken with, made where they belong in the flat buffer.
//
// Called by the thread that is about to run the backward of a block, whose hooks then run on autograd's
// threads.
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

#include <cstdint>
#include <memory>
#include <vector>

#include "shard/graph.h"

namespace bmtrain {

/// Products that wait: gradients of weights, apart from the rest of a backward. For one thread at a time.
class DeferredProducts {
 public:
  void add(NodePtr sink, const at::Tensor& left, const at::Tensor& right);
  /// Makes the products, in the order in which they were added.
  void run();

 private:
  struct Product {
    NodePtr sink;
    at::Tensor left, right;
  };
  std::vector<Product> products_;
};

/// Lets the products in the graph of `roots` write in place, see [Note: Products in place]; with `packed`
/// also those that have to unpack for it what they were taken with. On the CPU, or with `later`, to which
/// they are added instead of being made. Returns how many did not yet.
std::int64_t write_products_in_place(const GraphRoots& roots, bool packed,
                                     const std::shared_ptr<DeferredProducts>& later);

}  // namespace bmtrain
