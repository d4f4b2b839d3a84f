// What Python sees of the machinery of tests, in the module bmtrain._C of builds that have it.
// Declared in bindings/bindings.h, which would include torch's headers: this file is compiled by itself, so
// that builds without it share all other objects. pybind11's headers would take ten times as long as the
// rest.
#include <Python.h>

#include <exception>
#include <type_traits>

#include "testing/disturbance.h"
#include "testing/host_runtime.h"

namespace bmtrain {
namespace {

template <typename... T>
PyObject* call(PyObject* arguments, const char* format, void (*function)(T...),
               std::type_identity_t<T>... values) {
  if (PyArg_ParseTuple(arguments, format, &values...) == 0) return nullptr;
  try {
    function(values...);
    Py_RETURN_NONE;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

using Int = long long;  // as PyArg_ParseTuple writes it

PyObject* delays(PyObject* /*module*/, PyObject* arguments) {
  return call(arguments, "LL", +[](Int seed, Int most) { set_random_delays(seed, most); }, 0, 0);
}
PyObject* updates(PyObject* /*module*/, PyObject* arguments) {
  return call(arguments, "L|s", +[](Int most, const char* label) { disturb_updates(most, label); }, 0, "");
}
PyObject* transfers(PyObject* /*module*/, PyObject* arguments) {
  return call(
      arguments, "L|LL", +[](Int most, Int at, Int end) { disturb_transfers(most, at, end); }, 0, -1, 0);
}
PyObject* runtime(PyObject* /*module*/, PyObject* arguments) {
  return call(arguments, "s", +[](const char* library) { install_device_runtime(library); }, nullptr);
}

PyMethodDef methods[] = {{"set_random_delays", delays, METH_VARARGS, nullptr},
                         {"disturb_updates", updates, METH_VARARGS, nullptr},
                         {"disturb_transfers", transfers, METH_VARARGS, nullptr},
                         {"install_device_runtime", runtime, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_testing(PyObject* module) { PyModule_AddFunctions(module, methods); }

}  // namespace bmtrain
