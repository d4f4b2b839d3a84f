// The kernels for the compiler's default target. See [Note: One body, several levels].
#ifndef __clang__
#pragma GCC optimize("O2")  // -O3 takes 15 s more to compile, for steps a quarter shorter without AVX2
#endif
#include <cstddef>
#include <cstdint>

#include "cpu/element.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace bmtrain::cpu::base {
#include "cpu/vector_base.inl"
//
#include "cpu/kernels.inl"

}  // namespace bmtrain::cpu::base
