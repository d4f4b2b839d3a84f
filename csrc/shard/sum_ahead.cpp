// Sums of gradients that have come from ranks that share memory, before their reduction ends.
//
// [Note: Sums ahead of their time]
// A reduction ends, as the program sees it, when the next block's backward is over. What came earlier is
// summed earlier, whenever a gradient of that block lands: then the peers, who may be ahead, need not wait
// for memory that this rank has yet to read. When that is depends on the ranks' speed, so nobody may see it:
// the sum is made ahead where it is written to a gradient shard that no `.grad` shows yet, and otherwise in
// memory of its own, in fp32. `.grad` and the hooks follow at the end; a `.grad` that was there, or that
// somebody else (the read of a parameter outside its block) has put there in between, is added to, with the
// bits that it would have had.
//
// [Note: One buffer of gradients]
// Where ranks read each other's gradients in place, a backward that runs the forward again needs no second
// buffer of gradients: the run takes long enough for the reduction before it. Meanwhile that is summed as
// soon as it has come, also whenever the run saves a tensor; before the first gradient lands it is waited
// for, summed, and its buffer taken again once the peers have read it. So the number of buffers does not
// depend on the ranks' speed, and a rank waits for another only if that is behind by more than this run.
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "common/race_point.h"
#include "shard/reduction.h"

namespace bmtrain {

bool GradientShard::writes_only(const std::vector<bool>& trains) const {
  for (std::size_t i = 0; i < spec_.num_parameters(); ++i) {
    if (trains[i] && spec_.parameters[i].grad().defined()) {
      return false;
    }
  }
  return true;
}

void Reduction::sum_what_has_arrived() {
  std::erase_if(under_way_, [](const std::weak_ptr<Reduction>& other) {
    const std::shared_ptr<Reduction> reduction = other.lock();
    return reduction == nullptr || reduction->sum_if_arrived();
  });
}

bool Reduction::sum_if_arrived() {
  if (stage_ != Stage::kFirstSum || !peer_slices_ || spec_.num_replicas() > 1) {
    return true;
  }
  if (work_ && !work_->is_completed()) {
    return false;
  }
  const PlainMode plain;
  await();
  if (shard_.writes_only(trains_)) {
    shard_.sum(slices(), trains_);
    sum_ = shard_.flat();
  } else {
    sum_ = spec_.empty_shard(spec_.dtype == at::kDouble ? at::kDouble : at::kFloat);
    sum_slices(sum_, slices(), /*accumulate=*/false);
  }
  stage_ = Stage::kSummed;
  race_point();
  peer_slices_->release();
  return true;
}

void Reduction::sum_in_turn() {
  if (stage_ == Stage::kFirstSum && peer_slices_ && !continue_sum()) {
    await();
    static_cast<void>(sum_if_arrived());
  }
  if (stage_ == Stage::kSummed) {
    gradient_ = at::Tensor();
  }
}

}  // namespace bmtrain
