// Random pauses at race points: what only works because it was in time does not work any more.
#pragma once

#include <cstdint>
#include <string>

namespace bmtrain {

/// From now on every second race point of this process pauses, for up to `most_microseconds`; 0 for none.
void set_random_delays(std::uint64_t seed, std::int64_t most_microseconds);

/// Delays each chunk of an update by a random time, and lets those of the block with this label fail.
void disturb_updates(std::int64_t max_delay_microseconds, const std::string& failing_label);

/// Delays each transfer of the disk tier by a random time, and ends number `failing` from now (0 for the
/// next, negative for none) with `result`: fewer bytes, or a negative error number.
void disturb_transfers(std::int64_t max_delay_microseconds, std::int64_t failing, std::int64_t result);

}  // namespace bmtrain
