// A communicator of several hosts with equally many ranks each: Gloo between them, shared memory within.
//
// [Note: Gathers over hosts]
// A slice crosses to another host once. Ranks with the same number on their hosts exchange their slices, then
// the ranks of a host share what each of them has got: of W ranks, L on a host, a host receives the W - L
// slices that it lacks, where sends from each rank to each would bring it L times as many. An all_to_all has
// nothing to save, as every pair exchanges something else; its pairs within a host do not use the network.
// Nothing is summed on the way: sums stay in rank order, and losses those of one host.
//
// [Note: The second step]
// What ranks of a host share is posted when the operation is waited for, in the order of the operations:
// GlooLink carries on earlier ones before. So all ranks of a host post alike, in whatever order they wait.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/gloo/gloo_communicator.h"
#include "comm/shm/shm_communicator.h"

namespace bmtrain {

class HostsCommunicator final : public GlooCommunicator {
 public:
  /// `local` connects the ranks of this host, which follow each other in the whole group, and serves nobody
  /// else; for the rest see GlooCommunicator. ValueError if the hosts cannot all have as many ranks.
  HostsCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size,
                    std::string name, double timeout_seconds, std::shared_ptr<ShmCommunicator> local);
  ~HostsCommunicator() override;
  HostsCommunicator(const HostsCommunicator&) = delete;
  HostsCommunicator& operator=(const HostsCommunicator&) = delete;

  [[nodiscard]] std::string backend() const override { return "shm+gloo"; }

  [[nodiscard]] WorkPtr all_gather(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr all_to_all(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr send(at::Tensor tensor, int peer, const std::string& label) override;
  [[nodiscard]] WorkPtr recv(at::Tensor tensor, int peer, const std::string& label) override;
  void abort(const std::string& reason) override;
  void close() override;
  [[nodiscard]] std::int64_t bytes_copied() const override { return local_->bytes_copied(); }
  void reset_traffic() override;

 private:
  [[nodiscard]] bool is_local(int rank) const { return rank / local_->size() == host_; }
  // The operation that ends with the works of this host, which `share` posts.
  [[nodiscard]] WorkPtr finish(const GlooOperation& operation, GlooTransfers transfers,
                               std::function<std::vector<WorkPtr>()> share, std::function<void()> publish,
                               std::vector<at::Tensor> tensors);

  const std::shared_ptr<ShmCommunicator> local_;
  const int host_;  // number of this one
};

}  // namespace bmtrain
