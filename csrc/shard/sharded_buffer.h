// ShardedBuffer: the parameters of one block that share dtype and group, as one flat buffer cut into one
// shard per rank.
//
// Its parts: the shard and the gradient shard (shard_memory.h), which stay; the gathered buffer, there while
// the block runs; and a reduction for each backward (reduction.h). What the parts have to do together is
// here.
//
// One thread at a time: the one that calls the block, or autograd's that runs the block's backward while the
// caller waits for it. Nothing is locked: a step's order is the program's. Python holds the interpreter's
// lock where nothing waits, and gives it up where another rank or the device may be waited for.
//
// [Note: The gathered storage]
// One storage object stands for the gathered buffer for the whole life of the buffer; start() puts memory
// under it and release() takes the memory away. Everything that aliases it (the parameters' full views, the
// views that autograd saved in forward) becomes valid again with the next gather, so nothing keeps gathered
// memory alive between forward and backward, and no saved tensor needs rewriting. With one rank the gathered
// buffer is the shard itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "shard/graph.h"
#include "shard/reduction.h"
#include "shard/shard_memory.h"

namespace bmtrain {

/// The full parameters, while there are any. On CUDA all of it is in the order of the thread's current
/// stream.
class GatheredBuffer {
 public:
  enum class State : std::uint8_t {
    kSharded,    // at first, and from release()
    kGathering,  // from start()
    kGathered,   // from finish()
  };

  GatheredBuffer(const BufferSpec& spec, const ShardMemory& shard);

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool is_bound() const { return is_bound_; }
  /// Bytes of the full parameters, also on their way; 0 while there are none but the shard.
  [[nodiscard]] std::int64_t num_bytes() const;
  /// Whether `tensor` lies in the buffer.
  [[nodiscard]] bool owns(const at::Tensor& tensor) const;
  /// The parameters in full shape.
  [[nodiscard]] const std::vector<at::Tensor>& views() const { return views_; }
  /// How many of the tensors here refer to the shard's memory.
  [[nodiscard]] std::int64_t num_references_to_shard() const;
  /// The shard may have other memory than before.
  void follow_shard();

  /// `in_place`: where ranks share memory, in a buffer that they write together. The gathers and releases of
  /// buffers for which it is set must follow each other alike on all ranks.
  void start(bool in_place);
  /// Blocks until the buffer is complete (on CUDA: the current stream waits).
  void finish();
  /// Gives the memory back. The parameters must not be bound.
  void release();

  /// Parameters become their full tensors, and `sinks` receive their gradients. The buffer must be gathered.
  ///
  /// [Note: Gradient sinks]
  /// While bound, each parameter's gradient accumulator is a node of ours that writes the gradient straight
  /// into the flat gradient buffer: it lands once, at its final place, and `.grad` never holds a full-size
  /// tensor. Unbinding restores the accumulator that belongs to the shard's shape, so a loss may use the
  /// shard and the full parameter together.
  void bind(const std::vector<SinkPtr>& sinks);
  /// Parameters become their shards again. Never fails.
  void unbind() noexcept;
  /// Blocks until the shard may be written to, see [Note: Shards on the host].
  void await_copy();

 private:
  void gather();
  void await();
  void widen();
  void give_back_wire();
  // This rank's part of what travels, not in place: the shard, or in another dtype its copy in the buffer.
  [[nodiscard]] at::Tensor input() const;

  const BufferSpec& spec_;
  const ShardMemory& shard_;
  State state_ = State::kSharded;
  bool is_bound_ = false;
  bool is_borrowed_ = false;  // the memory of `wire_` is one that the ranks share
  at::Tensor full_;           // flat
  at::Tensor wire_;           // flat, what a gather fills: `full_` unless that is widened from it
  std::vector<at::Tensor> views_;
  WorkPtr work_;
  std::unique_ptr<DeviceEvent> copied_;      // from the host, if that may not have ended yet
  std::vector<NodePtr> shard_accumulators_;  // while bound: what unbind() restores
};

class ShardedBuffer : public std::enable_shared_from_this<ShardedBuffer> {
 public:
  explicit ShardedBuffer(BufferOptions options);
  ShardedBuffer(const ShardedBuffer&) = delete;
  ShardedBuffer& operator=(const ShardedBuffer&) = delete;

  [[nodiscard]] const BufferSpec& spec() const { return spec_; }
  [[nodiscard]] ShardMemory& shard() { return shard_; }
  [[nodiscard]] GradientShard& gradient_shard() { return gradient_shard_; }
  [[nodiscard]] const GradientShard& gradient_shard() const { return gradient_shard_; }
  [[nodiscard]] GatheredBuffer& gathered() { return gathered_; }
  /// Of the backward that runs or has run last. To be held while it is used: its end runs hooks, and a hook
  /// may begin the next one.
  [[nodiscard]] std::shared_ptr<Reduction> reduction() const { return reduction_; }

  /// How many tensors that are known here refer to the memory of the shard, and to that of the gradient
  /// shard.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> num_references() const;
  /// Changes whenever one of the parameters is modified in place.
  [[nodiscard]] std::int64_t version() const;
  /// Which of the parameters require grad now.
  [[nodiscard]] std::vector<bool> requires_grad() const;

  /// Takes over what users have put in a parameter's place, see ShardMemory::adopt_data(). Returns whether
  /// there was anything; then what is gathered is out of date.
  bool adopt_data();
  /// Parameters become their full tensors. The buffer must be gathered.
  void bind();
  /// Begins a reduction; `under_way`: buffers whose reductions have not ended. See Reduction::begin().
  void begin_backward(const std::vector<bool>& trains,
                      const std::vector<std::shared_ptr<ShardedBuffer>>& under_way, bool in_turn);
  /// A function that sees the gradient of parameter `index` before its reduction, and may replace it.
  void set_hook(std::size_t index, std::unique_ptr<torch::autograd::FunctionPreHook> hook);

 private:
  void make_sinks();

  const BufferSpec spec_;
  ShardMemory shard_;
  GradientShard gradient_shard_;
  GatheredBuffer gathered_;
  std::shared_ptr<Reduction> reduction_;
  std::vector<SinkPtr> sinks_;  // from their first need
};

}  // namespace bmtrain
