// Reduction: the gradients of one backward, from autograd to the gradient shards. A ShardedBuffer has one
// object for each backward. What plain calls do not use is defined in reduction_ways.cpp, and in
// sum_ahead.cpp what is for ranks that read each other's gradients in place.
//
// One thread at a time: autograd's that runs the block's backward, or the one that waits for the reduction.
// While the gradients of one buffer land, that thread also sums what has come for others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "shard/shard_memory.h"

namespace bmtrain {

class TreeSum;

class Reduction {
 public:
  enum class Stage : std::uint8_t {
    kEnded,         // at first, and from finish() or cancel(): there is nothing to reduce
    kReceiving,     // from begin(): gradients land
    kFirstSum,      // from start(): they travel to the ranks that share the buffer, or to those of this host;
                    // where one rank has all of it, to its replicas
    kOverHosts,     // after kFirstSum: sums of hosts travel, see [Note: Ways of a reduction]
    kOverReplicas,  // after one of these two: sums travel, see [Note: Replicas]
    kSummed,        // after kFirstSum: the sum was made before finish(), see [Note: Sums ahead of their time]
  };

  Reduction(const BufferSpec& spec, GradientShard& shard) : spec_(spec), shard_(shard) {}

  [[nodiscard]] Stage stage() const { return stage_; }
  /// Bytes of whole gradients, slices and sums, but for the gradient shard.
  [[nodiscard]] std::int64_t num_bytes() const;

  /// Prepares to receive gradients of the parameters with `trains[i]`. `under_way`: reductions meanwhile, see
  /// sum_if_arrived(). `in_turn`: these are summed first, see [Note: One buffer of gradients].
  void begin(const std::vector<bool>& trains, std::vector<std::weak_ptr<Reduction>> under_way, bool in_turn);
  /// Prepares for one backward more, whose gradients add to those that begin() prepared for.
  void join(const std::vector<bool>& trains);
  /// Drops what such backwards have left for the parameters with `which[i]`. Returns whether others have
  /// gradients left; if none has, the reduction has ended.
  bool drop(const std::vector<bool>& which);
  void accumulate(std::size_t index, const at::Tensor& gradient);
  /// The place of a gradient for the caller to write, in full shape; undefined if something is there already,
  /// if it has another dtype, and outside of a backward.
  [[nodiscard]] at::Tensor take_place(std::size_t index, at::ScalarType dtype);

  /// Makes start() send each of these ranks, all that train the buffer, a piece of its slice, for a tree.
  void send_pieces(std::shared_ptr<Communicator> all_comm) { all_comm_ = std::move(all_comm); }
  /// Starts sending each rank its slice of the received gradient.
  void start();
  /// Ends the first sum and starts the next one, over hosts or replicas, if there is one: see [Note: Ways of
  /// a reduction] and [Note: Replicas]. Returns whether such a sum is under way now.
  bool continue_sum();
  /// Waits until everything that this rank sums has come; the sum is finish()'s.
  void await();
  /// Sums what has come without waiting, so that the ranks that sent it have their memory back earlier;
  /// returns whether there is nothing left to try.
  bool sum_if_arrived();
  /// Sums the slices in rank order into the gradient shard and the parameters' `.grad`; with a `tree`,
  /// appends them to it instead (see [Note: Virtual shards]).
  void finish(TreeSum* tree);
  /// Adds to the gradients what trees have summed of this backward and of others: 1-D, layout.partition()
  /// elements, fp32 or fp64. Each element is rounded once.
  void add(const at::Tensor& sum);
  /// Forgets a backward that failed.
  void cancel() noexcept;

 private:
  struct Place {
    at::Tensor view;  // in full shape, in the flat gradient
    bool accepts;     // in the last of the backwards
    bool has_gradient;
  };

  void take_gradient_memory();
  void sum_what_has_arrived();
  // Waits for what peers read in place, sums it, and gives up the memory in which this rank sent its part.
  void sum_in_turn();
  void add_replicas();
  // Otherwise than by slices that go straight to their ranks.
  void start_another_way();
  void exchange_in_host();
  void exchange_between_hosts();
  void exchange_with_all();
  // Waits for the sum under way and starts the next one; false if it is the last.
  bool start_next_sum();
  // What each rank sent in rank order, or their sum.
  [[nodiscard]] std::vector<at::Tensor> slices() const;
  void push_slices(TreeSum& tree) const;
  void let_go() noexcept;

  const BufferSpec& spec_;
  GradientShard& shard_;
  Stage stage_ = Stage::kEnded;
  std::vector<bool> trains_;   // in any of the backwards whose gradients are summed; stays for add()
  std::vector<Place> places_;  // of kReceiving
  std::vector<std::weak_ptr<Reduction>> under_way_;
  at::Tensor gradient_;                      // flat, full
  at::Tensor received_;                      // one slice per rank, or their sum
  std::shared_ptr<PeerSlices> peer_slices_;  // in its place, where ranks read each other's gradients
  std::shared_ptr<Communicator> all_comm_;   // null but for send_pieces()
  WorkPtr work_;
  std::unique_ptr<DeviceEvent> ready_;  // where no operation says when the gradients are there
  at::Tensor sum_;                      // of kSummed: the gradient shard, or a tensor of its own
};

}  // namespace bmtrain
