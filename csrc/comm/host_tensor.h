// What the transports through host memory have in common: tensors as bytes, and their
// stand-ins on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace bmtrain {

[[nodiscard]] std::int64_t bytes_of(const at::Tensor& tensor);
[[nodiscard]] char* data_of(const at::Tensor& tensor);
/// Uninitialised bytes on the host.
[[nodiscard]] at::Tensor scratch(std::int64_t bytes);

/// The tensor itself, or a copy on the host: several ranks that share one GPU talk through host memory.
[[nodiscard]] at::Tensor staged(const at::Tensor& tensor);
/// The tensor itself, or memory on the host for its values.
[[nodiscard]] at::Tensor staged_empty(const at::Tensor& tensor);
/// Copies a result that was staged back to where the caller wants it; null if that is the same memory.
[[nodiscard]] std::function<void()> publisher(const at::Tensor& host, const at::Tensor& destination);

}  // namespace bmtrain
