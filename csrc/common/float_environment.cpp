#include "common/float_environment.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bmtrain {

unsigned float_environment() {
#if defined(__x86_64__)
  return _mm_getcsr();
#else
  return 0;
#endif
}

void set_float_environment([[maybe_unused]] unsigned environment) {
#if defined(__x86_64__)
  _mm_setcsr(environment);
#endif
}

}  // namespace bmtrain
