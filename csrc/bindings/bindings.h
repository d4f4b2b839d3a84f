// One function per folder of the core, each adding its classes to the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace bmtrain {

void bind_comm(py::module_& module);
void bind_guard(py::module_& module);  // after bind_comm
void bind_disk(py::module_& module);
void bind_shard(py::module_& module);
void bind_optim(py::module_& module);
/// The machinery of tests, in csrc/testing; null in builds without.
[[gnu::weak]] void bind_testing(PyObject* module);

}  // namespace bmtrain
