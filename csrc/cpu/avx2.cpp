// The kernels for AVX2. See [Note: One body, several levels].
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/element.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

// No header after this line.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif

namespace bmtrain::cpu::avx2 {

using Register = __m256;
using WideRegister = __m256d;
#include "cpu/vector.inl"
//
#include "cpu/vector_avx2.inl"
//
#include "cpu/kernels.inl"

}  // namespace bmtrain::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // defined(__x86_64__)
