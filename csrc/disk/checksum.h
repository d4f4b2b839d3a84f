// Checksum of the bytes of a piece.
#pragma once

#include <cstdint>

namespace bmtrain {

/// Returns the CRC-32 of zlib, which differs after a change of any single bit. It finds what a drive, a cable
/// or memory changed, and is no defence against a change on purpose. `nbytes` is a multiple of 64, and not 0.
[[nodiscard]] std::uint32_t crc32_of(const void* data, std::int64_t nbytes);

}  // namespace bmtrain
