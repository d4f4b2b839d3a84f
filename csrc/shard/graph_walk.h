// Questions about an autograd graph that Python is too slow to ask.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shard/node_pointer.h"

namespace bmtrain {

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

}  // namespace bmtrain
