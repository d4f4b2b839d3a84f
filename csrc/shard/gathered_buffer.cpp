#include "shard/gathered_buffer.h"

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

std::int64_t GatheredBuffer::num_references_to_shard() const {
  return owns(shard_.flat()) ? static_cast<std::int64_t>(1 + views_.size()) : 0;
}

at::Tensor GatheredBuffer::input() const {
  if (spec_.gather_dtype == spec_.dtype && spec_.layout.num_ranks() > 1) {
    return shard_.flat();
  }
  const PlainMode plain;
  const std::int64_t partition = spec_.layout.partition();
  return wire_.narrow(0, spec_.gather_comm->rank() * partition, partition).copy_(shard_.flat());
}

void GatheredBuffer::start(bool in_place) {
  if (state_ != State::kSharded) {
    return;
  }
  shard_.check_data();
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
      } else if (const at::Tensor own = input(); spec_.layout.num_ranks() > 1) {
        work_ = spec_.gather_comm->all_gather(wire_, own, spec_.label);
      }
    } catch (...) {
      take_memory(wire_.storage());
      throw;
    }
  }
  state_ = State::kGathering;
}

void GatheredBuffer::await() {
  if (work_) {
    work_->wait();
    work_.reset();
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
  take_memory(wire_.storage());
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
    take_memory(full_.storage());
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

}  // namespace bmtrain
