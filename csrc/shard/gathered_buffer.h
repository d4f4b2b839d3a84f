// GatheredBuffer: the full parameters, while there are any.
//
// One thread at a time: the one that calls the block, or autograd's that runs the block's backward. On CUDA
// all of it is in the order of that thread's current stream.
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
#include <vector>

#include "shard/gradient_sink.h"
#include "shard/shard_memory.h"

namespace bmtrain {

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

 private:
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
  std::vector<NodePtr> shard_accumulators_;  // while bound: what unbind() restores
};

}  // namespace bmtrain
