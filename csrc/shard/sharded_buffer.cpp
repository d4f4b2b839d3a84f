#include "shard/sharded_buffer.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>

#include <numeric>
#include <utility>

#include "common/check.h"
#include "shard/storage.h"

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

ShardedBuffer::Options checked(ShardedBuffer::Options options) {
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

// Below, what is saved is less than what it costs to look after the memory.
constexpr std::int64_t kLeastShared = std::int64_t{1} << 20;

using WeakNode = NodeTraits<NodePtr>::Weak;

void set_accumulator(const at::Tensor& parameter, const NodePtr& node) {
  torch::autograd::impl::set_grad_accumulator(parameter, WeakNode(node));
}

}  // namespace

ShardedBuffer::ShardedBuffer(Options options)
    : options_(checked(std::move(options))),
      layout_(numels_of(options_.shapes), static_cast<std::int64_t>(c10::elementSize(options_.dtype)),
              options_.gather_comm->size()) {
  const c10::InferenceMode normal_tensors(false);
  for (std::size_t i = 0; i < options_.shapes.size(); ++i) {
    local_parts_.push_back(layout_.local_part(i, options_.gather_comm->rank()));
  }
  make_shard_memory();
  for (const at::Tensor& parameter : options_.parameters) {
    if (!parameter.is_meta()) {
      allocate();
    }
  }
}

ShardedBuffer::~ShardedBuffer() = default;

at::Tensor ShardedBuffer::local_view(std::size_t index) const {
  check_index(index);
  return local_views_[index];
}

void ShardedBuffer::check_index(std::size_t index) const {
  BMT_CHECK(ValueError, index < options_.parameters.size(), "index: expected 0 to ",
            options_.parameters.size(), " (excluded), got ", index);
}

void ShardedBuffer::check_data() const {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    BMT_CHECK(
        StateError, !options_.parameters[i].is_meta(), options_.label, ": parameter '", options_.names[i],
        "' of shape ", at::IntArrayRef(options_.shapes[i]),
        " is on the meta device and has no values yet; initialise it (bmtrain.init_parameters, given an "
        "init_method) or load it (bmtrain.load, load_state_dict) first");
  }
}

std::pair<std::int64_t, std::int64_t> ShardedBuffer::num_references() const {
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

std::int64_t ShardedBuffer::version() const {
  std::int64_t sum = 0;
  for (const at::Tensor& parameter : options_.parameters) {
    sum += parameter._version();
  }
  return sum;
}

std::vector<bool> ShardedBuffer::requires_grad() const {
  std::vector<bool> flags;
  flags.reserve(options_.parameters.size());
  for (const at::Tensor& parameter : options_.parameters) {
    flags.push_back(parameter.requires_grad());
  }
  return flags;
}

std::int64_t ShardedBuffer::gathered_bytes() const {
  if (!has_own_buffer()) {
    return 0;
  }
  const std::size_t travelling = widens() ? wire_.storage().nbytes() : 0;
  return static_cast<std::int64_t>(full_.storage().nbytes() + travelling);
}

std::int64_t ShardedBuffer::unreduced_bytes() const {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<std::int64_t>(tensor.storage().nbytes()) : 0;
  };
  const bool is_one = gradient_.defined() && received_.defined() && gradient_.is_alias_of(received_);
  return bytes(gradient_) + (is_one ? 0 : bytes(received_)) + bytes(sum_ahead_);
}

bool ShardedBuffer::owns_storage(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == full_.storage().unsafeGetStorageImpl();
}

bool ShardedBuffer::has_own_buffer() const {
  return layout_.num_ranks() > 1 || options_.compute_dtype != options_.dtype || widens();
}

bool ShardedBuffer::widens() const { return options_.gather_dtype != options_.compute_dtype; }

std::int64_t ShardedBuffer::full_bytes(at::ScalarType dtype) const {
  return layout_.padded_total() * static_cast<std::int64_t>(c10::elementSize(dtype));
}

at::Tensor ShardedBuffer::gather_input() const {
  if (options_.gather_dtype == options_.dtype && layout_.num_ranks() > 1) {
    return shard_;
  }
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  if (is_borrowed_) {  // in which the ranks' slices are put by the communicator
    const auto nbytes =
        layout_.partition() * static_cast<std::int64_t>(c10::elementSize(options_.gather_dtype));
    const c10::Storage storage = empty_storage(options_.device);
    put_memory(storage, options_.pool->acquire(nbytes, options_.device), nbytes);
    return view_of_storage(storage, options_.gather_dtype, 0, {layout_.partition()}).copy_(shard_);
  }
  const std::int64_t begin = options_.gather_comm->rank() * layout_.partition();
  return wire_.narrow(0, begin, layout_.partition()).copy_(shard_);
}

bool ShardedBuffer::is_worth_sharing(at::ScalarType dtype) const {
  return options_.device.is_cpu() && layout_.num_ranks() > 1 && full_bytes(dtype) >= kLeastShared;
}

void ShardedBuffer::start_gather(bool in_place) {
  if (state_ != State::kSharded) {
    return;
  }
  check_data();
  if (has_own_buffer()) {
    const std::int64_t nbytes = full_bytes(options_.gather_dtype);
    c10::DataPtr memory;
    if (in_place && is_worth_sharing(options_.gather_dtype)) {
      memory = options_.gather_comm->borrow_output(nbytes);
    }
    is_borrowed_ = static_cast<bool>(memory);
    if (!memory) {
      memory = options_.pool->acquire(nbytes, options_.device);
    }
    put_memory(wire_.storage(), std::move(memory), nbytes);
    try {
      const at::Tensor input = gather_input();
      if (layout_.num_ranks() > 1) {
        gather_work_ = options_.gather_comm->all_gather(wire_, input, options_.label);
      }
    } catch (...) {
      put_memory(wire_.storage(), c10::DataPtr(nullptr, options_.device), 0);
      throw;
    }
  }
  state_ = State::kGathering;
}

void ShardedBuffer::await_gather() {
  if (gather_work_) {
    gather_work_->wait();
    gather_work_.reset();
  }
}

void ShardedBuffer::widen() {
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  const std::int64_t nbytes = full_bytes(options_.compute_dtype);
  put_memory(full_.storage(), options_.pool->acquire(nbytes, options_.device), nbytes);
  full_.copy_(wire_);
  give_back_wire();
}

void ShardedBuffer::give_back_wire() {
  if (is_borrowed_) {
    options_.gather_comm->give_back_output(wire_.storage().data(), full_bytes(options_.gather_dtype));
    is_borrowed_ = false;
  }
  put_memory(wire_.storage(), c10::DataPtr(nullptr, options_.device), 0);
}

void ShardedBuffer::finish_gather() {
  start_gather();
  if (state_ == State::kGathering) {
    await_gather();
    if (widens()) {
      widen();
    }
    state_ = State::kGathered;
  }
}

void ShardedBuffer::release() {
  BMT_CHECK(StateError, !bound_, options_.label, ": the gathered parameters are still in use");
  await_gather();  // a gather under way writes into the memory; it must have
                   // ended before the memory goes
  if (has_own_buffer()) {
    give_back_wire();
    put_memory(full_.storage(), c10::DataPtr(nullptr, options_.device), 0);
  }
  state_ = State::kSharded;
}

void ShardedBuffer::bind() {
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

void ShardedBuffer::drop_unused_gradient() {
  if (!gradient_shard_.defined() || is_summed_ || num_references().second > 1) {
    return;
  }
  gradient_shard_ = at::Tensor();                            // a user who holds a view keeps it as it is
  static_cast<void>(options_.reduce_comm->borrow_input(0));  // frees what gradients have travelled in
}

void ShardedBuffer::make_sinks() {
  if (sinks_.empty()) {
    for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
      sinks_.push_back(NodeTraits<NodePtr>::make<GradientSink>(options_.parameters[i], full_views_[i],
                                                               weak_from_this(), i));
    }
  }
}

void ShardedBuffer::set_hooks(std::size_t index, PyObject* hooks) {
  check_index(index);
  make_sinks();
  sinks_[index]->set_hooks(hooks);
}

void ShardedBuffer::unbind() noexcept {
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

}  // namespace bmtrain
