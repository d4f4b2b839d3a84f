// Random pauses in front of everything that goes on behind the caller's back: what only works because it was
// in time does not work any more.
#pragma once

#include <cstdint>

namespace bmtrain {

/// From now on every second delay() of this process pauses, for up to `most_microseconds`; 0 for none.
void set_random_delays(std::uint64_t seed, std::int64_t most_microseconds);

/// Pauses, if delays are on: else one relaxed load.
void delay();

}  // namespace bmtrain
