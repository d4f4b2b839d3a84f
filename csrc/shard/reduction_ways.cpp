// What a reduction does beside sending each rank its slice: sums over hosts and replicas, see [Note: Ways of
// a reduction] and [Note: Replicas] in buffer_spec.h, and gradients of several backwards and of virtual
// shards.
#include <ATen/ops/add.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "common/check.h"
#include "common/sizes.h"
#include "shard/reduction.h"
#include "shard/tree_sum.h"

namespace bmtrain {

void Reduction::start_another_way() {
  if (all_comm_) {
    exchange_with_all();
  } else if (spec_.reduce_way == ReduceWay::kHosts) {
    exchange_in_host();
  } else {
    received_ = at::empty({spec_.layout.partition()}, gradient_.options());
    work_ = spec_.reduce_comm->ring_reduce_scatter(received_, gradient_, spec_.label);
  }
}

// Each rank of this host gets what is for the ranks with its place, one slice for each host.
void Reduction::exchange_in_host() {
  const std::int64_t num_hosts = spec_.hosts_comm->size(), num_here = spec_.host_comm->size();
  const std::int64_t partition = spec_.layout.partition();
  const at::Tensor ordered = spec_.full_from_pool(spec_.reduce_dtype);
  ordered.view({num_here, num_hosts, partition})
      .copy_(gradient_.view({num_hosts, num_here, partition}).transpose(0, 1));
  gradient_ = ordered;
  received_ = spec_.full_from_pool(spec_.reduce_dtype);
  work_ = spec_.host_comm->all_to_all(received_, gradient_, spec_.label);
}

void Reduction::exchange_between_hosts() {
  const std::int64_t numel = spec_.hosts_comm->size() * spec_.layout.partition();
  const at::Tensor sums = at::empty({numel}, received_.options());
  sum_slices(sums, received_.view({spec_.host_comm->size(), numel}).unbind(0), /*accumulate=*/false);
  let_go();
  gradient_ = sums;
  received_ = at::empty_like(sums);
  work_ = spec_.hosts_comm->all_to_all(received_, gradient_, spec_.label);
}

// Each rank gets a piece of its shard from every rank; its replicas get the others.
void Reduction::exchange_with_all() {
  const std::int64_t num_sharing = spec_.layout.num_ranks(), partition = spec_.layout.partition();
  const std::int64_t num_pieces = spec_.num_replicas(),
                     piece = round_up(partition, 8 * num_pieces) / num_pieces;
  gradient_ =
      at::constant_pad_nd(gradient_.view({num_sharing, partition}), {0, num_pieces * piece - partition})
          .view({num_sharing, num_pieces, piece})
          .transpose(0, 1)
          .reshape({-1});
  received_ = at::empty_like(gradient_);
  work_ = all_comm_->all_to_all(received_, gradient_, spec_.label);
}

bool Reduction::start_next_sum() {
  const bool is_first = stage_ == Stage::kFirstSum && spec_.layout.num_ranks() > 1;
  const bool over_hosts = is_first && spec_.reduce_way == ReduceWay::kHosts;
  const bool over_replicas =
      !over_hosts && !all_comm_ && (is_first || stage_ == Stage::kOverHosts) && spec_.num_replicas() > 1;
  if (!over_hosts && !over_replicas) {
    return false;
  }
  work_->wait();
  work_.reset();
  const PlainMode plain;
  if (over_hosts) {
    exchange_between_hosts();
    stage_ = Stage::kOverHosts;
    return true;
  }
  const at::Tensor sum = spec_.empty_shard(spec_.dtype);
  sum_slices(sum, slices(), /*accumulate=*/false);
  let_go();
  received_ = sum;
  add_replicas();
  stage_ = Stage::kOverReplicas;
  return true;
}

bool Reduction::drop(const std::vector<bool>& which) {
  spec_.check_flags("which", which);
  BMT_CHECK(StateError, stage_ == Stage::kReceiving, spec_.label, ": there is no gradient to drop");
  bool is_any_left = false;
  for (std::size_t i = 0; i < which.size(); ++i) {
    trains_[i] = trains_[i] && !which[i];
    places_[i].has_gradient = places_[i].has_gradient && !which[i];
    is_any_left = is_any_left || trains_[i];
  }
  if (!is_any_left) {
    cancel();
  }
  return is_any_left;
}

void Reduction::push_slices(TreeSum& tree) const {
  BMT_CHECK(StateError, stage_ != Stage::kSummed, spec_.label, ": the gradients were summed already");
  BMT_CHECK(StateError, spec_.reduce_way == ReduceWay::kDirect, spec_.label,
            ": virtual shards need the gradients of each rank, not sums of several");
  for (const at::Tensor& slice : slices()) {
    tree.push(slice);
  }
}

void GradientShard::add(const at::Tensor& sum, const std::vector<bool>& trains) {
  const PlainMode plain;
  make(trains);
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    if (!trains[i]) {
      continue;
    }
    const LocalPart& part = spec_.local_parts[i];
    const at::Tensor own = sum.narrow(0, part.shard_offset, part.numel);
    at::Tensor& gradient = spec_.parameters[i].mutable_grad();
    if (gradient.defined()) {
      gradient.copy_(at::add(own.view_as(gradient), gradient));
    } else {
      flat_.narrow(0, part.shard_offset, part.numel).copy_(own);
    }
  }
}

void Reduction::add(const at::Tensor& sum) {
  const std::int64_t partition = spec_.layout.partition();
  BMT_CHECK(ValueError, sum.dim() == 1 && sum.numel() == partition, "sum: expected ", partition,
            " elements, got shape ", sum.sizes());
  BMT_CHECK(StateError, trains_.size() == spec_.num_parameters(), spec_.label,
            ": there was no backward to add a gradient of");
  shard_.add(sum.to(spec_.home()), trains_);
  shard_.publish(trains_);
}

}  // namespace bmtrain
