#include "shard/buffer_spec.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

// Below, what is saved is less than what it costs to look after the memory.
constexpr std::int64_t kLeastShared = std::int64_t{1} << 20;

std::vector<std::int64_t> numels_of(const std::vector<std::vector<std::int64_t>>& shapes) {
  std::vector<std::int64_t> numels;
  numels.reserve(shapes.size());
  for (const auto& shape : shapes) {
    numels.push_back(c10::multiply_integers(shape));
  }
  return numels;
}

// Reads of a storage raise an error from refuse_reads() to allow_reads(). torch has this since 2.12.
void allow_reads(auto* storage) {
  if constexpr (requires { storage->clear_data_ptr_access_error_msg_(); }) {
    storage->clear_data_ptr_access_error_msg_();
  }
}

void refuse_reads(auto* storage, const std::string& label) {
  if constexpr (requires { storage->clear_data_ptr_access_error_msg_(); }) {
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
        label + ": a parameter's full tensor, or a view of it, was kept and is used outside of the " +
        "Block, which has given its memory back; keep a copy (weight.detach().clone())");
  }
}

BufferOptions checked(BufferOptions options) {
  const std::size_t count = options.parameters.size();
  BMT_CHECK(ValueError, options.shapes.size() == count, "shapes: expected one per parameter (", count,
            "), got ", options.shapes.size());
  BMT_CHECK(ValueError, options.names.size() == count, "names: expected one per parameter (", count,
            "), got ", options.names.size());
  for (const auto& shape : options.shapes) {
    std::int64_t numel = 1;
    for (const std::int64_t size : shape) {
      BMT_CHECK(ValueError, size >= 0 && !__builtin_mul_overflow(numel, size, &numel),
                "shapes: expected sizes of at least 0 whose product fits in 64 bits, got ",
                at::IntArrayRef(shape));
    }
  }
  for (const at::Tensor& parameter : options.parameters) {
    BMT_CHECK(TypeError, parameter.scalar_type() == options.dtype, "parameters: expected dtype ",
              c10::toString(options.dtype), ", got ", c10::toString(parameter.scalar_type()));
  }
  BMT_CHECK(TypeError, options.gather_comm != nullptr, "gather_comm: expected a communicator, got None");
  BMT_CHECK(TypeError, options.reduce_comm != nullptr, "reduce_comm: expected a communicator, got None");
  BMT_CHECK(TypeError, options.pool != nullptr, "pool: expected a BufferPool, got None");
  return options;
}

}  // namespace

BufferSpec::BufferSpec(BufferOptions options)
    : BufferOptions(checked(std::move(options))),
      layout(numels_of(shapes), static_cast<std::int64_t>(c10::elementSize(dtype)), gather_comm->size()) {
  for (std::size_t i = 0; i < num_parameters(); ++i) {
    local_parts.push_back(layout.local_part(i, gather_comm->rank()));
  }
}

bool BufferSpec::has_gathered_memory() const {
  return layout.num_ranks() > 1 || compute_dtype != dtype || widens() || host_lane;
}

std::int64_t BufferSpec::full_bytes(at::ScalarType of_dtype) const {
  return layout.padded_total() * static_cast<std::int64_t>(c10::elementSize(of_dtype));
}

bool BufferSpec::is_worth_sharing(at::ScalarType of_dtype) const {
  return device.is_cpu() && layout.num_ranks() > 1 && full_bytes(of_dtype) >= kLeastShared;
}

at::Tensor BufferSpec::empty_shard(at::ScalarType of_dtype) const {
  return at::empty({layout.partition()}, at::TensorOptions().dtype(of_dtype).device(device));
}

at::Tensor BufferSpec::empty_at_home(at::ScalarType of_dtype) const {
  const auto options = at::TensorOptions().dtype(of_dtype).device(home());
  return at::empty({layout.partition()}, options.pinned_memory(host_lane && device.is_cuda()));
}

at::Tensor BufferSpec::full(const c10::Storage& storage, at::ScalarType of_dtype) const {
  return view_of_storage(storage, of_dtype, 0, {layout.padded_total()});
}

at::Tensor BufferSpec::full_over(c10::DataPtr memory, at::ScalarType of_dtype) const {
  const c10::Storage storage = empty_storage(device);
  put_memory(storage, std::move(memory), full_bytes(of_dtype));
  return full(storage, of_dtype);
}

at::Tensor BufferSpec::full_from_pool(at::ScalarType of_dtype) const {
  return full_over(pool->acquire(full_bytes(of_dtype), device), of_dtype);
}

std::vector<at::Tensor> BufferSpec::full_views(const c10::Storage& storage, at::ScalarType of_dtype) const {
  std::vector<at::Tensor> views;
  views.reserve(num_parameters());
  for (std::size_t i = 0; i < num_parameters(); ++i) {
    views.push_back(view_of_storage(storage, of_dtype, layout.span(i).offset, shapes[i]));
  }
  return views;
}

void BufferSpec::check_index(std::size_t index) const {
  BMT_CHECK(ValueError, index < num_parameters(), "index: expected 0 to ", num_parameters(),
            " (excluded), got ", index);
}

void BufferSpec::check_flags(const char* name, const std::vector<bool>& flags) const {
  BMT_CHECK(ValueError, flags.size() == num_parameters(), name, ": expected ", num_parameters(),
            " flags, got ", flags.size());
}

at::Tensor view_of_storage(const c10::Storage& storage, at::ScalarType dtype, std::int64_t offset,
                           at::IntArrayRef shape) {
  const auto backend_key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(backend_key), c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return view;
}

c10::Storage empty_storage(c10::Device device) {
  return {c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
          /*allocator=*/nullptr,
          /*resizable=*/false};
}

void put_memory(const c10::Storage& storage, c10::DataPtr memory, std::int64_t nbytes) {
  allow_reads(storage.unsafeGetStorageImpl());
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(static_cast<std::size_t>(nbytes));
}

void take_memory(const c10::Storage& storage, const std::string& label) {
  put_memory(storage, c10::DataPtr(nullptr, storage.device()), 0);
  refuse_reads(storage.unsafeGetStorageImpl(), label);
}

void zero_outside(const at::Tensor& flat, const std::vector<Span>& spans) {
  std::int64_t clean_until = 0;
  const auto zero_up_to = [&](std::int64_t end) {
    if (end > clean_until) {
      flat.narrow(0, clean_until, end - clean_until).zero_();
    }
  };
  for (const Span& span : spans) {
    zero_up_to(span.offset);
    clean_until = span.offset + span.numel;
  }
  zero_up_to(flat.numel());
}

}  // namespace bmtrain
