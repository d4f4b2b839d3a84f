#include "shard/shard_memory.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

bool refers_to(const at::Tensor& tensor, const at::Tensor& memory) {
  return tensor.defined() && memory.defined() && tensor.is_alias_of(memory);
}

}  // namespace

ShardMemory::ShardMemory(const BufferSpec& spec) : spec_(spec) {
  make_views();
  for (const at::Tensor& parameter : spec_.parameters) {
    if (!parameter.is_meta()) {
      allocate();
    }
  }
}

void ShardMemory::make_views() {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, spec_.home()),
                             c10::GetAllocator(spec_.home().type()), /*resizable=*/true);
  flat_ = view_of_storage(storage, spec_.dtype, 0, {spec_.layout.partition()});
  local_views_.clear();
  for (const LocalPart& part : spec_.local_parts) {
    local_views_.push_back(view_of_storage(storage, spec_.dtype, part.shard_offset, {part.numel}));
  }
}

void ShardMemory::allocate() {
  const c10::Storage& storage = flat_.storage();
  if (storage.nbytes() == 0) {
    const at::Tensor zeros = spec_.empty_at_home(spec_.dtype).zero_();
    const auto nbytes = static_cast<std::int64_t>(zeros.storage().nbytes());
    put_memory(storage, zeros.storage().set_data_ptr(c10::DataPtr(nullptr, spec_.home())), nbytes);
  }
}

const at::Tensor& ShardMemory::local_view(std::size_t index) const {
  spec_.check_index(index);
  return local_views_[index];
}

void ShardMemory::attach() const {
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    if (!spec_.parameters[i].is_meta()) {
      spec_.parameters[i].set_data(local_views_[i]);
    }
  }
}

void ShardMemory::check_data() const {
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    BMT_CHECK(
        StateError, !spec_.parameters[i].is_meta(), spec_.label, ": parameter '", spec_.names[i],
        "' of shape ", at::IntArrayRef(spec_.shapes[i]),
        " is on the meta device and has no values yet; initialise it (bmtrain.init_parameters, given an "
        "init_method) or load it (bmtrain.load, load_state_dict) first");
  }
}

bool ShardMemory::is_attached(std::size_t index) const {
  const at::Tensor& parameter = spec_.parameters[index];
  const LocalPart& part = spec_.local_parts[index];
  return parameter.dim() == 1 && parameter.numel() == part.numel &&
         parameter.storage_offset() == part.shard_offset &&
         parameter.storage().unsafeGetStorageImpl() == flat_.storage().unsafeGetStorageImpl();
}

bool ShardMemory::has_new_data() const {
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    if (!spec_.parameters[i].is_meta() && !is_attached(i)) {
      return true;
    }
  }
  return false;
}

std::int64_t GradientShard::num_references() const {
  std::int64_t count = flat_.defined() ? 1 : 0;
  for (const at::Tensor& parameter : spec_.parameters) {
    count += static_cast<std::int64_t>(refers_to(parameter.grad(), flat_));
  }
  return count;
}

GradientShard::Mode GradientShard::mode_of(std::size_t index, const std::vector<bool>& trains) const {
  if (!trains[index]) {
    return Mode::kSkip;
  }
  const at::Tensor& current = spec_.parameters[index].grad();
  if (!current.defined()) {
    return Mode::kWrite;
  }
  const LocalPart& part = spec_.local_parts[index];
  const bool is_ours = flat_.defined() && current.is_alias_of(flat_) && current.is_contiguous() &&
                       current.storage_offset() == part.shard_offset && current.numel() == part.numel;
  return is_ours ? Mode::kAccumulate : Mode::kForeign;
}

void GradientShard::make(const std::vector<bool>& trains) {
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    const Mode mode = flat_.defined() ? mode_of(i, trains) : Mode::kSkip;
    if ((mode == Mode::kForeign && refers_to(spec_.parameters[i].grad(), flat_)) ||
        (mode == Mode::kWrite && std::cmp_greater(flat_.storage().use_count(), num_references()))) {
      flat_ = at::Tensor();  // a place that would be written is another parameter's, or a user's
    }
  }
  if (flat_.defined()) {
    return;
  }
  if (const at::Tensor memory = std::exchange(next_memory_, {}); memory.defined()) {
    flat_ = view_of_storage(empty_storage(spec_.home()), spec_.dtype, 0, {spec_.layout.partition()});
    lend(flat_, memory);
  } else {
    flat_ = spec_.empty_at_home(spec_.dtype);
  }
  std::vector<Span> written;
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    const LocalPart& part = spec_.local_parts[i];
    if (part.numel > 0 && mode_of(i, trains) == Mode::kWrite) {
      written.push_back({part.shard_offset, part.numel});
    }
  }
  zero_outside(flat_, written);
}

void GradientShard::sum(const std::vector<at::Tensor>& slices, const std::vector<bool>& trains) {
  const PlainMode plain;
  make(trains);
  std::size_t first = 0;
  while (first < spec_.num_parameters()) {
    const Mode mode = mode_of(first, trains);
    std::size_t last = first + 1;
    while (last < spec_.num_parameters() && mode != Mode::kForeign && mode_of(last, trains) == mode) {
      ++last;
    }
    if (mode != Mode::kSkip) {
      sum_run(slices, first, last, mode);
    }
    first = last;
  }
}

// The gaps between the parameters are summed with them.
void GradientShard::sum_run(const std::vector<at::Tensor>& slices, std::size_t first, std::size_t last,
                            Mode mode) {
  std::int64_t begin = -1, end = -1;
  for (std::size_t i = first; i < last; ++i) {
    const LocalPart& part = spec_.local_parts[i];
    if (part.numel > 0) {
      begin = begin < 0 ? part.shard_offset : begin;
      end = part.shard_offset + part.numel;
    }
  }
  if (begin < 0 || slices.empty()) {
    return;  // empty parameters, or a void operation
  }
  const bool is_there = mode != Mode::kForeign && slices.at(0).is_same(flat_);  // summed ahead of its time
  if (is_there) {
    return;
  }
  std::vector<at::Tensor> parts;
  parts.reserve(slices.size());
  for (const at::Tensor& slice : slices) {
    parts.push_back(slice.narrow(0, begin, end - begin));
  }
  const at::Tensor own = flat_.narrow(0, begin, end - begin);
  const auto options = own.options().device(parts[0].device());
  const bool is_here = own.device() == options.device(), accumulates = mode == Mode::kAccumulate;
  if (mode == Mode::kForeign) {
    const at::Tensor sum = at::empty(own.sizes(), options);
    sum_slices(sum, parts, /*accumulate=*/false);
    at::Tensor& gradient = spec_.parameters[first].mutable_grad();
    gradient.add_(sum.view_as(gradient).to(gradient.device()));
  } else if (is_here) {
    sum_slices(own, parts, accumulates);
  } else if (!accumulates && parts.size() == 1 && parts[0].scalar_type() == spec_.dtype) {
    own.copy_(parts[0], /*non_blocking=*/true);
  } else {
    const at::Tensor sum =
        accumulates ? own.to(options, /*non_blocking=*/true) : at::empty(own.sizes(), options);
    sum_slices(sum, parts, accumulates);
    own.copy_(sum, /*non_blocking=*/true);
  }
}

void GradientShard::publish(const std::vector<bool>& trains) const {
  const PlainMode plain;
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    const at::Tensor& parameter = spec_.parameters[i];
    if (!trains[i]) {
      continue;
    }
    if (!parameter.grad().defined()) {
      // A fresh view each time: the user may keep or detach the one handed out before.
      const LocalPart& part = spec_.local_parts[i];
      parameter.mutable_grad() =
          view_of_storage(flat_.storage(), spec_.dtype, part.shard_offset, {part.numel});
    }
    if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter)) {
      (*hook)(parameter);
    }
  }
}

bool GradientShard::drop_if_unused() {
  if (keeps_memory_ || !flat_.defined() || num_references() > 1) {
    return false;
  }
  flat_ = at::Tensor();  // a user who holds a view keeps it as it is
  return true;
}

}  // namespace bmtrain
