#include "bindings.h"

namespace bmtrain {

void bind_optim(py::module_& module) {}

}  // namespace bmtrain
