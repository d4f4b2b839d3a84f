// Storages whose memory comes and goes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <utility>

namespace bmtrain {

/// A tensor over `storage` that may have no memory yet (see [Note: The gathered
/// storage] in sharded_buffer.h).
inline at::Tensor view_of_storage(const c10::Storage& storage, at::ScalarType dtype, std::int64_t offset,
                                  at::IntArrayRef shape) {
  const auto backend_key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(backend_key), c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return view;
}

/// Puts memory under the storage, or takes it away.
inline void put_memory(const c10::Storage& storage, c10::DataPtr memory, std::int64_t nbytes) {
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(static_cast<std::size_t>(nbytes));
}

/// A storage that has no memory yet.
inline c10::Storage empty_storage(c10::Device device) {
  return {c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
          /*allocator=*/nullptr,
          /*resizable=*/false};
}

}  // namespace bmtrain
