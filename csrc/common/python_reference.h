// PythonReference: a Python object kept by something that is freed on any thread, perhaps without the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace bmtrain {

class PythonReference {
 public:
  explicit PythonReference(PyObject* object) : object_(Py_NewRef(object)) {}
  PythonReference(const PythonReference&) = delete;
  PythonReference& operator=(const PythonReference&) = delete;
  ~PythonReference() {
    if (Py_IsInitialized() != 0) {
      const pybind11::gil_scoped_acquire gil;
      Py_DECREF(object_);
    }
  }

  /// To be used with the GIL.
  [[nodiscard]] pybind11::handle get() const { return object_; }

 private:
  PyObject* object_;
};

}  // namespace bmtrain
