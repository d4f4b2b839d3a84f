// The kernels for NEON. See [Note: One body, several levels].
#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/element.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace bmtrain::cpu::neon {

using Register = float32x4_t;
using WideRegister = float64x2_t;
#include "cpu/vector.inl"
//
#include "cpu/vector_neon.inl"
//
#include "cpu/kernels.inl"

}  // namespace bmtrain::cpu::neon

#endif  // defined(__aarch64__)
