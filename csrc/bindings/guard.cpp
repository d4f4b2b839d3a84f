// Python's view of the watchdog: plain dicts, which it sends to other ranks and writes to files as they are.
// No tensor passes here: pybind11's own headers do, which compile in a fraction of the time of torch's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/guard/flight_recorder.h"
#include "comm/guard/guarded_communicator.h"
#include "comm/guard/sentinel.h"
#include "comm/guard/watchdog.h"

namespace py = pybind11;

namespace bmtrain {

void bind_guard(py::module_& module);  // as in bindings.h

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

// Seconds since the epoch, None if it has not happened.
py::object to_seconds(OpRecord::Clock::time_point when) {
  if (when == OpRecord::Clock::time_point{}) {
    return py::none();
  }
  const auto ago = OpRecord::Clock::now() - when;
  const auto date = std::chrono::system_clock::now().time_since_epoch() - ago;
  return py::float_(std::chrono::duration<double>(date).count());
}

py::dict to_dict(const OpRecord& record) {
  py::dict result;
  result["id"] = record.id;
  result["op"] = record.op;
  result["sequence"] = record.sequence;
  result["label"] = record.label;
  result["dtype"] = record.dtype;
  result["numel"] = record.numel;
  result["detail"] = record.detail;
  result["peer"] = record.peer < 0 ? py::object(py::none()) : py::object(py::int_(record.peer));
  result["state"] = to_string(record.state);
  result["posted"] = to_seconds(record.posted);
  result["started"] = to_seconds(record.started);
  result["ended"] = to_seconds(record.ended);
  result["text"] = describe(record);
  return result;
}

py::object to_dict(const std::optional<Failure>& failure) {
  if (!failure) {
    return py::none();
  }
  py::dict result;
  result["kind"] = failure->kind;
  result["what"] = failure->what;
  result["group"] = failure->group;
  result["record"] = failure->record ? py::object(to_dict(*failure->record)) : py::object(py::none());
  return result;
}

py::list to_list(const std::vector<OpRecord>& records) {
  py::list result;
  for (const OpRecord& record : records) {
    result.append(to_dict(record));
  }
  return result;
}

// What the process does in every group; with all records where the whole flight is asked for.
py::list groups_of(Watchdog& watchdog, bool whole) {
  py::list result;
  for (const auto& recorder : watchdog.recorders()) {
    const auto records = recorder->records();
    py::dict group;
    group["group"] = recorder->key();
    group["name"] = recorder->name();
    group["members"] = recorder->members();
    group["posted"] = recorder->posted();
    group["blocked"] = to_list(recorder->blocked());
    group["last"] = records.empty() ? py::object(py::none()) : py::object(to_dict(records.back()));
    if (whole) {
      group["records"] = to_list(records);
    }
    result.append(std::move(group));
  }
  return result;
}

// It asks devices and NCCL, which may be slow to answer: nobody else is held up by that.
py::object overdue(Watchdog& watchdog) {
  std::optional<Failure> found;
  {
    const py::gil_scoped_release release;
    found = watchdog.overdue();
  }
  return to_dict(found);
}

py::list take_fingerprints(Watchdog& watchdog) {
  py::list result;
  for (const Fingerprint& taken : watchdog.take_fingerprints()) {
    py::dict fingerprint = to_dict(taken.record);
    fingerprint["group"] = taken.group;
    fingerprint["rank"] = taken.rank;
    fingerprint["size"] = taken.size;
    result.append(std::move(fingerprint));
  }
  return result;
}

}  // namespace

void bind_guard(py::module_& module) {
  py::class_<Watchdog, std::shared_ptr<Watchdog>>(
      module, "Watchdog", "Knows of all communicators and of the first thing that went wrong.")
      .def(py::init<double>(), py::arg("timeout_seconds"))
      .def_property_readonly("wake_fd", &Watchdog::wake_fd)
      .def_property_readonly("verdict", &Watchdog::verdict)
      .def_property_readonly("heard", &Watchdog::heard)
      .def("attend", &Watchdog::attend, py::arg("present"), Released())
      .def("take_failure", [](Watchdog& self) { return to_dict(self.take_failure()); })
      .def("take_fingerprints", &take_fingerprints)
      .def("release", &Watchdog::release, py::arg("group"), py::arg("sequence"), Released())
      .def("end_checks", &Watchdog::end_checks, Released())
      .def("overdue", &overdue)
      .def("blocked_for", &Watchdog::blocked_for, py::arg("seconds"), Released())
      .def(
          "report",
          [](Watchdog& self, std::string kind, std::string what) {
            self.report({std::move(kind), std::move(what), "", std::nullopt});
          },
          py::arg("kind"), py::arg("what"), Released())
      .def("condemn", &Watchdog::condemn, py::arg("verdict"), py::arg("survivable") = false, Released())
      .def("let_be_void", &Watchdog::let_be_void, py::arg("allowed"))
      .def("groups", &groups_of, py::arg("whole") = false);

  py::class_<GuardedCommunicator, Communicator, std::shared_ptr<GuardedCommunicator>>(
      module, "GuardedCommunicator", "A communicator whose operations are recorded and watched.")
      .def(py::init<std::shared_ptr<Communicator>, std::shared_ptr<Watchdog>, std::string, std::vector<int>,
                    bool>(),
           py::arg("inner"), py::arg("watchdog"), py::arg("key"), py::arg("members"), py::arg("check"))
      .def_property_readonly("inner", &GuardedCommunicator::inner);

  py::class_<Sentinel, std::shared_ptr<Sentinel>>(
      module, "Sentinel", "Ends a process that its peers have given up on and that cannot end by itself.")
      .def(py::init<std::string, int, int, double>(), py::arg("who"), py::arg("signal"), py::arg("stacks"),
           py::arg("silence_seconds"))
      .def("beat", &Sentinel::beat)
      .def("set_lines", &Sentinel::set_lines, py::arg("lines"))
      .def("arm", &Sentinel::arm, py::arg("seconds"), py::arg("why"))
      .def("release", &Sentinel::release);
  module.def("end_by_signal", &end_by_signal, py::arg("number"),
             "Ends the process by the default action of a signal, whatever handler it has.");
}

}  // namespace bmtrain
