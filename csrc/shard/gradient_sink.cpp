#include "shard/gradient_sink.h"

#include <torch/csrc/utils/pybind.h>

#include "common/check.h"
#include "common/python_reference.h"
#include "shard/shard_group.h"

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

GradientSink::GradientSink(at::Tensor parameter, const at::Tensor& full_view, std::weak_ptr<ShardGroup> group,
                           std::size_t index)
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
    const std::shared_ptr<ShardGroup> group = group_.lock();
    BMT_CHECK(StateError, group != nullptr,
              "a gradient arrived for a parameter whose Block no longer exists");
    group->accumulate(index_, gradient);
  }
  return {};
}

void GradientSink::set_hooks(PyObject* hooks) {
  hooks_.clear();
  hooks_.push_back(std::make_unique<PythonHooks>(hooks));
}

}  // namespace bmtrain
