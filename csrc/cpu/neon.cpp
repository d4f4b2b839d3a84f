// The kernels for NEON. See [Note: One body, several levels].
#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "cpu/element.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace bmtrain::cpu::neon {

#include "cpu/vector_neon.inl"
//
#include "cpu/kernels.inl"

}  // namespace bmtrain::cpu::neon

#endif  // defined(__aarch64__)
