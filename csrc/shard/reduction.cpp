#include "shard/reduction.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "common/check.h"
#include "common/race_point.h"

namespace bmtrain {

std::int64_t Reduction::num_bytes() const {
  std::int64_t total = 0;
  const auto add = [&total](const at::Tensor& tensor, const at::Tensor& counted) {
    if (tensor.defined() && !(counted.defined() && tensor.is_alias_of(counted))) {
      total += static_cast<std::int64_t>(tensor.storage().nbytes());
    }
  };
  add(gradient_, {});
  add(received_, gradient_);
  add(sum_, shard_.flat());
  return total;
}

void Reduction::begin(const std::vector<bool>& trains, std::vector<std::weak_ptr<Reduction>> under_way,
                      bool in_turn) {
  spec_.check_flags("trains", trains);
  under_way_ = std::move(under_way);
  race_point();
  for (const std::weak_ptr<Reduction>& other : under_way_) {
    if (const std::shared_ptr<Reduction> reduction = other.lock(); in_turn && reduction != nullptr) {
      reduction->sum_in_turn();
    }
  }
  take_gradient_memory();
  for (at::Tensor& view : spec_.full_views(gradient_.storage(), spec_.reduce_dtype)) {
    places_.push_back({std::move(view), false, false});
  }
  trains_.assign(spec_.num_parameters(), false);
  stage_ = Stage::kReceiving;
  join(trains);
}

void Reduction::take_gradient_memory() {
  c10::DataPtr memory;
  if (spec_.is_worth_sharing(spec_.reduce_dtype)) {
    memory = spec_.reduce_comm->borrow_input(spec_.full_bytes(spec_.reduce_dtype));
  }
  gradient_ = memory ? spec_.full_over(std::move(memory), spec_.reduce_dtype)
                     : spec_.full_from_pool(spec_.reduce_dtype);
}

void Reduction::join(const std::vector<bool>& trains) {
  spec_.check_flags("trains", trains);
  BMT_CHECK(StateError, stage_ == Stage::kReceiving, spec_.label, ": there is no backward to join");
  for (std::size_t i = 0; i < trains.size(); ++i) {
    // A parameter that was frozen since the forward gets nothing, one that is frozen later what it has got.
    places_[i].accepts = trains[i] && spec_.parameters[i].requires_grad();
    trains_[i] = trains_[i] || places_[i].accepts;
  }
}

void Reduction::accumulate(std::size_t index, const at::Tensor& gradient) {
  BMT_CHECK(
      StateError, stage_ == Stage::kReceiving, spec_.label,
      ": a gradient reached a parameter of the Block outside of the Block's own backward, through a tensor "
      "that its forward made and did not return; return it as a further result");
  sum_what_has_arrived();
  Place& place = places_.at(index);
  if (!place.accepts) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  if (std::exchange(place.has_gradient, true)) {
    place.view.add_(dense);
  } else {
    place.view.copy_(dense);
  }
}

at::Tensor Reduction::take_place(std::size_t index, at::ScalarType dtype) {
  if (stage_ != Stage::kReceiving || dtype != spec_.reduce_dtype) {
    return {};
  }
  Place& place = places_.at(index);
  if (!place.accepts || place.has_gradient) {
    return {};
  }
  sum_what_has_arrived();
  place.has_gradient = true;
  return place.view;
}

void Reduction::start() {
  BMT_CHECK(StateError, stage_ == Stage::kReceiving, spec_.label, ": there is no gradient to reduce");
  const c10::AutoGradMode no_grad(false);
  std::vector<Span> written;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].has_gradient) {
      written.push_back(spec_.layout.span(i));
    }
  }
  zero_outside(gradient_, written);  // what travels must not carry NaN from older contents
  places_.clear();
  under_way_.clear();
  stage_ = Stage::kFirstSum;
  Communicator& comm = *spec_.reduce_comm;
  const bool is_alone = spec_.layout.num_ranks() == 1;
  if (all_comm_ || (!is_alone && spec_.reduce_way != ReduceWay::kDirect)) {
    start_another_way();
  } else if (is_alone) {
    received_ = gradient_;
    add_replicas();
    if (spec_.host_lane && !work_) {
      ready_ = spec_.host_lane->mark();
    }
  } else if (spec_.is_worth_sharing(spec_.reduce_dtype) && comm.works_in_place()) {
    work_ = comm.all_to_all_in_place(gradient_, peer_slices_, spec_.label);
  } else {
    received_ = spec_.full_from_pool(spec_.reduce_dtype);
    work_ = comm.all_to_all(received_, gradient_, spec_.label);
  }
}

void Reduction::add_replicas() {
  if (spec_.num_replicas() > 1) {
    work_ = spec_.replica_comm->all_reduce(received_, ReduceOp::kSum, spec_.label);
  }
}

bool Reduction::continue_sum() {
  if (stage_ == Stage::kFirstSum && spec_.sums_in_steps()) {
    start_next_sum();
  }
  return stage_ == Stage::kOverHosts || stage_ == Stage::kOverReplicas;
}

void Reduction::await() {
  while (spec_.sums_in_steps() && start_next_sum()) {
  }
  if (work_) {
    if (spec_.host_lane) {
      static_cast<void>(spec_.host_lane->to_host(nullptr, [&] { work_->wait(); }));
    }
    work_->wait();
    work_.reset();
  }
}

void Reduction::finish(TreeSum* tree) {
  if (stage_ == Stage::kEnded || stage_ == Stage::kReceiving) {
    return;
  }
  const PlainMode plain;
  await();
  if (!peer_slices_) {
    gradient_ = at::Tensor();  // before there is a sum beside it
  }
  if (tree != nullptr) {
    push_slices(*tree);
  } else if (spec_.host_lane) {
    wait_on_host(*spec_.host_lane->to_host(ready_.get(), [&] { shard_.sum(slices(), trains_); }));
  } else {
    shard_.sum(slices(), trains_);
  }
  stage_ = Stage::kEnded;
  let_go();
  if (tree == nullptr) {
    shard_.publish(trains_);
  }
}

std::vector<at::Tensor> Reduction::slices() const {
  if (stage_ == Stage::kSummed) {
    return {sum_};
  }
  std::vector<at::Tensor> slices;
  const std::int64_t partition = spec_.layout.partition();
  if (peer_slices_) {
    for (const void* const slice : peer_slices_->by_rank) {
      if (slice == nullptr) {
        return {};  // after a void operation
      }
      slices.push_back(at::from_blob(const_cast<void*>(slice), {partition},
                                     at::TensorOptions().dtype(spec_.reduce_dtype)));
    }
    return slices;
  }
  const std::int64_t numel = received_.defined() ? received_.numel() : 0;  // 0 after a void operation
  const std::int64_t slice = all_comm_ ? numel / all_comm_->size() : partition;
  for (std::int64_t begin = 0; begin < numel; begin += slice) {
    slices.push_back(received_.narrow(0, begin, slice));
  }
  return slices;
}

void Reduction::let_go() noexcept {
  if (peer_slices_) {
    race_point();
    peer_slices_->release();
    peer_slices_.reset();
  }
  received_ = at::Tensor();
  gradient_ = at::Tensor();
  sum_ = at::Tensor();
}

void Reduction::cancel() noexcept {
  if (work_) {
    try {
      work_->wait();
    } catch (const std::exception&) {
      // The error that cancels the backward is the one to report.
    }
    work_.reset();
  }
  stage_ = Stage::kEnded;
  places_.clear();
  under_way_.clear();
  let_go();
}

}  // namespace bmtrain
