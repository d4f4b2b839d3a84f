// What a step does beside its update while a piece of memory is in the caches: checksums, or a journal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "optim/step_journal.h"

namespace bmtrain {

/// A step piece by piece. With a journal its pieces are recorded there. Without, as over the copy of another
/// rank's shards, they are summed. For each tensor in turn the sums are those of the weight, the rounded
/// weight where there is one, the arrays of the state, and the gradient.
///
/// [Note: Checked steps]
/// Memory takes longer to read than a step to compute. So each piece of a tensor, small enough for the first
/// cache, is summed, updated and summed again, before the next one. A piece that was damaged is found when it
/// has been updated: the whole copy is of no use then.
struct StepCheck {
  std::vector<std::vector<double>> factors;  // each gradient is multiplied by, one after the other, in place
  std::shared_ptr<StepJournal> journal = nullptr;
  std::vector<std::int64_t> first_pieces;   // in the journal, of each tensor
  std::vector<std::int64_t> before, after;  // see word_sum.h; after the step none of the gradient: 0

  /// The step, on slices that are a tensor each, with these gradients.
  void step(const std::vector<cpu::AdamSlice>& slices, at::TensorList grads);
  void step(const std::vector<cpu::MomentumSlice>& slices, at::TensorList grads);
};

/// Copies tensors to places of as many bytes, and returns the sums of their words.
[[nodiscard]] std::vector<std::int64_t> copy_and_sum(at::TensorList places, at::TensorList tensors);

}  // namespace bmtrain
