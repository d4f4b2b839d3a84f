// The kernels for AVX-512. See [Note: One body, several levels].
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's AVX-512 headers start from undefined registers and warn about it (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/element.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

// No header after this line.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")
#endif

namespace bmtrain::cpu::avx512 {

using Register = __m512;
using WideRegister = __m512d;
#include "cpu/vector.inl"
//
#include "cpu/vector_avx512.inl"
//
#include "cpu/kernels.inl"

}  // namespace bmtrain::cpu::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // defined(__x86_64__)
