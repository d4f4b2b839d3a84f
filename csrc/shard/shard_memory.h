// What a rank keeps of a ShardedBuffer: its shard, and its shard of the gradients. Parameters are views of
// the one between calls, their `.grad` of the other. Defined also in new_memory.cpp, reduction_ways.cpp and
// sum_ahead.cpp.
//
// One thread at a time: the one that calls the block, or autograd's that runs the block's backward.
//
// [Note: Parameters on the meta device]
// A parameter made on the meta device has its place in the layout, but no data until ShardMemory::make(). The
// shard has no memory until the first of its parameters has data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "shard/buffer_spec.h"

namespace bmtrain {

/// From now on `memory` is under the storage of a flat tensor that fills it, and all that refers to it.
void lend(const at::Tensor& flat, const at::Tensor& memory);

class ShardMemory {
 public:
  explicit ShardMemory(const BufferSpec& spec);

  /// 1-D, layout.partition() elements.
  [[nodiscard]] const at::Tensor& flat() const { return flat_; }
  /// This rank's part of parameter `index`: a 1-D view of the shard.
  [[nodiscard]] const at::Tensor& local_view(std::size_t index) const;
  /// How many of the tensors here, and of the parameters in their own places, refer to the shard.
  [[nodiscard]] std::int64_t num_references() const;

  /// Makes every parameter's data the view of the shard, but those on the meta device.
  void attach() const;
  /// Gives a parameter on the meta device its data: the view of the shard, zeros.
  void make(std::size_t index);
  /// StateError if a parameter has no data.
  void check_data() const;

  /// Whether something was put in a parameter's place by `parameter.data = tensor`.
  [[nodiscard]] bool has_new_data() const;
  /// Takes it over: a shard, or a full tensor of which this rank's part is kept. If there are more references
  /// to the shard than those known here and `num_others`, users hold views: they keep the memory, and the
  /// buffer goes on with a copy.
  void adopt_data(std::int64_t num_others);

 private:
  // A shard without memory, and views of it.
  void make_views();
  void allocate();
  [[nodiscard]] bool is_attached(std::size_t index) const;
  void leave_memory_to_others(std::int64_t num_others);

  const BufferSpec& spec_;
  at::Tensor flat_;
  std::vector<at::Tensor> local_views_;
};

class GradientShard {
 public:
  explicit GradientShard(const BufferSpec& spec) : spec_(spec) {}

  /// 1-D, layout.partition() elements; undefined before its first need, and from a call on when no gradient
  /// uses it.
  [[nodiscard]] const at::Tensor& flat() const { return flat_; }
  /// How many of the tensors here and of the parameters' gradients refer to it.
  [[nodiscard]] std::int64_t num_references() const;

  /// The next gradient shard is made of `memory`.
  void use_memory(const at::Tensor& memory) { next_memory_ = memory; }

  /// Whether a sum for the parameters with `trains[i]` would be written here, and added to no `.grad`.
  [[nodiscard]] bool writes_only(const std::vector<bool>& trains) const;
  /// The sum of slices, one from each rank and in that order, goes to the gradients of the parameters with
  /// `trains[i]`: it is written here where there is no `.grad`, and added to the one that there is. Of a
  /// shard on the host the slices are on the device, and the current stream copies their sum.
  void sum(const std::vector<at::Tensor>& slices, const std::vector<bool>& trains);
  /// Adds a sum in fp32 or fp64; each element is rounded once.
  void add(const at::Tensor& sum, const std::vector<bool>& trains);
  /// Gives the parameters with `trains[i]` that have no `.grad` their view, and runs the hooks of all of
  /// them.
  void publish(const std::vector<bool>& trains) const;
  /// Frees the memory once no `.grad` uses it, so that it is not there while activations are; returns whether
  /// there was any. Not after keep_memory(): new pages take longer than the sums that are written to them.
  bool drop_if_unused();
  void keep_memory() { keeps_memory_ = true; }

 private:
  enum class Mode : std::uint8_t {
    kSkip,        // the parameter does not train
    kWrite,       // it has no `.grad`
    kAccumulate,  // its `.grad` is a view of this
    kForeign,     // its `.grad` is somebody else's
  };
  [[nodiscard]] Mode mode_of(std::size_t index, const std::vector<bool>& trains) const;
  void make(const std::vector<bool>& trains);
  // Neighbours that are treated alike.
  void sum_run(const std::vector<at::Tensor>& slices, std::size_t first, std::size_t last, Mode mode);

  const BufferSpec& spec_;
  at::Tensor flat_;
  at::Tensor next_memory_;  // of the next one
  bool keeps_memory_ = false;
};

/// `parameter.set_data(data)` across devices, which torch refuses from the meta device. The parameter stays
/// the same object for all who hold it: optimizers, modules and ShardedBuffers.
void materialize(const at::Tensor& parameter, const at::Tensor& data);

}  // namespace bmtrain
