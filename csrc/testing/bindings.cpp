// What Python sees of the machinery of tests, in the module bmtrain._C of builds that have it.
// Declared in bindings/bindings.h, which would include torch's headers: this file is compiled by itself, so
// that builds without it share all other objects.
#include <pybind11/pybind11.h>

#include "testing/disturbance.h"
#include "testing/host_runtime.h"

namespace py = pybind11;

namespace bmtrain {

void bind_testing(py::module_& module) {
  module.def("set_random_delays", &set_random_delays, py::arg("seed"), py::arg("most_microseconds"),
             "Pauses at random in front of operations, updates and buffers given back; 0 for none.");
  module.def("disturb_updates", &disturb_updates, py::arg("max_delay_microseconds"),
             py::arg("failing_label") = "", "Delays chunks by random times, or lets a block's fail.");
  module.def("disturb_transfers", &disturb_transfers, py::arg("max_delay_microseconds"),
             py::arg("failing") = -1, py::arg("result") = 0,
             "Delays transfers of the disk tier by random times, or ends one with another result.");
  module.def("install_device_runtime", &install_device_runtime, py::arg("library"));
}

}  // namespace bmtrain
