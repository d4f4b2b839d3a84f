#include "shard/graph_walk.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace bmtrain {

using torch::autograd::Node;

std::uint64_t next_node_number() { return at::sequence_number::peek(); }

GraphRoots::GraphRoots(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    nodes.push_back(output.grad_fn());
  }
}

void visit_graph(const GraphRoots& roots, const std::function<bool(Node&)>& visit) {
  std::vector<Node*> pending;
  std::unordered_set<Node*> seen;
  const auto meet = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      pending.push_back(node);
    }
  };
  for (const NodePtr& root : roots.nodes) {
    meet(root.get());
  }
  while (!pending.empty()) {
    Node& node = *pending.back();
    pending.pop_back();
    if (!visit(node)) {
      return;
    }
    for (const auto& edge : node.next_edges()) {
      meet(edge.function.get());
    }
  }
}

std::string find_older_node(const std::vector<at::Tensor>& outputs, std::uint64_t first) {
  std::string found;
  const std::uint64_t here = at::RecordFunction::currentThreadId();
  visit_graph(GraphRoots(outputs), [&](const Node& node) {
    // Each thread numbers its own nodes: a backward over a GPU makes them in another one, and so may a
    // forward. Accumulators (and our gradient sinks) carry the highest number of all.
    if (node.thread_id() == here && node.sequence_nr() < first) {
      found = node.name();
    }
    return found.empty();
  });
  return found;
}

}  // namespace bmtrain
