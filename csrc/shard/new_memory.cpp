// Data and memory that shards get from elsewhere (a user's, a drive's, or the first of a parameter), and who
// else refers to what they have.
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "common/check.h"
#include "shard/sharded_buffer.h"

namespace bmtrain {

void lend(const at::Tensor& flat, const at::Tensor& memory) {
  BMT_CHECK(ValueError, memory.is_cpu() && memory.is_contiguous() && memory.nbytes() >= flat.nbytes(),
            "memory: expected ", flat.nbytes(), " contiguous bytes on the CPU, got ", memory.nbytes());
  auto held = std::make_unique<at::Tensor>(memory);
  void* const data = held->data_ptr();
  const auto let_go = [](void* tensor) { delete static_cast<at::Tensor*>(tensor); };
  put_memory(flat.storage(), {data, held.release(), let_go, flat.device()},
             static_cast<std::int64_t>(flat.nbytes()));
}

void ShardMemory::make(std::size_t index) {
  spec_.check_index(index);
  const PlainMode plain;
  allocate();
  materialize(spec_.parameters[index], local_views_[index]);
}

void materialize(const at::Tensor& parameter, const at::Tensor& data) {
  BMT_CHECK(StateError, parameter.is_meta(), "expected a parameter on the meta device, got one on ",
            parameter.device());
  BMT_CHECK(TypeError, parameter.scalar_type() == data.scalar_type(), "data: expected ",
            parameter.scalar_type(), ", got ", data.scalar_type());
  parameter.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  // As set_data() does where the device changes: an accumulator expects gradients like the old data.
  torch::autograd::impl::set_grad_accumulator(parameter, NodeTraits<NodePtr>::Weak(NodePtr()));
}

void ShardMemory::leave_memory_to_others(std::int64_t num_others) {
  const at::Tensor old = flat_;
  if (old.storage().nbytes() == 0 || static_cast<std::int64_t>(old.storage().use_count()) <=
                                         num_references() + num_others + 1) {  // and `old` itself
    return;
  }
  std::vector<std::size_t> attached;
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    if (!spec_.parameters[i].is_meta() && is_attached(i)) {
      attached.push_back(i);
    }
  }
  make_views();
  allocate();
  flat_.copy_(old);
  for (const std::size_t i : attached) {
    spec_.parameters[i].set_data(local_views_[i]);
  }
}

void ShardMemory::adopt_data(std::int64_t num_others) {
  const PlainMode plain;
  bool is_first = true;
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    const at::Tensor& parameter = spec_.parameters[i];
    if (parameter.is_meta() || is_attached(i)) {
      continue;
    }
    const LocalPart& part = spec_.local_parts[i];
    const at::IntArrayRef shape = spec_.shapes[i];
    const c10::DeviceType where = parameter.device().type();
    BMT_CHECK(StateError,
              parameter.scalar_type() == spec_.dtype &&
                  (where == spec_.device.type() || where == spec_.home().type()),
              spec_.label, ": a parameter of shape ", shape, " has become ", parameter.scalar_type(), " on ",
              parameter.device(), " while the Block holds ", spec_.dtype, " on ", spec_.home(),
              "; convert the whole Block or model, not a module in it");
    const bool is_full = parameter.sizes() == shape;
    BMT_CHECK(StateError, is_full || (parameter.dim() == 1 && parameter.numel() == part.numel), spec_.label,
              ": a parameter's data were replaced by a tensor of shape ", parameter.sizes(),
              "; expected the full shape ", shape, " or this rank's ", part.numel, " elements");
    if (std::exchange(is_first, false)) {
      leave_memory_to_others(num_others);
    }
    const at::Tensor flat = parameter.detach().reshape({-1});
    local_views_[i].copy_(is_full ? flat.narrow(0, part.param_begin, part.numel) : flat);
    parameter.set_data(local_views_[i]);
  }
}

std::int64_t ShardMemory::num_references() const {
  std::int64_t count = 1;
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    count += static_cast<std::int64_t>(!spec_.parameters[i].is_meta() && is_attached(i)) +
             static_cast<std::int64_t>(local_views_[i].is_alias_of(flat_));
  }
  return count;
}

std::int64_t GatheredBuffer::num_references_to_shard() const {
  return owns(shard_.flat()) ? static_cast<std::int64_t>(1 + views_.size()) : 0;
}

std::pair<std::int64_t, std::int64_t> ShardedBuffer::num_references() const {
  return {shard_.num_references() + gathered_.num_references_to_shard(), gradient_shard_.num_references()};
}

}  // namespace bmtrain
