// What the transports through host memory have in common: tensors as bytes, and slices of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"

namespace bmtrain {

/// Up to here an all_reduce gathers everything everywhere: one exchange instead of two.
inline constexpr std::int64_t kSmallAllReduceBytes = 64 * 1024;

[[nodiscard]] std::int64_t bytes_of(const at::Tensor& tensor);
[[nodiscard]] char* data_of(const at::Tensor& tensor);
/// Uninitialised bytes on the host.
[[nodiscard]] at::Tensor scratch(std::int64_t bytes);

/// The tensor itself, or a copy on the host: several ranks that share one GPU talk through host memory.
[[nodiscard]] at::Tensor staged(const at::Tensor& tensor);
/// The tensor itself, or memory on the host for its values.
[[nodiscard]] at::Tensor staged_empty(const at::Tensor& tensor);
/// Copies a result that was staged back to where the caller wants it.
[[nodiscard]] std::function<void()> publisher(const at::Tensor& host, const at::Tensor& destination);

/// memcpy unless both are the same.
void copy_own(char* to, const char* from, std::int64_t bytes);

/// Rank r's element range of a tensor cut into `size` slices, the last ones shorter or empty.
struct Slice {
  std::int64_t begin;
  std::int64_t numel;
};
[[nodiscard]] Slice slice_of(std::int64_t numel, int size, int rank);

/// Pointers to one slice per rank in rank order: this rank's own, and the others' as they lie in `received`,
/// which has no slot for this rank.
[[nodiscard]] std::vector<const void*> in_rank_order(int rank, int size, const void* own,
                                                     const at::Tensor& received, std::int64_t bytes);

/// What ranks must agree on besides operation and size.
[[nodiscard]] int detail_of(at::ScalarType dtype, ReduceOp op, int root = 0);

}  // namespace bmtrain
