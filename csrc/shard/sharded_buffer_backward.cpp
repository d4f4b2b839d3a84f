// The gradients of a ShardedBuffer: from autograd to the shards.
#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>

#include <utility>

#include "comm/slice_sum.h"
#include "common/check.h"
#include "common/delays.h"
#include "shard/sharded_buffer.h"
#include "shard/storage.h"

namespace bmtrain {

void ShardedBuffer::begin_backward(const std::vector<bool>& trains,
                                   const std::vector<std::shared_ptr<ShardedBuffer>>& under_way) {
  check_flags("trains", trains);
  BMT_CHECK(StateError, !gradient_.defined(), options_.label, ": a backward is under way already");
  under_way_.assign(under_way.begin(), under_way.end());
  c10::Storage storage = empty_storage(options_.device);
  c10::DataPtr memory;
  delay();
  if (is_worth_sharing(options_.reduce_dtype)) {
    memory = options_.reduce_comm->borrow_input(full_bytes(options_.reduce_dtype));
  }
  if (!memory) {
    memory = options_.pool->acquire(full_bytes(options_.reduce_dtype), options_.device);
  }
  put_memory(storage, std::move(memory), full_bytes(options_.reduce_dtype));
  gradient_ = view_of_storage(storage, options_.reduce_dtype, 0, {layout_.padded_total()});
  gradient_views_.clear();
  for (std::size_t i = 0; i < options_.shapes.size(); ++i) {
    gradient_views_.push_back(
        view_of_storage(storage, options_.reduce_dtype, layout_.span(i).offset, options_.shapes[i]));
  }
  trains_.assign(options_.parameters.size(), false);
  touched_.assign(options_.parameters.size(), false);
  join_backward(trains);
}

void ShardedBuffer::join_backward(const std::vector<bool>& trains) {
  check_flags("trains", trains);
  BMT_CHECK(StateError, gradient_.defined(), options_.label, ": there is no backward to join");
  accepts_ = trains;
  for (std::size_t i = 0; i < trains.size(); ++i) {
    // A parameter that was frozen since the forward gets nothing, one that is frozen later what it has got.
    accepts_[i] = trains[i] && options_.parameters[i].requires_grad();
    trains_[i] = trains_[i] || accepts_[i];
  }
}

bool ShardedBuffer::drop_gradients(const std::vector<bool>& which) {
  check_flags("which", which);
  BMT_CHECK(StateError, gradient_.defined(), options_.label, ": there is no gradient to drop");
  bool is_any_left = false;
  for (std::size_t i = 0; i < which.size(); ++i) {
    trains_[i] = trains_[i] && !which[i];
    touched_[i] = touched_[i] && !which[i];
    is_any_left = is_any_left || trains_[i];
  }
  if (!is_any_left) {
    cancel_backward();
  }
  return is_any_left;
}

void ShardedBuffer::check_flags(const char* name, const std::vector<bool>& flags) const {
  BMT_CHECK(ValueError, flags.size() == options_.parameters.size(), name, ": expected ",
            options_.parameters.size(), " flags, got ", flags.size());
}

void ShardedBuffer::accumulate(std::size_t index, const at::Tensor& gradient) {
  BMT_CHECK(
      StateError, gradient_.defined(), options_.label,
      ": a gradient reached a parameter of the Block outside of the Block's own backward, through a tensor "
      "that its forward made and did not return; return it as a further result");
  sum_what_has_arrived();
  if (!accepts_.at(index)) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  if (touched_.at(index)) {
    gradient_views_[index].add_(dense);
  } else {
    gradient_views_[index].copy_(dense);
    touched_[index] = true;
  }
}

at::Tensor ShardedBuffer::take_place(std::size_t index, at::ScalarType dtype) {
  if (!gradient_.defined() || !accepts_.at(index) || touched_.at(index) || dtype != options_.reduce_dtype) {
    return {};
  }
  sum_what_has_arrived();
  touched_[index] = true;
  return gradient_views_[index];
}

void ShardedBuffer::sum_what_has_arrived() {
  std::erase_if(under_way_, [](const std::weak_ptr<ShardedBuffer>& other) {
    const std::shared_ptr<ShardedBuffer> group = other.lock();
    return group == nullptr || group->sum_if_arrived();
  });
}

void ShardedBuffer::start_reduce() {
  BMT_CHECK(StateError, gradient_.defined(), options_.label, ": there is no gradient to reduce");
  const c10::AutoGradMode no_grad(false);
  zero_untouched();
  gradient_views_.clear();
  if (layout_.num_ranks() == 1) {
    received_ = gradient_;
    start_sum_over_replicas();
    return;
  }
  if (options_.reduce_way == ReduceWay::kRing) {
    received_ = at::empty({layout_.partition()}, gradient_.options());
    reduce_work_ = options_.reduce_comm->ring_reduce_scatter(received_, gradient_, options_.label);
    return;
  }
  if (options_.reduce_way == ReduceWay::kHosts) {
    start_sum_over_host();
    return;
  }
  if (is_worth_sharing(options_.reduce_dtype) && options_.reduce_comm->works_in_place()) {
    reduce_work_ = options_.reduce_comm->all_to_all_in_place(gradient_, peer_slices_, options_.label);
    return;
  }
  received_ = full_buffer();
  reduce_work_ = options_.reduce_comm->all_to_all(received_, gradient_, options_.label);
}

at::Tensor ShardedBuffer::full_buffer() {
  c10::Storage storage = empty_storage(options_.device);
  put_memory(storage, options_.pool->acquire(full_bytes(options_.reduce_dtype), options_.device),
             full_bytes(options_.reduce_dtype));
  return view_of_storage(storage, options_.reduce_dtype, 0, {layout_.padded_total()});
}

// Each rank of this host gets what is for the ranks with its place, one slice for each host.
void ShardedBuffer::start_sum_over_host() {
  const std::vector<std::int64_t> by_rank = {options_.host_comm->size(), options_.hosts_comm->size(),
                                             layout_.partition()};
  const at::Tensor ordered = full_buffer();
  ordered.view(by_rank).copy_(gradient_.view({by_rank[1], by_rank[0], by_rank[2]}).transpose(0, 1));
  gradient_ = ordered;
  received_ = full_buffer();
  reduce_work_ = options_.host_comm->all_to_all(received_, gradient_, options_.label);
}

void ShardedBuffer::start_sum_over_hosts() {
  const at::Tensor sums = at::empty({options_.hosts_comm->size() * layout_.partition()}, received_.options());
  sum_slices(sums, received_.view({options_.host_comm->size(), sums.numel()}).unbind(0),
             /*accumulate=*/false);
  end_reduction();
  gradient_ = sums;
  received_ = at::empty_like(sums);
  reduce_work_ = options_.hosts_comm->all_to_all(received_, gradient_, options_.label);
  sum_ = Sum::kOverHosts;
}

void ShardedBuffer::start_sum_over_replicas() {
  if (num_replicas() > 1) {
    reduce_work_ = options_.replica_comm->all_reduce(received_, ReduceOp::kSum, options_.label);
  }
}

void ShardedBuffer::zero_untouched() {
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

bool ShardedBuffer::start_next_sum() {
  if (!is_reducing() || layout_.num_ranks() == 1) {
    return false;
  }
  const bool over_hosts = sum_ == Sum::kOverRanks && options_.reduce_way == ReduceWay::kHosts;
  const bool over_replicas = !over_hosts && sum_ != Sum::kOverReplicas && num_replicas() > 1;
  if (!over_hosts && !over_replicas) {
    return false;
  }
  reduce_work_->wait();
  reduce_work_.reset();
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  if (over_hosts) {
    start_sum_over_hosts();
    return true;
  }
  const at::Tensor sum = at::empty_like(shard_);
  sum_slices(sum, received_slices(), /*accumulate=*/false);
  end_reduction();
  received_ = sum;
  start_sum_over_replicas();
  sum_ = Sum::kOverReplicas;
  return true;
}

bool ShardedBuffer::continue_reduce() {
  if (sum_ == Sum::kOverRanks) {
    start_next_sum();
  }
  return sum_ != Sum::kOverRanks;
}

void ShardedBuffer::await_reduce() {
  while (start_next_sum()) {
  }
  if (reduce_work_) {
    reduce_work_->wait();
    reduce_work_.reset();
  }
}

bool ShardedBuffer::sum_if_arrived() {
  if (!peer_slices_ || is_summed_ || num_replicas() > 1) {
    return true;
  }
  if (reduce_work_ && !reduce_work_->is_completed()) {
    return false;
  }
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  await_reduce();
  if (writes_all_gradients()) {
    sum_into_shard(received_slices());
  } else {
    const bool is_double = options_.dtype == at::kDouble;
    sum_ahead_ = at::empty(shard_.sizes(), shard_.options().dtype(is_double ? at::kDouble : at::kFloat));
    sum_slices(sum_ahead_, received_slices(), /*accumulate=*/false);
  }
  is_summed_ = true;
  delay();
  peer_slices_->release();
  return true;
}

bool ShardedBuffer::writes_all_gradients() const {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const GradientMode mode = gradient_mode(i);
    if (mode != GradientMode::kWrite && mode != GradientMode::kSkip) {
      return false;
    }
  }
  return true;
}

void ShardedBuffer::add_to_strangers() {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const LocalPart& part = local_parts_[i];
    if (gradient_mode(i) == GradientMode::kForeign && part.numel > 0) {
      at::Tensor& gradient = options_.parameters[i].mutable_grad();
      gradient.add_(gradient_shard_.narrow(0, part.shard_offset, part.numel).view_as(gradient));
    }
  }
}

void ShardedBuffer::finish_reduce(TreeSum* tree) {
  if (!is_reducing()) {
    return;
  }
  await_reduce();
  sum_ = Sum::kOverRanks;
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal_tensors(false);
  if (!peer_slices_) {
    gradient_ = at::Tensor();
  }
  if (std::exchange(is_summed_, false)) {
    BMT_CHECK(StateError, tree == nullptr, options_.label, ": the gradients were summed already");
    if (sum_ahead_.defined()) {
      sum_into_shard({sum_ahead_});
    } else {
      add_to_strangers();
    }
    end_reduction();
    publish_gradients();
    return;
  }
  const std::vector<at::Tensor> slices = received_slices();
  if (tree != nullptr) {
    BMT_CHECK(StateError, options_.reduce_way == ReduceWay::kDirect, options_.label,
              ": virtual shards need the gradients of each rank, not sums of several");
    for (const at::Tensor& slice : slices) {
      tree->push(slice);
    }
    end_reduction();
    return;
  }
  sum_into_shard(slices);
  end_reduction();
  publish_gradients();
}

std::vector<at::Tensor> ShardedBuffer::received_slices() const {
  std::vector<at::Tensor> slices;
  if (peer_slices_) {
    for (const void* const slice : peer_slices_->by_rank) {
      slices.push_back(at::from_blob(const_cast<void*>(slice), {layout_.partition()},
                                     at::TensorOptions().dtype(options_.reduce_dtype)));
    }
    return slices;
  }
  for (std::int64_t slice = 0; slice < received_.numel(); slice += layout_.partition()) {
    slices.push_back(received_.narrow(0, slice, layout_.partition()));
  }
  return slices;
}

void ShardedBuffer::end_reduction() noexcept {
  if (peer_slices_) {
    delay();
    peer_slices_->release();
    peer_slices_.reset();
  }
  received_ = at::Tensor();
  gradient_ = at::Tensor();
  sum_ahead_ = at::Tensor();
}

void ShardedBuffer::add_gradient(const at::Tensor& sum) {
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

void ShardedBuffer::sum_into_shard(const std::vector<at::Tensor>& slices) {
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
      reduce_run(slices, first, last, mode);
    }
    first = last;
  }
}

void ShardedBuffer::make_gradient_shard() {
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

ShardedBuffer::GradientMode ShardedBuffer::gradient_mode(std::size_t index) const {
  const at::Tensor& parameter = options_.parameters[index];
  if (!trains_[index]) {
    return GradientMode::kSkip;
  }
  const at::Tensor& current = parameter.grad();
  if (!current.defined()) {
    return GradientMode::kWrite;
  }
  const bool is_ours = gradient_shard_.defined() && current.is_alias_of(gradient_shard_) &&
                       current.is_contiguous() &&
                       current.storage_offset() == local_parts_[index].shard_offset &&
                       current.numel() == local_parts_[index].numel;
  return is_ours ? GradientMode::kAccumulate : GradientMode::kForeign;
}

void ShardedBuffer::reduce_run(const std::vector<at::Tensor>& slices, std::size_t first, std::size_t last,
                               GradientMode mode) {
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
  std::vector<at::Tensor> parts;
  parts.reserve(slices.size());
  for (const at::Tensor& slice : slices) {
    parts.push_back(slice.narrow(0, begin, end - begin));
  }
  if (mode == GradientMode::kForeign) {
    const at::Tensor sum = at::empty({end - begin}, shard_.options());
    sum_slices(sum, parts, /*accumulate=*/false);
    at::Tensor& gradient = options_.parameters[first].mutable_grad();
    gradient.add_(sum.view_as(gradient));
  } else {
    sum_slices(gradient_shard_.narrow(0, begin, end - begin), parts, mode == GradientMode::kAccumulate);
  }
}

void ShardedBuffer::publish_gradients() {
  for (std::size_t i = 0; i < options_.parameters.size(); ++i) {
    const at::Tensor& parameter = options_.parameters[i];
    if (!trains_[i]) {
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

void ShardedBuffer::cancel_backward() noexcept {
  if (reduce_work_) {
    try {
      reduce_work_->wait();
    } catch (const std::exception&) {
      // The error that cancels the backward is the one to report.
    }
    reduce_work_.reset();
  }
  sum_ = Sum::kOverRanks;
  is_summed_ = false;
  gradient_views_.clear();
  end_reduction();
}

}  // namespace bmtrain
