#include "shard/graph_walk.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace bmtrain {

std::uint64_t next_node_number() { return at::sequence_number::peek(); }

std::string find_older_node(const std::vector<at::Tensor>& outputs, std::uint64_t first) {
  using torch::autograd::Node;
  std::vector<Node*> pending;
  std::unordered_set<Node*> seen;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      pending.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    visit(output.grad_fn().get());
  }
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    // Accumulators (and our gradient sinks) carry the highest number of all.
    if (node->sequence_nr() < first) {
      return node->name();
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return "";
}

}  // namespace bmtrain
