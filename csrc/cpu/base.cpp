// The kernels for the compiler's default target. See [Note: One body, several levels].
#ifndef __clang__
// -O3 takes twice as long to compile. A step of this level takes 1.3 times as long with -O2.
#pragma GCC optimize("O2")
#endif
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/element.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace bmtrain::cpu::base {
using Register [[gnu::vector_size(16)]] = float;
using WideRegister [[gnu::vector_size(16)]] = double;
#include "cpu/vector.inl"
//
#include "cpu/vector_base.inl"
//
#include "cpu/kernels.inl"

}  // namespace bmtrain::cpu::base
