#include "shard/graph.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <unordered_set>
#include <utility>

#include "common/check.h"
#include "shard/sharded_buffer.h"

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

IslandShore::IslandShore(std::shared_ptr<const OpenIslands> open, std::string refusal)
    : open_(std::move(open)), refusal_(std::make_shared<const std::string>(std::move(refusal))) {}

void IslandShore::guard(const at::Tensor& leaf) const {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<IslandShore>(*this));
}

void IslandShore::operator()(const torch::autograd::Variable& leaf) {
  if (open_->count() == 0) {
    leaf.mutable_grad().reset();
    throw StateError(*refusal_);
  }
}

void attach_island(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                   std::function<Gradients(const Gradients&)> backward) {
  const auto node = NodeTraits<NodePtr>::make<IslandNode>(std::move(backward));
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor output : outputs) {
    if (output.is_view()) {  // a write to one starts at the first output of a node
      const auto passage = NodeTraits<NodePtr>::make<torch::autograd::Identity>();
      passage->add_next_edge({node, node->add_input_metadata(output)});
      torch::autograd::create_gradient_edge(output, passage);
    } else {
      torch::autograd::create_gradient_edge(output, node);
    }
  }
}

GradientSink::GradientSink(const at::Tensor& full_view, std::weak_ptr<ShardedBuffer> buffer,
                           std::size_t index)
    // As an accumulator: the highest sequence number, so that autograd runs it as soon as it is ready.
    : Node(/*sequence_nr=*/UINT64_MAX), buffer_(std::move(buffer)), index_(index) {
  add_input_metadata(full_view);
}

torch::autograd::variable_list GradientSink::apply(torch::autograd::variable_list&& gradients) {
  const at::Tensor& gradient = gradients.at(0);
  if (gradient.defined()) {
    buffer()->reduction()->accumulate(index_, gradient);
  }
  return {};
}

std::shared_ptr<ShardedBuffer> GradientSink::buffer() const {
  std::shared_ptr<ShardedBuffer> buffer = buffer_.lock();
  BMT_CHECK(StateError, buffer != nullptr, "a gradient arrived for a parameter whose Block no longer exists");
  return buffer;
}

void GradientSink::set_hook(std::unique_ptr<torch::autograd::FunctionPreHook> hook) {
  hooks_.clear();
  hooks_.push_back(std::move(hook));
}

}  // namespace bmtrain
