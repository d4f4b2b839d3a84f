// Checksum of the bytes of one transfer.
#pragma once

#include <cstdint>

namespace bmtrain {

/// Returns a 64-bit checksum that differs after a change of any single bit, computed by the kernel pool.
///
/// Rounds of xxHash64 (Collet) over independent pieces; it finds what a drive, a cable or memory changed, and
/// is no defence against a change on purpose. `nbytes` is a multiple of 32.
[[nodiscard]] std::uint64_t checksum(const void* data, std::int64_t nbytes);

}  // namespace bmtrain
