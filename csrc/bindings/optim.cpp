// What Python sees of the kernels, beside the operators of ops.cpp.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bindings/bindings.h"
#include "common/check.h"
#include "common/tensor_dtype.h"
#include "common/thread_pool.h"
#include "common/word_sum.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "ops/ops_cuda.h"
#include "optim/adam.h"
#include "optim/momentum.h"
#include "optim/offload_update.h"

namespace bmtrain {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

using Tensors = std::vector<at::Tensor>;
using Integers = std::vector<std::int64_t>;
using Dicts = std::vector<py::dict>;

// TypeError for a value of another type.
template <typename T>
T named(const char* name, const char* expected, const py::handle& value) {
  try {
    return py::cast<T>(value);
  } catch (const py::cast_error&) {
    throw TypeError(std::string(name) + ": expected " + expected + ", got " + Py_TYPE(value.ptr())->tp_name);
  }
}

// The options of groups, each a dict by their names.
template <typename Options>
Groups<Options> groups_from(const Integers& sizes, const Dicts& dicts) {
  Groups<Options> groups{sizes, std::vector<Options>(dicts.size())};
  Options::each_option([&](const char* name, auto option) {
    for (std::size_t g = 0; g < dicts.size(); ++g) {
      auto& value = groups.options[g].*option;
      value = named<std::decay_t<decltype(value)>>(name, "a number", dicts[g][name]);
    }
  });
  return groups;
}

// Calls call(tensors, groups) with the operands of a formula: lists of tensors, weights first, and after them
// perhaps one of integers.
template <typename Call>
auto with_operands(const std::string& formula, const py::sequence& lists, const Integers& sizes,
                   const Dicts& groups, const Call& call) {
  const bool is_adam = formula == "adam";
  const std::vector<const char*> names =
      is_adam ? std::vector{"weights", "rounded", "grads", "exp_avgs", "exp_avg_sqs", "steps"}
              : std::vector{"weights", "rounded", "grads", "momenta", "fresh"};
  const std::size_t num_lists = names.size() - 1, expected = num_lists + (formula == "lion" ? 0 : 1);
  BMT_CHECK(ValueError, is_adam || formula == "sgd" || formula == "lion",
            "formula: expected adam, sgd or lion, got ", formula);
  BMT_CHECK(ValueError, lists.size() == expected, "lists: expected ", expected, " for ", formula, ", got ",
            lists.size());
  std::vector<Tensors> tensors;
  for (std::size_t i = 0; i < num_lists; ++i)
    tensors.push_back(named<Tensors>(names[i], "a list of tensors", lists[i]));
  Integers numbers;
  if (expected > num_lists) numbers = named<Integers>(names.back(), "a list of integers", lists[num_lists]);
  const StepTensors step{tensors[0], tensors[1], tensors[2]};
  if (is_adam)
    return call(AdamTensors{step, tensors[3], tensors[4], numbers}, groups_from<AdamOptions>(sizes, groups));
  const MomentumTensors operands{step, tensors[3], numbers};
  return formula == "sgd" ? call(operands, groups_from<SgdOptions>(sizes, groups))
                          : call(operands, groups_from<LionOptions>(sizes, groups));
}

void add(OffloadUpdate& self, const std::string& formula, const py::sequence& lists, const Integers& sizes,
         const Dicts& groups) {
  with_operands(formula, lists, sizes, groups, [&](const auto& tensors, const auto& options) {
    self.add(tensors.step, slices_of(tensors, options));
  });
}

bool is_on_gpu(at::TensorList weights) {
  return !weights.empty() && weights[0].is_cuda() && ops::has_cuda_kernels != nullptr &&
         ops::has_cuda_kernels();
}

// [Note: Steps past the dispatcher]
// A step is no operator of torch's dispatcher, which would pack and unpack its dozen lists in 10 us, and more
// for each tensor: a third of that for a function called as it is.
std::tuple<double, double> step_of_groups(const std::string& formula, const py::sequence& lists,
                                          const Integers& sizes, const Dicts& groups, bool as_torch,
                                          bool with_delta, StepCheck* check) {
  const auto step = [&](const auto& tensors, auto options) -> std::tuple<double, double> {
    constexpr bool is_adam = std::is_same_v<decltype(options), AdamGroups>;
    BMT_CHECK(ValueError, is_adam || (!as_torch && !with_delta), formula,
              ": expected no as_torch and no with_delta");
    const py::gil_scoped_release no_gil;
    cpu::DeltaSums sums;
    if (is_on_gpu(tensors.step.weights)) {
      BMT_CHECK(ValueError, !with_delta && check == nullptr, formula,
                ": sums of updates are for CPU tensors");
      auto slices = slices_of(tensors, options);
      if constexpr (is_adam) {
        for (cpu::AdamSlice& slice : slices) slice.factors.as_multi_tensor = as_torch;
      }
      ops::step_on_cuda(slices, tensors.step.weights[0].device());
    } else if constexpr (is_adam) {
      for (AdamOptions& group : options.options) group.as_torch = as_torch;
      sums = step_on_cpu(tensors, options, with_delta, check);
    } else {
      step_on_cpu(tensors, options, check);
    }
    return {sums.sum, sums.sum_of_squares};
  };
  return with_operands(formula, lists, sizes, groups, step);
}

void stage(OffloadUpdate& self, const std::shared_ptr<StagingLane>& lane, int slot, const Tensors& gradients,
           const Tensors& host_gradients, const Tensors& parameters, const Tensors& host_parameters,
           const std::vector<std::optional<at::Tensor>>& sources,
           const std::shared_ptr<SentGradients>& sent) {
  Tensors defined;
  for (const std::optional<at::Tensor>& source : sources) defined.push_back(source.value_or(at::Tensor()));
  self.stage(std::make_shared<StagedCopies>(lane, slot, StagedTensors{gradients, host_gradients},
                                            StagedTensors{parameters, host_parameters}, defined, sent));
}

void bind_offload_update(py::module_& module) {
  py::class_<StagingLane, std::shared_ptr<StagingLane>>(
      module, "StagingLane", "The streams and slots by which updates reach parameters of a device.")
      .def(py::init<c10::Device, int>(), py::arg("device"), py::arg("num_slots"));
  py::class_<SentNumber, std::shared_ptr<SentNumber>>(module, "SentNumber",
                                                      "A number of the device on its way to the host.")
      .def(py::init<std::shared_ptr<StagingLane>, at::Tensor, at::Tensor>(), py::arg("lane"),
           py::arg("number"), py::arg("on_host"));
  py::class_<SentGradients, std::shared_ptr<SentGradients>>(
      module, "SentGradients", "Gradients that go to the host before there is an update to use them.")
      .def(py::init([](std::shared_ptr<StagingLane> lane, const Tensors& on_device, const Tensors& on_host) {
             return std::make_shared<SentGradients>(std::move(lane), StagedTensors{on_device, on_host});
           }),
           py::arg("lane"), py::arg("on_device"), py::arg("on_host"))
      .def("scale", &SentGradients::scale, py::arg("factor"))
      .def("drop", &SentGradients::drop);
  py::class_<OffloadUpdate, std::shared_ptr<OffloadUpdate>> update(module, "OffloadUpdate");
  py::enum_<Update::State>(update, "State")
      .value("READY", Update::State::kReady)
      .value("UPDATING", Update::State::kUpdating)
      .value("DONE", Update::State::kDone)
      .value("FAILED", Update::State::kFailed);
  update.def(py::init<std::string>(), py::arg("label"))
      .def("add", &add, py::arg("formula"), py::arg("lists"), py::arg("sizes"), py::arg("groups"))
      .def("stage", &stage, py::arg("lane"), py::arg("slot"), py::arg("gradients"), py::arg("host_gradients"),
           py::arg("parameters"), py::arg("host_parameters"), py::arg("sources"), py::arg("sent") = nullptr)
      .def_static("post", &OffloadUpdate::post, py::arg("updates"))
      .def_static("guard_gradients", &OffloadUpdate::guard_gradients, py::arg("update"),
                  py::arg("parameters"))
      .def_property_readonly("state", &OffloadUpdate::state)
      .def("zero_gradients_afterwards", &OffloadUpdate::zero_gradients_afterwards)
      .def("wait", &OffloadUpdate::wait, NoGil());
  module.def("lead_graphs_to", &OffloadUpdate::lead_graphs_to, py::arg("parameters"),
             "Whether a graph that exists leads to one of the parameters as they are, shards.");
  module.def("set_update_threads", &set_update_threads, py::arg("count"),
             "How many threads an offloaded update may use; 0: as many as follow from torch's.");
  module.def("num_update_workers", &num_update_workers,
             "How many threads work on offloaded updates beside those that wait for one.");
}

void zero_in_shares(const at::Tensor& tensor) {
  BMT_CHECK(TypeError, tensor.is_cpu() && tensor.is_contiguous(),
            "zero_in_shares: expected a contiguous CPU tensor, got one on ", tensor.device());
  cpu::zero(tensor.mutable_data_ptr(), tensor.numel(), dtype_of(tensor.scalar_type(), "zero_in_shares"));
}

Integers word_sums(const Tensors& tensors) {
  Integers sums;
  for (const at::Tensor& tensor : tensors) {
    BMT_CHECK(TypeError, tensor.is_cpu() && tensor.is_contiguous(),
              "word_sums: expected contiguous CPU tensors, got one on ", tensor.device());
    sums.push_back(word_sum(tensor.const_data_ptr(), tensor.nbytes()));
  }
  return sums;
}

Integers copy_and_sum_of(const Tensors& places, const Tensors& tensors) {
  return copy_and_sum(places, tensors);
}

void bind_steps(py::module_& module) {
  module.def("zero_in_shares", &zero_in_shares, NoGil(), py::arg("tensor"),
             "Zeroes a tensor, each page by the thread that will update it in a step of as many threads.");
  module.def("word_sums", &word_sums, NoGil(), py::arg("tensors"),
             "A sum over the memory of each tensor, which any one bit changes.");
  module.def("copy_and_sum", &copy_and_sum_of, NoGil(), py::arg("places"), py::arg("tensors"),
             "Copies tensors to places of as many bytes, and returns their word_sums.");
  py::class_<StepJournal, std::shared_ptr<StepJournal>>(
      module, "StepJournal", "A record of a step, with which another process can complete it.")
      .def(py::init<at::Tensor, std::int64_t>(), py::arg("memory"), py::arg("num_pieces"))
      .def_static("nbytes", &StepJournal::nbytes, py::arg("num_pieces"))
      .def_static("head_nbytes", &StepJournal::head_nbytes, py::arg("num_pieces"))
      .def_static("num_pieces_of", &StepJournal::num_pieces_of, py::arg("numel"))
      .def_property_readonly("step", &StepJournal::step)
      .def("start", &StepJournal::start, py::arg("step"));
  py::class_<StepCheck>(module, "StepCheck")
      .def(py::init([](std::vector<std::vector<double>> factors, std::shared_ptr<StepJournal> journal,
                       Integers first_pieces) {
             return StepCheck{std::move(factors), std::move(journal), std::move(first_pieces), {}, {}};
           }),
           py::arg("factors"), py::arg("journal") = nullptr, py::arg("first_pieces") = Integers())
      .def_readonly("before", &StepCheck::before)
      .def_readonly("after", &StepCheck::after);
  module.def(
      "step_of_groups", &step_of_groups, py::arg("formula"), py::arg("lists"), py::arg("sizes"),
      py::arg("groups"), py::kw_only(), py::arg("as_torch") = false, py::arg("with_delta") = false,
      py::arg("check") = nullptr,
      "Updates tensors by a formula, adam, sgd or lion. lists: its operands, weights first, group after "
      "group; sizes: the number of tensors of each group; groups: its options, a dict. Returns the sums "
      "of with_delta.");
}

}  // namespace

void bind_optim(py::module_& module) {
  bind_offload_update(module);
  bind_steps(module);
  module.def(
      "cpu_isa", [] { return std::string(cpu::name_of(cpu::isa_level())); },
      "The instruction set level of the CPU kernels: base, avx2 or avx512. ValueError for a BMTRAIN_CPU_ISA "
      "that "
      "this machine cannot run.");
  module.def(
      "highest_cpu_isa", [] { return std::string(cpu::name_of(cpu::highest_isa_level())); },
      "The highest level this machine can run.");
  module.def("set_processor_share", &set_processor_share, py::arg("count"),
             "Says how many processors this process may count on: loops of more threads never wait awake.");
  module.def("force_cpu_isa", &cpu::force_isa_level, py::arg("level"),
             "Changes the level of the whole process; for tests that compare levels.");
}

}  // namespace bmtrain
