// A communicator over NCCL: collectives on flat buffers, in place where the caller's buffers lie so.
//
// Moves (gathers, all-to-all, broadcasts, messages) are of bytes, so they take every dtype. A reduce-scatter
// of 16-bit values is an all-to-all and one local sum, in fp32 and in rank order: a rank sends as many bytes
// as in NCCL's ring (though more of them to other hosts), with one rounding instead of one per rank, and the
// same result on every run. Other reductions are NCCL's own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl/nccl_link.h"
#include "comm/transport.h"

namespace bmtrain {

class NcclCommunicator final : public Transport {
 public:
  /// Collective over the `size` ranks that have the same `unique_id`.
  NcclCommunicator(std::shared_ptr<NcclLibrary> library, const std::string& unique_id, int rank, int size,
                   std::string name, c10::Device device, double timeout_seconds);

  /// A communicator of those ranks of this one that give the same `color`, where this rank becomes `rank` of
  /// `size`. Collective over this communicator; far cheaper than connecting anew.
  [[nodiscard]] std::shared_ptr<NcclCommunicator> split(int color, int rank, int size, std::string name);

  [[nodiscard]] std::string backend() const override { return "nccl"; }

  /// Operations between the two start together, so that opposite messages meet; Work::wait comes after the
  /// end.
  void begin_group() { link_->begin_group(); }
  void end_group() { link_->end_group(); }

  /// Looks for failures of operations that nobody waits for (errors that came later, time-outs), and aborts
  /// where it finds one. For a watchdog, every so often: cheap, never blocks.
  void poll() { link_->poll(); }

  /// How many peers an all_to_all exchanges with in one group of NCCL's: see [Note: Groups of an exchange].
  [[nodiscard]] int peers_per_group() const { return peers_per_group_; }
  void set_peers_per_group(int number) { peers_per_group_ = number; }

  [[nodiscard]] const std::shared_ptr<NcclLibrary>& library() const { return link_->options().library; }

  void forget_completed() override { link_->forget_completed(); }
  [[nodiscard]] bool settle(double seconds) override { return link_->wait_idle(seconds); }
  [[nodiscard]] std::string failure() const override {
    link_->poll();
    return link_->failure();
  }
  void abort(const std::string& reason) override { link_->abort(reason); }
  void close() override { link_->close(); }
  [[nodiscard]] bool closed() const override { return link_->closed(); }

 protected:
  [[nodiscard]] WorkPtr perform(const Call& call) override;

 private:
  explicit NcclCommunicator(std::shared_ptr<NcclLink> link);

  [[nodiscard]] WorkPtr reduce_scatter_in_order(const Call& call);
  [[nodiscard]] WorkPtr reduce_on_device(const Call& call);
  [[nodiscard]] WorkPtr move(const Call& call);
  [[nodiscard]] WorkPtr meet(const Call& call);
  [[nodiscard]] nccl::Type type_of(const char* op, const at::Tensor& tensor) const;
  // One for each group of NCCL's. Without `counts` the slices have equal sizes.
  [[nodiscard]] std::vector<NcclLink::Issue> exchange(const at::Tensor& output, const at::Tensor& input,
                                                      const SliceCounts* counts = nullptr) const;
  [[nodiscard]] WorkPtr submit(const Call& call, std::vector<at::Tensor> tensors,
                               std::vector<NcclLink::Issue> groups, std::function<void()> after = {});

  // Shared with the works, which may outlive the communicator.
  const std::shared_ptr<NcclLink> link_;
  int peers_per_group_ = 1024;
};

}  // namespace bmtrain
