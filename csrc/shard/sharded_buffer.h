// ShardedBuffer: the parameters of one block that share dtype and group, as one flat buffer cut into one
// shard per rank.
//
// Its parts, each in a file of its own: the shard and the gradient shard (shard_memory.h), which stay; the
// gathered buffer (gathered_buffer.h), there while the block runs; and a reduction for each backward
// (reduction.h). What the parts have to do together is here.
//
// One thread at a time: the one that calls the block, or autograd's that runs the block's backward while the
// caller waits for it. Nothing is locked: a step's order is the program's. Python holds the interpreter's
// lock where nothing waits, and gives it up where another rank or the device may be waited for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "shard/gathered_buffer.h"
#include "shard/reduction.h"
#include "shard/shard_memory.h"

namespace bmtrain {

class ShardedBuffer : public std::enable_shared_from_this<ShardedBuffer> {
 public:
  explicit ShardedBuffer(BufferOptions options);
  ShardedBuffer(const ShardedBuffer&) = delete;
  ShardedBuffer& operator=(const ShardedBuffer&) = delete;

  [[nodiscard]] const BufferSpec& spec() const { return spec_; }
  [[nodiscard]] ShardMemory& shard() { return shard_; }
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
