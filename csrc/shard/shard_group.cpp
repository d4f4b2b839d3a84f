#include "shard/shard_group.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>

#include <numeric>
#include <utility>

#include "common/check.h"
#include "shard/materialize.h"
#include "shard/slice_sum.h"

namespace bmtrain {
namespace {

std::int64_t product(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<std::int64_t> numels_of(const std::vector<std::vector<std::int64_t>>& shapes) {
  std::vector<std::int64_t> numels;
  numels.reserve(shapes.size());
  for (const auto& shape : shapes) {
    numels.push_back(product(shape));
  }
  return numels;
}

/// A tensor over `storage` that may have no memory yet (see [Note: The gathered
/// storage]).
at::Tensor view_of_storage(const c10::Storage& storage, at::ScalarType dtype, std::int64_t offset,
                           at::IntArrayRef shape) {
  const auto backend_key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(backend_key), c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return view;
}

void put_memory(const c10::Storage& storage, c10::DataPtr memory, std::int64_t nbytes) {
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(static_cast<std::size_t>(nbytes));
}

c10::Storage empty_storage(c10::Device device) {
  return {c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
          /*allocator=*/nullptr,
          /*resizable=*/false};
}

using WeakNode = NodeTraits<NodePtr>::Weak;

void set_accumulator(const at::Tensor& parameter, const NodePtr& node) {
  torch::autograd::impl::set_grad_accumulator(parameter, WeakNode(node));
}

}  // namespace

ShardGroup::ShardGroup(Options options)
    : options_(std::move(options)),
      layout_(numels_of(options_.shapes), static_cast<std::int64_t>(c10::elementSize(options_.dtype)),
              options_.gather_comm->size()) {
  const c10::InferenceMode normal_tensors(false);
  BMT_CHECK(ValueError, options_.parameters.size() == options_.shapes.size(),
            "shapes: expected one per parameter (", options_.parameters.size(), "), got ",
            options_.shapes.size());
  BMT_CHECK(ValueError, options_.names.size() == options_.parameters.size(),
            "names: expected one per parameter (", options_.parameters.size(), "), got ",
            options_.names.size());
  const c10::Storage shard_storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, options_.device),
                                   c10::GetAllocator(options_.device.type()), /*resizable=*/true);
  shard_ = view_of_storage(shard_storage, options_.dtype, 0, {layout_.partition()});
  const c10::Storage storage = has_own_buffer() ? empty_storage(options_.device) : shard_.storage();
  full_ = view_of_storage(storage, options_.compute_dtype, 0, {layout_.padded_total()});
  for (std::size_t i = 0; i < options_.shapes.size(); ++i) {
    full_views_.push_back(
        view_of_storage(storage, options_.compute_dtype, layout_.span(i).offset, options_.shapes[i]));
    const LocalPart part = layout_.local_part(i, options_.gather_comm->rank());
    local_parts_.push_back(part);
    local_views_.push_back(
        view_of_storage(shard_.storage(), options_.dtype, part.shard_offset, {part.numel}));
    if (!options_.parameters[i].is_meta()) {
      allocate();
    }
  }
}

ShardGroup::~ShardGroup() = default;

void ShardGroup::allocate() {
  const c10::Storage& storage = shard_.storage();
  if (storage.nbytes() == 0) {
    const at::Tensor zeros = at::zeros(shard_.sizes(), shard_.options());
    const auto nbytes = static_cast<std::int64_t>(zeros.storage().nbytes());
    put_memory(storage, zeros.storage().set_data_ptr(c10::DataPtr(nullptr, options_.device)), nbytes);
  }
}

void ShardGroup::make_shard(std::size_t index) {
  const c10::InferenceMode normal_tensors(false);
  allocate();
  materialize(options_.parameters.at(index), local_views_.at(index));
}

void ShardGroup::check_data() const {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    BMT_CHECK(
        StateError, !options_.parameters[i].is_meta(), options_.label, ": parameter '", options_.names[i],
        "' of shape ", at::IntArrayRef(options_.shapes[i]),
        " is on the meta device and has no values yet; initialise it (bmtrain.init_parameters, given an "
        "init_method) or load it (bmtrain.load, load_state_dict) first");
  }
}

std::pair<std::int64_t, std::int64_t> ShardGroup::num_references() const {
  std::int64_t to_shard = 0;
  std::int64_t to_gradient = 0;
  const auto count = [](std::int64_t& number, const at::Tensor& tensor, const at::Tensor& memory) {
    if (tensor.defined() && memory.defined() && tensor.is_alias_of(memory)) ++number;
  };
  count(to_shard, shard_, shard_);
  count(to_shard, full_, shard_);
  count(to_gradient, gradient_shard_, gradient_shard_);
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    count(to_shard, options_.parameters[i], shard_);
    count(to_shard, local_views_[i], shard_);
    count(to_shard, full_views_[i], shard_);
    count(to_gradient, options_.parameters[i].grad(), gradient_shard_);
  }
  return {to_shard, to_gradient};
}

std::int64_t ShardGroup::version() const {
  std::int64_t sum = 0;
  for (const at::Tensor& parameter : options_.parameters) {
    sum += parameter._version();
  }
  return sum;
}

std::vector<bool> ShardGroup::requires_grad() const {
  std::vector<bool> flags;
  flags.reserve(options_.parameters.size());
  for (const at::Tensor& parameter : options_.parameters) {
    flags.push_back(parameter.requires_grad());
  }
  return flags;
}

bool ShardGroup::owns_storage(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == full_.storage().unsafeGetStorageImpl();
}

void ShardGroup::attach() {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    if (!options_.parameters[i].is_meta()) {
      options_.parameters[i].set_data(local_views_[i]);
    }
  }
}

bool ShardGroup::is_attached(std::size_t index) const {
  const at::Tensor& parameter = options_.parameters[index];
  return parameter.dim() == 1 && parameter.numel() == local_parts_[index].numel &&
         parameter.storage_offset() == local_parts_[index].shard_offset &&
         parameter.storage().unsafeGetStorageImpl() == shard_.storage().unsafeGetStorageImpl();
}

bool ShardGroup::adopt_data() {
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
    const at::Tensor flat = parameter.detach().reshape({-1});
    local_views_[i].copy_(is_full ? flat.narrow(0, part.param_begin, part.numel) : flat);
    parameter.set_data(local_views_[i]);
    adopted = true;
  }
  return adopted;
}

bool ShardGroup::has_own_buffer() const {
  return layout_.num_ranks() > 1 || options_.compute_dtype != options_.dtype;
}

std::int64_t ShardGroup::full_bytes(at::ScalarType dtype) const {
  return layout_.padded_total() * static_cast<std::int64_t>(c10::elementSize(dtype));
}

at::Tensor ShardGroup::gather_input() const {
  if (options_.compute_dtype == options_.dtype) {
    return shard_;
  }
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  const std::int64_t begin = options_.gather_comm->rank() * layout_.partition();
  return full_.narrow(0, begin, layout_.partition()).copy_(shard_);
}

void ShardGroup::start_gather() {
  if (state_ != State::kSharded) {
    return;
  }
  check_data();
  if (has_own_buffer()) {
    const std::int64_t nbytes = full_bytes(options_.compute_dtype);
    put_memory(full_.storage(), options_.pool->acquire(nbytes, options_.device), nbytes);
    try {
      const at::Tensor input = gather_input();
      if (layout_.num_ranks() > 1) {
        gather_work_ = options_.gather_comm->all_gather(full_, input, options_.label);
      }
    } catch (...) {
      put_memory(full_.storage(), c10::DataPtr(nullptr, options_.device), 0);
      throw;
    }
  }
  state_ = State::kGathering;
}

void ShardGroup::finish_gather() {
  start_gather();
  if (state_ == State::kGathering) {
    if (gather_work_) {
      gather_work_->wait();
      gather_work_.reset();
    }
    state_ = State::kGathered;
  }
}

void ShardGroup::release() {
  BMT_CHECK(StateError, !bound_, options_.label, ": the gathered parameters are still in use");
  finish_gather();  // a gather under way writes into the memory; it must have
                    // ended before the memory goes
  if (has_own_buffer()) {
    put_memory(full_.storage(), c10::DataPtr(nullptr, options_.device), 0);
  }
  state_ = State::kSharded;
}

void ShardGroup::bind() {
  BMT_CHECK(StateError, state_ == State::kGathered, options_.label, ": the parameters are not gathered");
  BMT_CHECK(StateError, !bound_, options_.label,
            ": the parameters are in use already; a Block cannot call itself "
            "from its own forward");
  make_sinks();
  drop_unused_gradient();
  shard_accumulators_.resize(options_.parameters.size());
  bound_ = true;
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const at::Tensor& parameter = options_.parameters[i];
    shard_accumulators_[i] = torch::autograd::impl::try_get_grad_accumulator(parameter);
    parameter.set_data(full_views_[i]);
    set_accumulator(parameter, sinks_[i]);
  }
}

void ShardGroup::drop_unused_gradient() {
  // On a GPU the caching allocator would keep the memory, in the order of streams; nothing is won there.
  if (gradient_shard_.defined() && options_.device.is_cpu() && gradient_shard_.storage().use_count() == 1) {
    gradient_shard_ = at::Tensor();
  }
}

void ShardGroup::make_sinks() {
  if (sinks_.empty()) {
    for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
      sinks_.push_back(NodeTraits<NodePtr>::make<GradientSink>(options_.parameters[i], full_views_[i],
                                                               weak_from_this(), i));
    }
  }
}

void ShardGroup::set_hooks(std::size_t index, PyObject* hooks) {
  make_sinks();
  sinks_.at(index)->set_hooks(hooks);
}

void ShardGroup::unbind() noexcept {
  if (!bound_) {
    return;
  }
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const at::Tensor& parameter = options_.parameters[i];
    parameter.set_data(local_views_[i]);
    set_accumulator(parameter, shard_accumulators_[i]);
  }
  bound_ = false;
}

void ShardGroup::begin_backward(std::vector<bool> trains) {
  BMT_CHECK(ValueError, trains.size() == options_.parameters.size(), "trains: expected ",
            options_.parameters.size(), " flags, got ", trains.size());
  BMT_CHECK(StateError, !gradient_.defined(), options_.label, ": a backward is under way already");
  const std::int64_t nbytes = full_bytes(options_.reduce_dtype);
  c10::Storage storage = empty_storage(options_.device);
  put_memory(storage, options_.pool->acquire(nbytes, options_.device), nbytes);
  gradient_ = view_of_storage(storage, options_.reduce_dtype, 0, {layout_.padded_total()});
  gradient_views_.clear();
  for (std::size_t i = 0; i < options_.shapes.size(); ++i) {
    gradient_views_.push_back(
        view_of_storage(storage, options_.reduce_dtype, layout_.span(i).offset, options_.shapes[i]));
  }
  trains_ = std::move(trains);
  touched_.assign(options_.parameters.size(), false);
}

void ShardGroup::accumulate(std::size_t index, const at::Tensor& gradient) {
  BMT_CHECK(StateError, gradient_.defined(), options_.label,
            ": a gradient reached a parameter of the Block outside of the "
            "Block's own backward");
  const c10::AutoGradMode no_grad(false);
  const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  if (touched_.at(index)) {
    gradient_views_[index].add_(dense);
  } else {
    gradient_views_[index].copy_(dense);
    touched_[index] = true;
  }
}

void ShardGroup::start_reduce() {
  BMT_CHECK(StateError, gradient_.defined(), options_.label, ": there is no gradient to reduce");
  const c10::AutoGradMode no_grad(false);
  zero_untouched();
  gradient_views_.clear();
  if (layout_.num_ranks() == 1) {
    received_ = gradient_;
    start_sum_over_replicas();
    return;
  }
  const std::int64_t nbytes = full_bytes(options_.reduce_dtype);
  c10::Storage storage = empty_storage(options_.device);
  put_memory(storage, options_.pool->acquire(nbytes, options_.device), nbytes);
  received_ = view_of_storage(storage, options_.reduce_dtype, 0, {layout_.padded_total()});
  reduce_work_ = options_.reduce_comm->all_to_all(received_, gradient_, options_.label);
}

void ShardGroup::start_sum_over_replicas() {
  if (num_replicas() > 1) {
    reduce_work_ = options_.replica_comm->all_reduce(received_, ReduceOp::kSum, options_.label);
  }
}

void ShardGroup::zero_untouched() {
  // Gaps between parameters are zeroed too: they travel with the slices and
  // must not carry NaN from older contents.
  std::int64_t clean_until = 0;
  const auto zero = [this](std::int64_t begin, std::int64_t end) {
    if (end > begin) {
      gradient_.narrow(0, begin, end - begin).zero_();
    }
  };
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const Span& span = layout_.span(i);
    if (touched_[i]) {
      zero(clean_until, span.offset);
      clean_until = span.offset + span.numel;
    }
  }
  zero(clean_until, layout_.padded_total());
}

bool ShardGroup::continue_reduce() {
  if (!received_.defined() || num_replicas() == 1 || layout_.num_ranks() == 1) {
    return false;
  }
  if (!sums_replicas_) {
    reduce_work_->wait();
    reduce_work_.reset();
    const c10::AutoGradMode no_grad(false);
    const c10::InferenceMode normal_tensors(false);
    gradient_ = at::Tensor();
    sum_received();
    start_sum_over_replicas();
    sums_replicas_ = true;
  }
  return true;
}

void ShardGroup::finish_reduce(TreeSum* tree) {
  if (!received_.defined()) {
    return;
  }
  continue_reduce();
  sums_replicas_ = false;
  if (reduce_work_) {
    reduce_work_->wait();
    reduce_work_.reset();
  }
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  gradient_ = at::Tensor();
  if (tree != nullptr) {
    for (std::int64_t r = 0; r < layout_.num_ranks(); ++r) {
      tree->push(received_.narrow(0, r * layout_.partition(), layout_.partition()));
    }
    received_ = at::Tensor();
    return;
  }
  sum_into_shard();
  received_ = at::Tensor();
  publish_gradients();
}

void ShardGroup::add_gradient(const at::Tensor& sum) {
  BMT_CHECK(ValueError, sum.dim() == 1 && sum.numel() == layout_.partition(), "sum: expected ",
            layout_.partition(), " elements, got shape ", sum.sizes());
  BMT_CHECK(StateError, trains_.size() == options_.parameters.size(), options_.label,
            ": there was no backward to add a gradient of");
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  make_gradient_shard();
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const LocalPart& part = local_parts_[i];
    const at::Tensor own = sum.narrow(0, part.shard_offset, part.numel);
    switch (gradient_mode(i)) {
      case GradientMode::kSkip:
        break;
      case GradientMode::kWrite:
        gradient_shard_.narrow(0, part.shard_offset, part.numel).copy_(own);
        break;
      case GradientMode::kAccumulate:
      case GradientMode::kForeign: {
        at::Tensor& gradient = options_.parameters[i].mutable_grad();
        gradient.copy_(at::add(own.view_as(gradient), gradient));
      }
    }
  }
  publish_gradients();
}

void ShardGroup::sum_received() {
  std::vector<at::Tensor> slices;
  for (std::int64_t r = 0; r < layout_.num_ranks(); ++r) {
    slices.push_back(received_.narrow(0, r * layout_.partition(), layout_.partition()));
  }
  const at::Tensor sum = at::empty_like(shard_);
  sum_slices(sum, slices, /*accumulate=*/false);
  received_ = sum;
}

void ShardGroup::sum_into_shard() {
  make_gradient_shard();
  // Neighbours that are treated alike are summed in one run, the gaps between
  // them included.
  std::size_t first = 0;
  while (first < options_.parameters.size()) {
    const GradientMode mode = gradient_mode(first);
    std::size_t last = first + 1;
    while (last < options_.parameters.size() && mode != GradientMode::kForeign &&
           gradient_mode(last) == mode) {
      ++last;
    }
    if (mode != GradientMode::kSkip) {
      reduce_run(first, last, mode);
    }
    first = last;
  }
}

void ShardGroup::make_gradient_shard() {
  if (gradient_shard_.defined()) {
    return;
  }
  gradient_shard_ = at::empty_like(shard_);
  // What the sum does not write is zero: gaps between parameters, and parameters without a gradient here.
  std::int64_t clean_until = 0;
  const auto zero_up_to = [&](std::int64_t end) {
    if (end > clean_until) {
      gradient_shard_.narrow(0, clean_until, end - clean_until).zero_();
    }
  };
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const LocalPart& part = local_parts_[i];
    if (part.numel > 0 && gradient_mode(i) == GradientMode::kWrite) {
      zero_up_to(part.shard_offset);
      clean_until = part.shard_offset + part.numel;
    }
  }
  zero_up_to(layout_.partition());
}

ShardGroup::GradientMode ShardGroup::gradient_mode(std::size_t index) const {
  const at::Tensor& parameter = options_.parameters[index];
  if (!trains_[index] || !parameter.requires_grad()) {
    return GradientMode::kSkip;
  }
  const at::Tensor& current = parameter.grad();
  if (!current.defined()) {
    return GradientMode::kWrite;
  }
  const bool is_ours = current.is_alias_of(gradient_shard_) && current.is_contiguous() &&
                       current.storage_offset() == local_parts_[index].shard_offset &&
                       current.numel() == local_parts_[index].numel;
  return is_ours ? GradientMode::kAccumulate : GradientMode::kForeign;
}

void ShardGroup::reduce_run(std::size_t first, std::size_t last, GradientMode mode) {
  std::int64_t begin = -1, end = -1;
  for (std::size_t i = first; i < last; ++i) {
    const LocalPart& part = local_parts_[i];
    if (part.numel > 0) {
      begin = begin < 0 ? part.shard_offset : begin;
      end = part.shard_offset + part.numel;
    }
  }
  if (begin < 0) {
    return;
  }
  std::vector<at::Tensor> slices;
  for (std::int64_t slice = 0; slice < received_.numel(); slice += layout_.partition()) {
    slices.push_back(received_.narrow(0, slice + begin, end - begin));
  }
  if (mode == GradientMode::kForeign) {
    const at::Tensor sum = at::empty({end - begin}, shard_.options());
    sum_slices(sum, slices, /*accumulate=*/false);
    at::Tensor& gradient = options_.parameters[first].mutable_grad();
    gradient.add_(sum.view_as(gradient));
  } else {
    sum_slices(gradient_shard_.narrow(0, begin, end - begin), slices, mode == GradientMode::kAccumulate);
  }
}

void ShardGroup::publish_gradients() {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const at::Tensor& parameter = options_.parameters[i];
    if (!trains_[i] || !parameter.requires_grad()) {
      continue;
    }
    if (!parameter.grad().defined()) {
      // A fresh view each time: the user may keep or detach the one handed out
      // before.
      parameter.mutable_grad() = view_of_storage(gradient_shard_.storage(), options_.dtype,
                                                 local_parts_[i].shard_offset, {local_parts_[i].numel});
    }
    if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter)) {
      (*hook)(parameter);
    }
  }
}

void ShardGroup::cancel_backward() noexcept {
  if (reduce_work_) {
    try {
      reduce_work_->wait();
    } catch (const std::exception&) {
      // The error that cancels the backward is the one to report.
    }
    reduce_work_.reset();
  }
  sums_replicas_ = false;
  gradient_views_.clear();
  gradient_ = at::Tensor();
  received_ = at::Tensor();
}

}  // namespace bmtrain
