#include "common/float_environment.h"

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bmtrain {

unsigned float_environment() {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  std::uint64_t control;  // FPCR, of which the upper half is reserved
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  return static_cast<unsigned>(control);
#else
  return 0;
#endif
}

void set_float_environment([[maybe_unused]] unsigned environment) {
#if defined(__x86_64__)
  _mm_setcsr(environment);
#elif defined(__aarch64__)
  const std::uint64_t control = environment;
  __asm__ volatile("msr fpcr, %0" : : "r"(control));
#endif
}

}  // namespace bmtrain
