// The memory of a ShardedBuffer's shards, and what users put in the place of it.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <utility>
#include <vector>

#include "common/check.h"
#include "shard/materialize.h"
#include "shard/sharded_buffer.h"
#include "shard/storage.h"

namespace bmtrain {

void ShardedBuffer::make_shard_memory() {
  const c10::Storage shard_storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, options_.device),
                                   c10::GetAllocator(options_.device.type()), /*resizable=*/true);
  shard_ = view_of_storage(shard_storage, options_.dtype, 0, {layout_.partition()});
  local_views_.clear();
  for (const LocalPart& part : local_parts_) {
    local_views_.push_back(view_of_storage(shard_storage, options_.dtype, part.shard_offset, {part.numel}));
  }
  if (!full_.defined() || !has_own_buffer()) {
    make_gathered_views(has_own_buffer() ? empty_storage(options_.device) : shard_storage);
  }
}

void ShardedBuffer::make_gathered_views(const c10::Storage& storage) {
  full_ = view_of_storage(storage, options_.compute_dtype, 0, {layout_.padded_total()});
  wire_ = widens() ? view_of_storage(empty_storage(options_.device), options_.gather_dtype, 0,
                                     {layout_.padded_total()})
                   : full_;
  full_views_.clear();
  for (std::size_t i = 0; i < options_.shapes.size(); ++i) {
    full_views_.push_back(
        view_of_storage(storage, options_.compute_dtype, layout_.span(i).offset, options_.shapes[i]));
  }
}

void ShardedBuffer::allocate() {
  const c10::Storage& storage = shard_.storage();
  if (storage.nbytes() == 0) {
    const at::Tensor zeros = at::zeros(shard_.sizes(), shard_.options());
    const auto nbytes = static_cast<std::int64_t>(zeros.storage().nbytes());
    put_memory(storage, zeros.storage().set_data_ptr(c10::DataPtr(nullptr, options_.device)), nbytes);
  }
}

void ShardedBuffer::make_shard(std::size_t index) {
  check_index(index);
  const c10::InferenceMode normal_tensors(false);
  allocate();
  materialize(options_.parameters[index], local_views_[index]);
}

void ShardedBuffer::attach() {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    if (!options_.parameters[i].is_meta()) {
      options_.parameters[i].set_data(local_views_[i]);
    }
  }
}

bool ShardedBuffer::is_attached(std::size_t index) const {
  const at::Tensor& parameter = options_.parameters[index];
  return parameter.dim() == 1 && parameter.numel() == local_parts_[index].numel &&
         parameter.storage_offset() == local_parts_[index].shard_offset &&
         parameter.storage().unsafeGetStorageImpl() == shard_.storage().unsafeGetStorageImpl();
}

void ShardedBuffer::leave_memory_to_others() {
  const at::Tensor old = shard_;
  if (old.storage().nbytes() == 0 || static_cast<std::int64_t>(old.storage().use_count()) <=
                                         num_references().first + 1) {  // and `old` itself
    return;
  }
  std::vector<bool> attached;
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    attached.push_back(!options_.parameters[i].is_meta() && is_attached(i));
  }
  make_shard_memory();
  allocate();
  shard_.copy_(old);
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    if (attached[i]) {
      options_.parameters[i].set_data(local_views_[i]);
    }
  }
}

bool ShardedBuffer::adopt_data() {
  bool adopted = false;
  for (std::size_t i = 0; !bound_ && i < options_.parameters.size(); ++i) {
    if (options_.parameters[i].is_meta() || is_attached(i)) {
      continue;
    }
    const at::Tensor& parameter = options_.parameters[i];
    const LocalPart& part = local_parts_[i];
    BMT_CHECK(
        StateError,
        parameter.scalar_type() == options_.dtype && parameter.device().type() == options_.device.type(),
        options_.label, ": a parameter of shape ", at::IntArrayRef(options_.shapes[i]), " has become ",
        parameter.scalar_type(), " on ", parameter.device(), " while the Block holds ", options_.dtype,
        " on ", options_.device, "; convert the whole Block or model, not a module in it");
    const bool is_full = parameter.sizes() == at::IntArrayRef(options_.shapes[i]);
    BMT_CHECK(StateError, is_full || (parameter.dim() == 1 && parameter.numel() == part.numel),
              options_.label, ": a parameter's data were replaced by a tensor of shape ", parameter.sizes(),
              "; expected the full shape ", at::IntArrayRef(options_.shapes[i]), " or this rank's ",
              part.numel, " elements");
    const c10::AutoGradMode no_grad(false);
    const c10::InferenceMode normal_tensors(false);
    if (!adopted) {
      leave_memory_to_others();
    }
    const at::Tensor flat = parameter.detach().reshape({-1});
    local_views_[i].copy_(is_full ? flat.narrow(0, part.param_begin, part.numel) : flat);
    parameter.set_data(local_views_[i]);
    adopted = true;
  }
  return adopted;
}

}  // namespace bmtrain
