// Questions about an autograd graph that Python is too slow to ask.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bmtrain {

/// The sequence number that the next autograd node of this thread will get.
[[nodiscard]] std::uint64_t next_node_number();

/// The name of a node reachable from `outputs` that existed before node number
/// `first`, or "" if there is none: a graph recorded since `first` that reaches
/// an older node has taken in a tensor with history from outside.
[[nodiscard]] std::string find_older_node(const std::vector<at::Tensor>& outputs, std::uint64_t first);

}  // namespace bmtrain
