#include "shard/island.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <unordered_set>

#include "common/check.h"

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

namespace {

class IslandNode final : public torch::autograd::Node {
 public:
  explicit IslandNode(std::function<Gradients(const Gradients&)> backward) : backward_(std::move(backward)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    torch::autograd::variable_list results = backward_(gradients);
    if (results.empty()) {
      results.resize(num_outputs());
    }
    return results;
  }
  std::string name() const override { return "bmtrain::Island"; }

 private:
  std::function<Gradients(const Gradients&)> backward_;
};

}  // namespace

struct IslandShore::Guard final : torch::autograd::PostAccumulateGradHook {
  Guard(std::shared_ptr<const OpenIslands> open, std::shared_ptr<const std::string> refusal)
      : open_(std::move(open)), refusal_(std::move(refusal)) {}

  void operator()(const torch::autograd::Variable& leaf) override {
    if (open_->count() == 0) {
      leaf.mutable_grad().reset();
      throw StateError(*refusal_);
    }
  }

 private:
  std::shared_ptr<const OpenIslands> open_;
  std::shared_ptr<const std::string> refusal_;
};

IslandShore::IslandShore(std::shared_ptr<const OpenIslands> open, std::string refusal)
    : open_(std::move(open)), refusal_(std::make_shared<const std::string>(std::move(refusal))) {}

void IslandShore::guard(const at::Tensor& leaf) const {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<Guard>(open_, refusal_));
}

void attach_island(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                   std::function<Gradients(const Gradients&)> backward) {
  const auto node = NodeTraits<NodePtr>::make<IslandNode>(std::move(backward));
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor output : outputs) {
    torch::autograd::create_gradient_edge(output, node);
  }
}

}  // namespace bmtrain
