// Stands in for torch's header where a program needs nothing of a tensor but that it can be kept.
#pragma once

namespace at {
struct Tensor {};
}  // namespace at
