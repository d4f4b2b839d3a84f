// ShardedBuffer: the parameters of one block that share dtype and group, as one
// flat buffer cut into one shard per rank.
//
// It owns the shard, the gathered buffer, the gradient on its way to the
// shards, and the gradient shard. Parameters are views of these: of the shard
// between calls, of the gathered buffer while they are bound.
//
// [Note: The gathered storage]
// One storage object stands for the gathered buffer for the whole life of the
// group; gather() puts memory under it and release() takes the memory away.
// Everything that aliases it (the parameters' full views, the views that
// autograd saved in forward) becomes valid again with the next gather, so
// nothing keeps gathered memory alive between forward and backward, and no
// saved tensor needs rewriting. With one rank the gathered buffer is the shard
// itself.
//
// [Note: Parameters on the meta device]
// A parameter made on the meta device has its place in the layout, but no data until make_shard(). The shard
// has no memory until the first of its parameters has data.
//
// [Note: Gradient sinks]
// While bound, each parameter's gradient accumulator is a node of ours that
// writes the gradient straight into the flat gradient buffer: it lands once, at
// its final place, and `.grad` never holds a full-size tensor. Unbinding
// restores the accumulator that belongs to the shard's shape, so a loss may use
// the shard and the full parameter together.
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

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "shard/buffer_pool.h"
#include "shard/flat_layout.h"
#include "shard/gradient_sink.h"
#include "shard/tree_sum.h"

namespace bmtrain {

class ShardedBuffer : public std::enable_shared_from_this<ShardedBuffer> {
 public:
  /// Sharded between calls, kGathering from start_gather to finish_gather,
  /// kGathered until release.
  enum class State : std::uint8_t { kSharded, kGathering, kGathered };

  /// See [Note: Ways of a reduction].
  enum class ReduceWay : std::uint8_t { kDirect, kRing, kHosts };

  struct Options {
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
  };

  explicit ShardedBuffer(Options options);
  ~ShardedBuffer();
  ShardedBuffer(const ShardedBuffer&) = delete;
  ShardedBuffer& operator=(const ShardedBuffer&) = delete;

  [[nodiscard]] const FlatLayout& layout() const { return layout_; }
  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool is_bound() const { return bound_; }
  /// How many ranks hold this rank's shard, see [Note: Replicas].
  [[nodiscard]] std::int64_t num_replicas() const {
    return options_.replica_comm ? options_.replica_comm->size() : 1;
  }
  [[nodiscard]] const std::vector<at::Tensor>& parameters() const { return options_.parameters; }
  /// The flat shard: 1-D, layout().partition() elements.
  [[nodiscard]] at::Tensor shard() const { return shard_; }
  /// This rank's part of parameter `index`: a 1-D view of the shard.
  [[nodiscard]] at::Tensor local_view(std::size_t index) const;
  /// The flat gradient shard; undefined before its first need, and from a call on when no gradient uses it.
  [[nodiscard]] at::Tensor gradient_shard() const { return gradient_shard_; }
  /// Memory of the full parameters, also on their way, 0 while there is none but the shard; and of whole
  /// gradients and slices.
  [[nodiscard]] std::int64_t gathered_bytes() const;
  [[nodiscard]] std::int64_t unreduced_bytes() const;
  /// How many tensors this group knows of refer to the memory of its shard, and to that of its gradient
  /// shard.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> num_references() const;
  /// Changes whenever one of the parameters is modified in place.
  [[nodiscard]] std::int64_t version() const;
  /// Which of the parameters require grad now.
  [[nodiscard]] std::vector<bool> requires_grad() const;
  /// Whether `tensor` lies in the gathered buffer.
  [[nodiscard]] bool owns_storage(const at::Tensor& tensor) const;

  /// Makes every parameter's data the view of the shard, but those on the meta device.
  void attach();
  /// Gives a parameter on the meta device its data: the view of the shard, zeros.
  void make_shard(std::size_t index);

  /// Takes over what was put in a parameter's place by `parameter.data = tensor`: a shard, or a full tensor
  /// of which this rank's part is kept. Returns whether there was anything; then what is gathered is out of
  /// date.
  bool adopt_data();

  /// `in_place`: where ranks share memory, in a buffer that they write together. The gathers and releases of
  /// groups for which it is set must follow each other alike on all ranks.
  void start_gather(bool in_place = false);
  /// Blocks until the gathered buffer is complete (on CUDA: the current stream
  /// waits).
  void finish_gather();
  /// Gives the gathered memory back. The parameters must not be bound.
  void release();

  /// Parameters become their full tensors. The buffer must be gathered.
  void bind();
  /// Parameters become their shards again. Never fails.
  void unbind() noexcept;

  /// Prepares to receive gradients of the parameters with `trains[i]`. `under_way`: groups whose gradients
  /// are on their way meanwhile, see sum_if_arrived().
  void begin_backward(const std::vector<bool>& trains,
                      const std::vector<std::shared_ptr<ShardedBuffer>>& under_way = {});
  /// Prepares for one backward more, whose gradients add to those that begin_backward() prepared for.
  void join_backward(const std::vector<bool>& trains);
  /// Drops what such backwards have left for the parameters with `which[i]`. Returns whether others have
  /// gradients left; if none has, nothing is to be reduced.
  bool drop_gradients(const std::vector<bool>& which);
  void accumulate(std::size_t index, const at::Tensor& gradient);
  /// The place of a gradient for the caller to write, in full shape; undefined if something is there already,
  /// if it has another dtype, and outside of a backward.
  [[nodiscard]] at::Tensor take_place(std::size_t index, at::ScalarType dtype);
  /// Starts sending each rank its slice of the received gradient.
  void start_reduce();
  /// Ends the first sum and starts the next one, over hosts or replicas, if there is one: see [Note: Ways of
  /// a reduction] and [Note: Replicas]. Returns whether such a sum is under way now.
  bool continue_reduce();
  /// Waits until everything that this rank sums has come; the sum is finish_reduce()'s.
  void await_reduce();
  /// Sums what has come without waiting, so that the ranks that sent it have their memory back earlier;
  /// returns whether there is nothing left to try. See [Note: Sums ahead of their time].
  bool sum_if_arrived();
  /// Sums the slices in rank order into the gradient shard and the parameters'
  /// `.grad`; with a `tree`, appends them to it instead (see [Note: Virtual shards]).
  void finish_reduce(TreeSum* tree = nullptr);
  /// Adds to the gradients what trees have summed: 1-D, layout().partition() elements, fp32 or fp64. Each
  /// element is rounded once.
  void add_gradient(const at::Tensor& sum);
  /// Functions, by any key, that see the gradient of parameter `index` before its reduction, and may replace
  /// it.
  void set_hooks(std::size_t index, PyObject* hooks);
  /// Forgets a backward that failed.
  void cancel_backward() noexcept;

 private:
  enum class GradientMode : std::uint8_t { kSkip, kWrite, kAccumulate, kForeign };
  // What reduce_work_ is for: the ranks that share the buffer (or those of this host), the sums of the hosts,
  // or the sums of the replicas.
  enum class Sum : std::uint8_t { kOverRanks, kOverHosts, kOverReplicas };

  void allocate();
  void check_data() const;
  void check_index(std::size_t index) const;
  void check_flags(const char* name, const std::vector<bool>& flags) const;
  // Whether the gathered buffer is another than the shard.
  [[nodiscard]] bool has_own_buffer() const;
  // Whether parameters travel in another dtype than the gathered ones have, see [Note: Dtypes].
  [[nodiscard]] bool widens() const;
  void await_gather();
  void widen();
  void give_back_wire();
  [[nodiscard]] std::int64_t full_bytes(at::ScalarType dtype) const;
  // This rank's part of what travels: the shard, or in another dtype its copy at its place in the buffer.
  [[nodiscard]] at::Tensor gather_input() const;
  void make_sinks();
  // Frees the gradient shard once no `.grad` uses it, so that it is not there while activations are.
  void drop_unused_gradient();
  void make_gradient_shard();
  [[nodiscard]] bool is_attached(std::size_t index) const;
  // Sums what has arrived of the groups that are under way.
  void sum_what_has_arrived();
  void zero_untouched();
  [[nodiscard]] bool is_reducing() const { return received_.defined() || peer_slices_; }
  // What each rank sent in rank order, or their sum.
  [[nodiscard]] std::vector<at::Tensor> received_slices() const;
  [[nodiscard]] at::Tensor full_buffer();
  void start_sum_over_host();
  void start_sum_over_hosts();
  void start_sum_over_replicas();
  // Waits for the sum under way and starts the next one; false if it is the last.
  bool start_next_sum();
  void sum_into_shard(const std::vector<at::Tensor>& slices);
  void end_reduction() noexcept;
  // Memory for the shard, without bytes yet, and views of it; where nothing is gathered also the full ones.
  void make_shard_memory();
  void make_gathered_views(const c10::Storage& storage);
  // Goes on with a copy if users hold views of the shard, which is about to be written to.
  void leave_memory_to_others();
  // Whether to use memory that the ranks share, if there is any.
  [[nodiscard]] bool is_worth_sharing(at::ScalarType dtype) const;
  [[nodiscard]] GradientMode gradient_mode(std::size_t index) const;
  [[nodiscard]] bool writes_all_gradients() const;
  void add_to_strangers();
  void reduce_run(const std::vector<at::Tensor>& slices, std::size_t first, std::size_t last,
                  GradientMode mode);
  void publish_gradients();

  Options options_;
  FlatLayout layout_;
  State state_ = State::kSharded;
  bool bound_ = false;

  at::Tensor shard_;
  std::vector<LocalPart> local_parts_;
  std::vector<at::Tensor> local_views_;
  at::Tensor full_;                     // flat, over the gathered storage
  std::vector<at::Tensor> full_views_;  // in full shape, over the gathered storage
  at::Tensor wire_;                     // flat, what a gather fills: `full_` unless that is widened from it
  bool is_borrowed_ = false;            // the memory of `wire_` is one that the ranks share
  WorkPtr gather_work_;

  std::vector<SinkPtr> sinks_;
  std::vector<NodePtr> shard_accumulators_;  // while bound: what unbind() restores

  std::vector<bool> trains_;   // in any of the backwards whose gradients are summed
  std::vector<bool> accepts_;  // in the last of them
  std::vector<bool> touched_;
  at::Tensor gradient_;  // flat, full; only during a backward
  std::vector<at::Tensor> gradient_views_;
  at::Tensor received_;                      // one slice per rank, or their sum; only during a reduction
  std::shared_ptr<PeerSlices> peer_slices_;  // in its place, where ranks read each other's gradients
  WorkPtr reduce_work_;
  Sum sum_ = Sum::kOverRanks;
  bool is_summed_ = false;  // ahead of finish_reduce()
  at::Tensor sum_ahead_;    // then, unless the gradient shard has it
  std::vector<std::weak_ptr<ShardedBuffer>> under_way_;
  at::Tensor gradient_shard_;
};

}  // namespace bmtrain
