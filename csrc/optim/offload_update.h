// OffloadUpdate: one block's optimizer step, computed while the caller goes on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optim/staged_copies.h"
#include "optim/step_tensors.h"
#include "optim/update_queue.h"

namespace bmtrain {

class OffloadUpdate {
 public:
  /// `label` names the block in errors.
  explicit OffloadUpdate(std::string label);

  /// Adds slices of host tensors to update. They must outlive the update, whose owner keeps them.
  template <typename Slice>
  void add(const StepTensors& tensors, const std::vector<Slice>& slices);

  /// Lets gradients come from, and parameters go to, a device; the tensors added are the host's. See [Note:
  /// Updates of parameters on a device].
  void stage(std::shared_ptr<StagedCopies> copies);

  /// Hands updates to the workers, in this order. Each is posted once.
  static void post(const std::vector<std::shared_ptr<OffloadUpdate>>& updates);

  [[nodiscard]] Update::State state() const;
  /// Lets the gradients be zeroed after their use. False, and no effect, if the update has begun, or, where
  /// gradients are staged, has failed.
  [[nodiscard]] bool zero_gradients_afterwards();
  /// Computes what nobody has begun, with torch's number of threads, and waits for the rest. StateError, with
  /// the label, if a worker failed.
  void wait();
  /// Makes the next backward that would change a parameter's gradient, in a graph that exists already, wait.
  static void guard_gradients(const std::shared_ptr<OffloadUpdate>& update,
                              const std::vector<at::Tensor>& parameters);

  /// Whether a graph that exists could change the gradient of one of the parameters.
  [[nodiscard]] static bool lead_graphs_to(const std::vector<at::Tensor>& parameters);

 private:
  struct Plan;

  void end_copies();

  const std::string label_;
  const std::shared_ptr<Plan> plan_;
  std::shared_ptr<Update> update_;  // once posted
};

/// How many threads an update may use, the waiting one included, where that is not to follow torch's threads;
/// 0: it is.
void set_update_threads(int count);
/// How many threads work on updates beside those that wait for one.
[[nodiscard]] int num_update_workers();

}  // namespace bmtrain
