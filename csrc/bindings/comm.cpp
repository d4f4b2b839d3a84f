#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "comm/communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/hosts/hosts_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/shm/shm_communicator.h"
#include "comm/silent_communicator.h"
#include "comm/single_communicator.h"

namespace bmtrain {
namespace {

// Every call may wait for other ranks, directly or for a lock: none of them holds the interpreter.
using Released = py::call_guard<py::gil_scoped_release>;

py::dict traffic_as_dict(const Communicator& comm) {
  py::dict result;
  for (const auto& [op, count] : comm.traffic()) {
    result[py::str(op)] = py::make_tuple(count.messages, count.bytes);
  }
  return result;
}

void bind_interface(py::module_& module) {
  py::enum_<ReduceOp>(module, "ReduceOp", "How the ranks' values are combined.")
      .value("SUM", ReduceOp::kSum)
      .value("AVG", ReduceOp::kAvg)
      .value("MAX", ReduceOp::kMax)
      .value("MIN", ReduceOp::kMin)
      .value("PROD", ReduceOp::kProd);

  py::class_<Work, WorkPtr>(module, "Work", "An operation under way.")
      .def("wait", &Work::wait, Released())
      .def("is_completed", &Work::is_completed, Released());

  const auto label = [] { return py::arg("label") = ""; };
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator",
                                                          "One group of ranks that can exchange tensors.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("backend", &Communicator::backend)
      .def_property_readonly("closed", &Communicator::closed)
      .def("all_gather", &Communicator::all_gather, py::arg("output"), py::arg("input"), label(), Released())
      .def("all_to_all", &Communicator::all_to_all, py::arg("output"), py::arg("input"), label(), Released())
      .def(
          "all_to_all_uneven",
          [](Communicator& self, const at::Tensor& output, const at::Tensor& input,
             std::vector<std::int64_t> output_counts, std::vector<std::int64_t> input_counts,
             const std::string& label) {
            return self.all_to_all_uneven(output, input, {std::move(output_counts), std::move(input_counts)},
                                          label);
          },
          py::arg("output"), py::arg("input"), py::arg("output_counts"), py::arg("input_counts"), label(),
          Released())
      .def("reduce_scatter", &Communicator::reduce_scatter, py::arg("output"), py::arg("input"),
           py::arg("op"), label(), Released())
      .def("all_reduce", &Communicator::all_reduce, py::arg("tensor"), py::arg("op"), label(), Released())
      .def("reduce", &Communicator::reduce, py::arg("tensor"), py::arg("op"), py::arg("root"), label(),
           Released())
      .def("broadcast", &Communicator::broadcast, py::arg("tensor"), py::arg("root"), label(), Released())
      .def("send", &Communicator::send, py::arg("tensor"), py::arg("peer"), label(), Released())
      .def("recv", &Communicator::recv, py::arg("tensor"), py::arg("peer"), label(), Released())
      .def("barrier", &Communicator::barrier, label(), Released())
      .def("ring_reduce_scatter", &Communicator::ring_reduce_scatter, py::arg("output"), py::arg("input"),
           label(), Released())
      .def("settle", &Communicator::settle, py::arg("seconds"), Released())
      .def("failure", &Communicator::failure, Released())
      .def("forget_completed", &Communicator::forget_completed, Released())
      .def("abort", &Communicator::abort, py::arg("reason"), Released())
      .def("close", &Communicator::close, Released())
      .def("traffic", &traffic_as_dict)
      .def_property_readonly("bytes_copied", &Communicator::bytes_copied)
      .def_property_readonly("bytes_in_place", &Communicator::bytes_in_place)
      .def("reset_traffic", &Communicator::reset_traffic)
      .def("__repr__", [](const Communicator& comm) {
        return "<" + comm.backend() + " communicator \"" + comm.name() + "\", rank " +
               std::to_string(comm.rank()) + " of " + std::to_string(comm.size()) + ">";
      });
}

void bind_nccl(py::module_& module) {
  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(module, "NcclLibrary", "An NCCL library, opened.")
      .def(py::init<std::vector<std::string>>(), py::arg("candidates"), Released())
      .def_property_readonly("path", &NcclLibrary::path)
      .def_property_readonly("version",
                             [](const NcclLibrary& self) { return nccl_version_text(self.version()); })
      .def("make_unique_id", [](const NcclLibrary& self) { return py::bytes(self.make_unique_id()); });
  py::class_<NcclCommunicator, Communicator, std::shared_ptr<NcclCommunicator>>(
      module, "NcclCommunicator", "Ranks connected by NCCL, each with a device of its own.")
      .def(py::init<std::shared_ptr<NcclLibrary>, std::string, int, int, std::string, c10::Device, double>(),
           py::arg("library"), py::arg("unique_id"), py::arg("rank"), py::arg("size"), py::arg("name"),
           py::arg("device"), py::arg("timeout_seconds"), Released())
      .def("split", &NcclCommunicator::split, py::arg("color"), py::arg("rank"), py::arg("size"),
           py::arg("name"), Released())
      .def_property_readonly("library", &NcclCommunicator::library)
      .def_property("peers_per_group", &NcclCommunicator::peers_per_group,
                    &NcclCommunicator::set_peers_per_group)
      .def("poll", &NcclCommunicator::poll, Released())
      .def("begin_group", &NcclCommunicator::begin_group, Released())
      .def("end_group", &NcclCommunicator::end_group, Released());
}

}  // namespace

void bind_comm(py::module_& module) {
  bind_interface(module);
  py::class_<SingleCommunicator, Communicator, std::shared_ptr<SingleCommunicator>>(
      module, "SingleCommunicator", "The communicator of a group with one rank.")
      .def(py::init<std::string>(), py::arg("name"));
  py::class_<SilentCommunicator, Communicator, std::shared_ptr<SilentCommunicator>>(
      module, "SilentCommunicator", "Moves nothing: what a step costs without communication.")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("replaced"));
  py::class_<GlooCommunicator, Communicator, std::shared_ptr<GlooCommunicator>>(
      module, "GlooCommunicator", "Ranks connected by a Gloo process group.")
      .def(py::init<c10::intrusive_ptr<c10d::ProcessGroup>, int, int, std::string, double>(),
           py::arg("process_group"), py::arg("rank"), py::arg("size"), py::arg("name"),
           py::arg("timeout_seconds"), Released());
  bind_nccl(module);
  py::class_<ShmCommunicator, Communicator, std::shared_ptr<ShmCommunicator>>(
      module, "ShmCommunicator", "Ranks of one host, connected by shared memory.")
      .def(py::init<const std::vector<int>&, std::vector<int>, int, int, std::string, double>(),
           py::arg("files"), py::arg("watches"), py::arg("rank"), py::arg("size"), py::arg("name"),
           py::arg("timeout_seconds"), Released())
      .def_static("segment_bytes", &ShmCommunicator::segment_bytes, py::arg("size"))
      .def_property("longest_wait", &ShmCommunicator::longest_wait, &ShmCommunicator::set_longest_wait);
  py::class_<HostsCommunicator, GlooCommunicator, std::shared_ptr<HostsCommunicator>>(
      module, "HostsCommunicator", "Ranks of several hosts: Gloo between them, shared memory within.")
      .def(py::init<c10::intrusive_ptr<c10d::ProcessGroup>, int, int, std::string, double,
                    std::shared_ptr<ShmCommunicator>>(),
           py::arg("process_group"), py::arg("rank"), py::arg("size"), py::arg("name"),
           py::arg("timeout_seconds"), py::arg("local"), Released());
}

}  // namespace bmtrain
