#include "shard/island.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "common/check.h"
#include "shard/node_pointer.h"

namespace bmtrain {
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
