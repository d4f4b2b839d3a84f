// The Python module bmtrain._C: its parts, and how the core's errors become Python's.
#include <exception>

#include "bindings/bindings.h"
#include "common/check.h"
#include "ops/ops_cuda.h"

namespace {

// The class lives in Python, so that it can be caught without the extension being loaded. An operation that
// was aborted because of Ctrl-C raises what Ctrl-C raises.
void raise_own(const char* name, const char* message) {
  if (PyErr_CheckSignals() != 0) {
    return;
  }
  try {
    const auto type = py::module_::import("bmtrain.errors").attr(name);
    PyErr_SetString(type.ptr(), message);
  } catch (py::error_already_set& error) {
    error.restore();
  }
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) {
      std::rethrow_exception(pointer);
    }
  } catch (const bmtrain::ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const bmtrain::TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const bmtrain::StateError& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const bmtrain::CommunicationError& error) {
    raise_own("CommunicationError", error.what());
  } catch (const bmtrain::DiskError& error) {
    raise_own("DiskError", error.what());
  }
}

// False in builds without.
bool use_cuda_kernels() {
  if (bmtrain::ops::register_cuda_kernels == nullptr) {
    return false;
  }
  bmtrain::ops::register_cuda_kernels();
  return true;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled core of bmtrain: communicators, sharded buffers, optimizer loops.";
  py::register_local_exception_translator(&translate);
  bmtrain::bind_comm(module);
  bmtrain::bind_guard(module);
  bmtrain::bind_disk(module);
  bmtrain::bind_shard(module);
  bmtrain::bind_optim(module);
  module.def("use_cuda_kernels", &use_cuda_kernels);
  if (bmtrain::bind_testing != nullptr) {
    bmtrain::bind_testing(module.ptr());
  }
}
