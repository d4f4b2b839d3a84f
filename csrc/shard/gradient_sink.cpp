#include "shard/gradient_sink.h"

#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include "common/check.h"
#include "common/python_reference.h"
#include "shard/sharded_buffer.h"

namespace bmtrain {
namespace {

namespace py = pybind11;

/// Python functions in a dict, each given the gradient that the one before returned (or left as it was).
class PythonHooks final : public torch::autograd::FunctionPreHook {
 public:
  explicit PythonHooks(PyObject* hooks) : hooks_(hooks) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const py::gil_scoped_acquire gil;
    torch::autograd::variable_list results = gradients;
    const auto hooks = py::reinterpret_borrow<py::dict>(hooks_.get());
    for (const py::handle hook : py::list(hooks.attr("values")())) {
      if (!results.at(0).defined()) {
        break;
      }
      const py::object changed = hook(results[0]);
      if (!changed.is_none()) {
        results[0] = changed.cast<at::Tensor>();
      }
    }
    return results;
  }

 private:
  PythonReference hooks_;
};

}  // namespace

GradientSink::GradientSink(at::Tensor parameter, const at::Tensor& full_view,
                           std::weak_ptr<ShardedBuffer> group, std::size_t index)
    // As an accumulator: the highest sequence number, so that autograd runs it
    // as soon as it is ready.
    : Node(/*sequence_nr=*/UINT64_MAX),
      parameter_(std::move(parameter)),
      group_(std::move(group)),
      index_(index) {
  add_input_metadata(full_view);
}

torch::autograd::variable_list GradientSink::apply(torch::autograd::variable_list&& gradients) {
  const at::Tensor& gradient = gradients.at(0);
  if (gradient.defined()) {
    group()->accumulate(index_, gradient);
  }
  return {};
}

bool GradientSink::takes_products() const {
  const torch::autograd::InputMetadata& expected = input_metadata(0);
  const auto shape = expected.shape_as_dim_vector();
  // With a dimension of 1 the layout does not say which of two ways autograd takes.
  return expected.device().is_cpu() && shape.size() == 2 && shape[0] > 1 && shape[1] > 1;
}

void GradientSink::take_product(const at::Tensor& left, const at::Tensor& right) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor place;
  if (hooks_.empty()) {
    place = group()->take_place(index_, left.scalar_type());
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

std::shared_ptr<ShardedBuffer> GradientSink::group() const {
  std::shared_ptr<ShardedBuffer> group = group_.lock();
  BMT_CHECK(StateError, group != nullptr, "a gradient arrived for a parameter whose Block no longer exists");
  return group;
}

void GradientSink::set_hooks(PyObject* hooks) {
  hooks_.clear();
  hooks_.push_back(std::make_unique<PythonHooks>(hooks));
}

}  // namespace bmtrain
