#include "shard/products.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <unordered_map>
#include <utility>

#include "shard/sharded_buffer.h"

namespace bmtrain {
namespace {

using torch::autograd::AnomalyMode;
using torch::autograd::Edge;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::generated::AddmmBackward0;
using torch::autograd::generated::MmBackward0;
using torch::autograd::generated::TBackward0;

/// A product that was taken with a parameter: its node, and what is needed for the parameter's gradient.
struct Product {
  Node* node;
  SavedVariable* other;  // what the parameter was multiplied with, from the left
  std::size_t input;     // which of the node's inputs the parameter is
};

/// Products without a factor only: node == nullptr is none.
Product product_of(Node* node) {
  if (auto* addmm = dynamic_cast<AddmmBackward0*>(node);
      addmm != nullptr && addmm->mat1_layout == at::kStrided && addmm->alpha.equal(1)) {
    return {addmm, &addmm->mat1_, 2};
  }
  if (auto* mm = dynamic_cast<MmBackward0*>(node); mm != nullptr && mm->self_layout == at::kStrided) {
    return {mm, &mm->self_, 1};
  }
  return {nullptr, nullptr, 0};
}

/// Counts the edges that lead to each node that `roots` lead to, and returns the products among these nodes.
std::vector<Product> products_of(const GraphRoots& roots, std::unordered_map<Node*, int>& counts) {
  std::vector<Product> products;
  visit_graph(roots, [&](Node& node) {
    if (const Product product = product_of(&node); product.node != nullptr) {
      products.push_back(product);
    }
    for (const Edge& edge : node.next_edges()) {
      if (edge.is_valid()) {
        ++counts[edge.function.get()];
      }
    }
    return true;
  });
  return products;
}

/// Whether somebody sees what comes into the node or what it makes. Hooks of a tensor come before both.
bool is_watched(Node& node) { return !(node.pre_hooks().empty() && node.post_hooks().empty()); }

bool has_hooks(Node& node) {
  return is_watched(node) || !(node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty());
}

/// Makes the gradient of a parameter, when that of the product has come.
class MakeGradient final : public torch::autograd::FunctionPreHook {
 public:
  MakeGradient(const NodePtr& node, SavedVariable* other, NodePtr sink, bool is_transposed,
               std::shared_ptr<DeferredProducts> later)
      : node_(node),
        other_(other),
        sink_(std::move(sink)),
        is_transposed_(is_transposed),
        later_(std::move(later)) {}

  variable_list operator()(const variable_list& gradients) override {
    const at::Tensor& gradient = gradients.at(0);
    if (gradient.defined()) {
      const at::Tensor other = other_->unpack(node_.lock());
      if (other_->has_hooks()) {
        *other_ = SavedVariable(other, false);  // the node unpacks it too, and some hooks can do so only once
      }
      // The two forms that the gradient of mm() has, by the layout of what was multiplied with.
      const at::Tensor left = is_transposed_ ? gradient.t() : other.t();
      const at::Tensor& right = is_transposed_ ? other : gradient;
      if (later_ != nullptr) {
        later_->add(sink_, left, right);
      } else {
        static_cast<GradientSink&>(*sink_).take_product(left, right);
      }
    }
    return gradients;
  }

 private:
  NodeTraits<NodePtr>::Weak node_;  // owns this hook
  SavedVariable* other_;
  NodePtr sink_;
  bool is_transposed_;
  std::shared_ptr<DeferredProducts> later_;  // null: now
};

/// Where the gradient of a product's parameter goes.
struct Way {
  NodePtr sink;  // null: not to a sink alone
  bool is_transposed = false;
};

Way way_to_sink(const Edge& first, const std::unordered_map<Node*, int>& edges, bool any_device) {
  Way way{first.function};
  if (auto* transpose = dynamic_cast<TBackward0*>(first.function.get()); transpose != nullptr) {
    if (edges.at(transpose) > 1 || has_hooks(*transpose)) {
      return {};
    }
    way = {transpose->next_edge(0).function, true};
  }
  auto* sink = dynamic_cast<GradientSink*>(way.sink.get());
  if (sink == nullptr || edges.at(sink) > 1 || !sink->takes_products(any_device)) {
    return {};
  }
  return way;
}

}  // namespace

bool GradientSink::takes_products(bool any_device) const {
  const torch::autograd::InputMetadata& expected = input_metadata(0);
  const auto shape = expected.shape_as_dim_vector();
  // With a dimension of 1 the layout does not say which of two ways autograd takes.
  return (any_device || expected.device().is_cpu()) && shape.size() == 2 && shape[0] > 1 && shape[1] > 1;
}

void GradientSink::take_product(const at::Tensor& left, const at::Tensor& right) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor place;
  if (hooks_.empty()) {
    place = buffer()->reduction()->take_place(index_, left.scalar_type());
  }
  if (place.defined()) {
    at::mm_out(place, left, right);
    return;
  }
  torch::autograd::variable_list gradients{at::mm(left, right)};
  for (const auto& hook : hooks_) {
    gradients = (*hook)(gradients);
  }
  apply(std::move(gradients));
}

void DeferredProducts::add(NodePtr sink, const at::Tensor& left, const at::Tensor& right) {
  products_.push_back({std::move(sink), left, right});
}

void DeferredProducts::run() {
  for (Product& product : std::exchange(products_, {})) {
    static_cast<GradientSink&>(*product.sink).take_product(product.left, product.right);
    product = {};  // its factors may be large
  }
}

std::int64_t write_products_in_place(const GraphRoots& roots, bool packed,
                                     const std::shared_ptr<DeferredProducts>& later) {
  // Who watches single operations sees those that autograd makes.
  if (AnomalyMode::is_enabled() || at::autocast::is_autocast_enabled(at::kCPU) ||
      (later != nullptr && at::autocast::is_autocast_enabled(at::kCUDA)) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return 0;
  }
  std::unordered_map<Node*, int> edges;
  std::int64_t found = 0;
  for (const Product& product : products_of(roots, edges)) {  // all are found: transposes end with the edges
    if ((product.other->has_hooks() && !packed) || is_watched(*product.node)) {
      continue;
    }
    Edge& edge = product.node->next_edges()[product.input];
    const Way way = edge.is_valid() ? way_to_sink(edge, edges, later != nullptr) : Way{};
    if (way.sink != nullptr) {
      product.node->add_pre_hook(std::make_unique<MakeGradient>(product.node->getptr(), product.other,
                                                                way.sink, way.is_transposed, later));
      edge = Edge();
      ++found;
    }
  }
  return found;
}

}  // namespace bmtrain
