// What Python sees of the kernels, beside the operators of ops.cpp.
#include "bindings.h"

#include "cpu/isa.h"

namespace bmtrain {

void bind_optim(py::module_& module) {
  module.def(
      "cpu_isa", [] { return std::string(cpu::name_of(cpu::isa_level())); },
      "The instruction set level of the CPU kernels: base, avx2 or avx512. ValueError for a BMTRAIN_CPU_ISA "
      "that "
      "this machine cannot run.");
  module.def(
      "highest_cpu_isa", [] { return std::string(cpu::name_of(cpu::highest_isa_level())); },
      "The highest level this machine can run.");
  module.def("force_cpu_isa", &cpu::force_isa_level, py::arg("level"),
             "Changes the level of the whole process; for tests that compare levels.");
}

}  // namespace bmtrain
