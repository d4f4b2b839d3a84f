// How long the host sleeps while NCCL launches, and while it connects. Compiling it is the test.
#include "comm/nccl/pause.h"

namespace {

using bmtrain::Pause;
using std::chrono::microseconds;

constexpr microseconds slept_last(microseconds waited, int times) {
  microseconds last{0};
  for (int i = 0; i < times; ++i) last = Pause::next(last, waited);
  return last;
}

static_assert(slept_last(microseconds{0}, 1) == microseconds{20});
static_assert(slept_last(microseconds{500}, 100) == microseconds{50});
static_assert(slept_last(microseconds{19'999}, 100) == microseconds{50});
static_assert(slept_last(microseconds{20'000}, 100) == microseconds{2000});

}  // namespace
