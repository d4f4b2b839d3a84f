// StagedCopies: what one update needs of a device in host memory: gradients before it, parameters after it.
//
// [Note: Updates of parameters on a device]
// The CPU computes an update from gradients in, and into, host memory; masters and moments never leave it.
// The host memory that copies go through is page-locked and bounded: a StagingLane has a fixed number of
// slots, and the blocks of a step take them in turn. So while one block is computed, the gradients of the
// next are on their way to the host and the parameters of the one before on their way back, in two streams of
// their own.
//
// Nobody's host thread waits for the device but the one that computes, before a block's first chunk:
// - Copies to the host wait, on the device, for what the caller's stream had queued when the update was
//   posted; they start once the block that had the slot before has been computed.
// - A block's first chunk waits for its gradients, and for the copies back from its slot.
// - After the last chunk parameters are copied back, and whoever waits for the update lets its stream wait
//   for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/device_runtime.h"
#include "optim/sent_gradients.h"
#include "optim/staging_lane.h"
#include "optim/update_queue.h"

namespace bmtrain {

class StagedCopies {
 public:
  /// `parameters` are copied from `sources` to the device where these are defined, by way of their host
  /// memory, else from there. `sent`: the gradients' copies, if they have been made already; else null.
  /// ValueError for a slot that there is not, or lists that do not fit.
  StagedCopies(std::shared_ptr<StagingLane> lane, int slot, const StagedTensors& gradients,
               const StagedTensors& parameters, const std::vector<at::Tensor>& sources,
               std::shared_ptr<SentGradients> sent = nullptr);

  /// Takes the slot for `update`, after which `next` comes (may be null).
  void submit(std::shared_ptr<Update> update);
  void precede(std::shared_ptr<StagedCopies> next);
  /// Starts the copies to the host if the slot is free.
  void begin_if_free();
  /// Blocks until gradients have arrived and parameters may be written. From any thread; the copies of the
  /// next update start too. Returns what the gradients are to be multiplied by first, one after the other.
  [[nodiscard]] std::vector<double> arrive();
  /// Starts the copies to the device; everything has been computed.
  void give_back();
  /// The streams of the caller, and of whoever submitted, wait for all copies. The update must be over.
  void join();
  /// Gradients become zeros once they have been copied.
  void zero_gradients();

 private:
  void begin();  // mutex_ is held
  void zero();   // mutex_ is held
  [[nodiscard]] StagingLane::Slot& slot() { return lane_->slots_[slot_]; }

  const std::shared_ptr<StagingLane> lane_;
  const std::size_t slot_;
  const StagedTensors gradients_, parameters_;
  const std::vector<at::Tensor> sources_;
  const std::shared_ptr<SentGradients> sent_;  // may be null

  std::mutex mutex_;  // protects what follows
  std::int64_t caller_stream_ = 0;
  std::shared_ptr<DeviceEvent> submitted_, arrived_, zeroed_, returned_, slot_read_;
  std::shared_ptr<Update> predecessor_;  // in the slot, until the copies have begun
  std::shared_ptr<StagedCopies> next_;
  bool has_begun_ = false;
  bool wants_zero_ = false;
};

}  // namespace bmtrain
