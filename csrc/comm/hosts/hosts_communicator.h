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

#include "comm/gloo/gloo_communicator.h"
#include "comm/shm/shm_communicator.h"

namespace bmtrain {

class HostsCommunicator final : public GlooCommunicator {
 public:
  /// `local` connects the ranks of this host, which follow each other in the whole group, and serves nobody
  /// else; for the rest see GlooCommunicator. ValueError if the hosts cannot all have as many ranks.
  HostsCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size,
                    std::string name, double timeout_seconds, std::shared_ptr<ShmCommunicator> local);
  ~HostsCommunicator() override { local_->close(); }

  [[nodiscard]] std::string backend() const override { return "shm+gloo"; }

  void abort(const std::string& reason) override;
  void close() override;
  [[nodiscard]] std::int64_t bytes_copied() const override { return local_->bytes_copied(); }
  void reset_traffic() override;

 protected:
  [[nodiscard]] WorkPtr perform(const Call& call) override;

 private:
  [[nodiscard]] bool is_local(int rank) const { return rank / local_->size() == host_; }
  // A message to or from a rank of this host.
  [[nodiscard]] WorkPtr perform_locally(const Call& call);

  const std::shared_ptr<ShmCommunicator> local_;
  const int host_;  // number of this one
};

}  // namespace bmtrain
