#include "shard/sharded_buffer.h"

#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

void set_accumulator(const at::Tensor& parameter, const NodePtr& node) {
  torch::autograd::impl::set_grad_accumulator(parameter, NodeTraits<NodePtr>::Weak(node));
}

}  // namespace

GatheredBuffer::GatheredBuffer(const BufferSpec& spec, const ShardMemory& shard)
    : spec_(spec), shard_(shard) {
  const c10::Storage storage =
      spec_.has_gathered_memory() ? empty_storage(spec_.device) : shard_.flat().storage();
  full_ = spec_.full(storage, spec_.compute_dtype);
  wire_ = spec_.widens() ? spec_.full(empty_storage(spec_.device), spec_.gather_dtype) : full_;
  views_ = spec_.full_views(storage, spec_.compute_dtype);
}

void GatheredBuffer::follow_shard() {
  if (!spec_.has_gathered_memory() && !owns(shard_.flat())) {
    full_ = wire_ = spec_.full(shard_.flat().storage(), spec_.compute_dtype);
    views_ = spec_.full_views(shard_.flat().storage(), spec_.compute_dtype);
  }
}

std::int64_t GatheredBuffer::num_bytes() const {
  if (!spec_.has_gathered_memory()) {
    return 0;
  }
  const std::size_t travelling = spec_.widens() ? wire_.storage().nbytes() : 0;
  return static_cast<std::int64_t>(full_.storage().nbytes() + travelling);
}

bool GatheredBuffer::owns(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == full_.storage().unsafeGetStorageImpl();
}

at::Tensor GatheredBuffer::input() const {
  if (spec_.gather_dtype == spec_.dtype && spec_.layout.num_ranks() > 1 && !spec_.host_lane) {
    return shard_.flat();
  }
  const PlainMode plain;
  const std::int64_t partition = spec_.layout.partition();
  return wire_.narrow(0, spec_.gather_comm->rank() * partition, partition)
      .copy_(shard_.flat(), /*non_blocking=*/true);
}

void GatheredBuffer::start(bool in_place) {
  if (state_ != State::kSharded) {
    return;
  }
  shard_.check_data();
  if (spec_.host_lane) {
    spec_.host_lane->check_capture();  // before the graph's pool gives memory
  }
  if (spec_.has_gathered_memory()) {
    const std::int64_t nbytes = spec_.full_bytes(spec_.gather_dtype);
    c10::DataPtr memory;
    if (in_place && spec_.is_worth_sharing(spec_.gather_dtype)) {
      memory = spec_.gather_comm->borrow_output(nbytes);
    }
    is_borrowed_ = static_cast<bool>(memory);
    if (!memory) {
      memory = spec_.pool->acquire(nbytes, spec_.device);
    }
    put_memory(wire_.storage(), std::move(memory), nbytes);
    try {
      if (is_borrowed_) {
        work_ = spec_.gather_comm->all_gather_in_place(wire_, shard_.flat(), spec_.label);
      } else if (!spec_.host_lane) {
        gather();
      } else {
        const std::unique_ptr<DeviceEvent> free = spec_.host_lane->mark();  // what had the memory before
        copied_ = spec_.host_lane->to_device(free.get(), [&] { gather(); });
      }
    } catch (...) {
      take_memory(wire_.storage(), spec_.label);
      throw;
    }
  }
  state_ = State::kGathering;
}

void GatheredBuffer::gather() {
  if (const at::Tensor own = input(); spec_.layout.num_ranks() > 1) {
    work_ = spec_.gather_comm->all_gather(wire_, own, spec_.label);
  }
}

void GatheredBuffer::await() {
  if (copied_) {
    spec_.host_lane->follow(*copied_);
  }
  if (work_) {
    work_->wait();
    work_.reset();
  }
}

void GatheredBuffer::await_copy() {
  if (const std::unique_ptr<DeviceEvent> copied = std::move(copied_)) {
    wait_on_host(*copied);
  }
}

void GatheredBuffer::widen() {
  const PlainMode plain;
  const std::int64_t nbytes = spec_.full_bytes(spec_.compute_dtype);
  put_memory(full_.storage(), spec_.pool->acquire(nbytes, spec_.device), nbytes);
  full_.copy_(wire_);
  give_back_wire();
}

void GatheredBuffer::give_back_wire() {
  if (std::exchange(is_borrowed_, false)) {
    spec_.gather_comm->give_back_output(wire_.storage().data(), spec_.full_bytes(spec_.gather_dtype));
  }
  take_memory(wire_.storage(), spec_.label);
}

void GatheredBuffer::finish() {
  start(/*in_place=*/false);
  if (state_ == State::kGathering) {
    await();
    if (spec_.widens()) {
      widen();
    }
    state_ = State::kGathered;
  }
}

void GatheredBuffer::release() {
  BMT_CHECK(StateError, !is_bound_, spec_.label, ": the gathered parameters are still in use");
  await();  // a gather under way writes into the memory; it must have ended before the memory goes
  if (spec_.has_gathered_memory()) {
    give_back_wire();
    take_memory(full_.storage(), spec_.label);
  }
  state_ = State::kSharded;
}

void GatheredBuffer::bind(const std::vector<SinkPtr>& sinks) {
  BMT_CHECK(StateError, state_ == State::kGathered, spec_.label, ": the parameters are not gathered");
  BMT_CHECK(StateError, !is_bound_, spec_.label,
            ": the parameters are in use already; a Block cannot call itself from its own forward");
  shard_accumulators_.resize(spec_.num_parameters());
  is_bound_ = true;
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    const at::Tensor& parameter = spec_.parameters[i];
    shard_accumulators_[i] = torch::autograd::impl::try_get_grad_accumulator(parameter);
    parameter.set_data(views_[i]);
    set_accumulator(parameter, sinks[i]);
  }
}

void GatheredBuffer::unbind() noexcept {
  if (!std::exchange(is_bound_, false)) {
    return;
  }
  shard_.attach();
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    set_accumulator(spec_.parameters[i], shard_accumulators_[i]);
  }
}

ShardedBuffer::ShardedBuffer(BufferOptions options)
    : spec_(std::move(options)),
      shard_(spec_),
      gradient_shard_(spec_),
      gathered_(spec_, shard_),
      reduction_(std::make_shared<Reduction>(spec_, gradient_shard_)) {}

std::int64_t ShardedBuffer::version() const {
  std::int64_t sum = 0;
  for (const at::Tensor& parameter : spec_.parameters) {
    sum += parameter._version();
  }
  return sum;
}

std::vector<bool> ShardedBuffer::requires_grad() const {
  std::vector<bool> flags;
  flags.reserve(spec_.num_parameters());
  for (const at::Tensor& parameter : spec_.parameters) {
    flags.push_back(parameter.requires_grad());
  }
  return flags;
}

bool ShardedBuffer::adopt_data() {
  if (gathered_.is_bound() || !shard_.has_new_data()) {
    return false;
  }
  shard_.adopt_data(gathered_.num_references_to_shard());
  gathered_.follow_shard();
  return true;
}

void ShardedBuffer::bind() {
  make_sinks();
  gathered_.bind(sinks_);
  if (reduction_->stage() != Reduction::Stage::kSummed && gradient_shard_.drop_if_unused()) {
    static_cast<void>(spec_.reduce_comm->borrow_input(0));  // frees what gradients have travelled in
  }
}

void ShardedBuffer::begin_backward(const std::vector<bool>& trains,
                                   const std::vector<std::shared_ptr<ShardedBuffer>>& under_way,
                                   bool in_turn) {
  BMT_CHECK(StateError, reduction_->stage() == Reduction::Stage::kEnded, spec_.label,
            ": a backward is under way already");
  std::vector<std::weak_ptr<Reduction>> others;
  for (const std::shared_ptr<ShardedBuffer>& buffer : under_way) {
    others.push_back(buffer->reduction_);
  }
  const auto next = std::make_shared<Reduction>(spec_, gradient_shard_);
  next->begin(trains, std::move(others), in_turn);
  reduction_ = next;
}

void ShardedBuffer::make_sinks() {
  if (sinks_.empty()) {
    for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
      sinks_.push_back(NodeTraits<NodePtr>::make<GradientSink>(gathered_.views()[i], weak_from_this(), i));
    }
  }
}

void ShardedBuffer::set_hook(std::size_t index, std::unique_ptr<torch::autograd::FunctionPreHook> hook) {
  spec_.check_index(index);
  make_sinks();
  sinks_[index]->set_hook(std::move(hook));
}

}  // namespace bmtrain
