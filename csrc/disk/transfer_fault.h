// What tests do to transfers.
#pragma once

#include <atomic>
#include <cstdint>

namespace bmtrain {

/// What every end of a transfer calls, unless it is null: gets the number of bytes, or a negative error
/// number, and returns the one to believe. For any thread.
using TransferFault = std::int64_t (*)(bool is_write, std::int64_t offset, std::int64_t result);
inline std::atomic<TransferFault> transfer_fault{nullptr};

}  // namespace bmtrain
