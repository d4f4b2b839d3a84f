// BufferSpec: what does not change in the life of a ShardedBuffer, and what its parts need to make flat
// tensors. Any thread may read it.
//
// [Note: Replicas]
// The ranks that share the buffer may be a part of those that train it. Then each of them has a replica on
// every other part: the rank that holds the same shard. Gradients are summed in two steps, each in rank
// order: over the ranks that share the buffer, then over the replicas, so that all replicas hold the same
// bits. With one rank per part that is plain data parallelism.
//
// [Note: Ways of a reduction]
// Slices of gradients go straight to the rank that sums them, in rank order and in fp32: one rounding, and
// the same bits on every run. But of several hosts each pair of ranks exchanges a slice, which is as many
// times the bytes of a ring between the hosts as a host has ranks. Or they are summed on the way. Around
// NCCL's ring, in its order and with its roundings. Or in two steps, each in rank order and in fp32: over the
// ranks of a host, which exchange slices for all ranks with the same place on their hosts, then over the
// hosts, between which a host's sum travels in the dtype of the gradients. So its order is fixed too, and it
// is rounded once more.
//
// [Note: Dtypes]
// Shard, gradient shard and `.grad` have the parameters' dtype. Gathered parameters may have a narrower one,
// in which they also travel: each rank converts its shard straight into its place in the gathered buffer.
// Or they travel in a narrower one and are widened when they have come: then the gather fills a buffer of its
// own, which is given back at once. Every rank rounds its own slice too, and one rank alone all of it, so
// that the values that a forward sees depend neither on the rank nor on how many there are. Gradients arrive
// in the dtype of the gathered parameters, wait and travel in a third one, and are summed in fp32 into the
// gradient shard, so that what is narrow on the wire is not narrow in the sum.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "shard/buffer_pool.h"
#include "shard/flat_layout.h"
#include "shard/host_lane.h"

namespace bmtrain {

/// See [Note: Ways of a reduction].
enum class ReduceWay : std::uint8_t { kDirect, kRing, kHosts };

struct BufferOptions {
  std::string label;                              // names the block in errors and records
  std::vector<at::Tensor> parameters;             // whose data become views of the shard
  std::vector<std::string> names;                 // theirs, for errors
  std::vector<std::vector<std::int64_t>> shapes;  // their full shapes
  std::shared_ptr<Communicator> gather_comm,
      reduce_comm;                             // of the group of ranks that share the buffer
  std::shared_ptr<Communicator> replica_comm;  // of the ranks with the same shard; may be null
  ReduceWay reduce_way;
  std::shared_ptr<Communicator> host_comm,  // by kHosts: of the ranks of this host, which follow each other
      hosts_comm;                           // and of those with the same place on their hosts
  std::shared_ptr<BufferPool> pool;
  at::ScalarType dtype;
  at::ScalarType gather_dtype;   // of parameters on the wire
  at::ScalarType compute_dtype;  // of the gathered parameters
  at::ScalarType reduce_dtype;   // of gradients that are not reduced yet, also on the wire
  c10::Device device;
  std::shared_ptr<HostLane> host_lane;  // null: the shards are on the device; see [Note: Shards on the host]
};

struct BufferSpec : BufferOptions {
  /// ValueError or TypeError for options that do not fit.
  explicit BufferSpec(BufferOptions options);

  FlatLayout layout;
  std::vector<LocalPart> local_parts;  // this rank's part of each parameter

  [[nodiscard]] std::size_t num_parameters() const { return parameters.size(); }
  /// How many ranks hold this rank's shard, see [Note: Replicas].
  [[nodiscard]] std::int64_t num_replicas() const { return replica_comm ? replica_comm->size() : 1; }
  /// Whether a reduction is more than one sum: over hosts, or over replicas.
  [[nodiscard]] bool sums_in_steps() const { return reduce_way == ReduceWay::kHosts || num_replicas() > 1; }
  /// Whether parameters travel in another dtype than the gathered ones have, see [Note: Dtypes].
  [[nodiscard]] bool widens() const { return gather_dtype != compute_dtype; }
  /// Where the shards are.
  [[nodiscard]] c10::Device home() const { return host_lane ? c10::Device(c10::kCPU) : device; }
  /// Whether the gathered buffer is another than the shard.
  [[nodiscard]] bool has_gathered_memory() const;
  [[nodiscard]] std::int64_t full_bytes(at::ScalarType of_dtype) const;
  /// Whether to use memory that the ranks share, if there is any, for a full buffer of this dtype.
  [[nodiscard]] bool is_worth_sharing(at::ScalarType of_dtype) const;

  /// Flat tensors: of a shard's size, on the device and where shards are; over a storage, memory of this
  /// size, and memory of the pool.
  [[nodiscard]] at::Tensor empty_shard(at::ScalarType of_dtype) const;
  [[nodiscard]] at::Tensor empty_at_home(at::ScalarType of_dtype) const;
  [[nodiscard]] at::Tensor full(const c10::Storage& storage, at::ScalarType of_dtype) const;
  [[nodiscard]] at::Tensor full_over(c10::DataPtr memory, at::ScalarType of_dtype) const;
  [[nodiscard]] at::Tensor full_from_pool(at::ScalarType of_dtype) const;
  /// The parameters in full shape, over the storage of a full buffer of this dtype.
  [[nodiscard]] std::vector<at::Tensor> full_views(const c10::Storage& storage,
                                                   at::ScalarType of_dtype) const;

  /// ValueError unless there is such a parameter; unless there is a flag for each.
  void check_index(std::size_t index) const;
  void check_flags(const char* name, const std::vector<bool>& flags) const;
};

/// For the buffers' own tensor operations: no history is recorded, and results may be used outside of
/// inference mode too.
struct PlainMode {
  c10::AutoGradMode no_grad{false};
  c10::InferenceMode normal_tensors{false};
};

/// A tensor over `storage` that may have no memory yet (see [Note: The gathered storage]).
[[nodiscard]] at::Tensor view_of_storage(const c10::Storage& storage, at::ScalarType dtype,
                                         std::int64_t offset, at::IntArrayRef shape);
/// A storage that has no memory yet.
[[nodiscard]] c10::Storage empty_storage(c10::Device device);
/// Puts memory under the storage, or takes it away: then reads are errors that begin with the label.
void put_memory(const c10::Storage& storage, c10::DataPtr memory, std::int64_t nbytes);
void take_memory(const c10::Storage& storage, const std::string& label);
/// Zeroes a flat tensor but for spans of it, given from the first to the last.
void zero_outside(const at::Tensor& flat, const std::vector<Span>& spans);

}  // namespace bmtrain
