// A communicator over Gloo: c10d's point-to-point messages carry the bytes, everything else is ours.
//
// [Note: Collectives from point-to-point messages]
// Gloo's own collectives copy through buffers, run in its worker threads and reduce in the order in which
// data arrives. Here a gather is a set of sends straight into the slices of the output, and a reduction is an
// all-to-all followed by one local pass in rank order (ordered_reduce.h): the same bytes on the wire, the
// same result on every run. Gloo's device thread moves the bytes; the local pass runs in wait(), on the
// caller's thread.
//
// [Note: Tags]
// Gloo matches messages of one pair by tag. A tag holds a kind, a sequence number and a fingerprint of
// operation, label and size: a receive never meets a message of another size, which Gloo would answer by
// terminating the process, nor the parameters of another block. Ranks that disagree wait until one of them
// reaches its time-out; its notice (see Link) says so.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/arguments.h"
#include "comm/communicator.h"
#include "comm/gloo/gloo_link.h"

namespace bmtrain {

class GlooCommunicator : public Communicator {
 public:
  /// `process_group` must have a Gloo backend for the CPU that serves nobody else. Operations give up after
  /// `timeout_seconds` in wait().
  GlooCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size, std::string name,
                   double timeout_seconds);
  ~GlooCommunicator() override;
  GlooCommunicator(const GlooCommunicator&) = delete;
  GlooCommunicator& operator=(const GlooCommunicator&) = delete;

  [[nodiscard]] int rank() const override { return link_->rank(); }
  [[nodiscard]] int size() const override { return link_->size(); }
  [[nodiscard]] const std::string& name() const override { return link_->name(); }
  [[nodiscard]] std::string backend() const override { return "gloo"; }

  [[nodiscard]] WorkPtr all_gather(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr all_to_all(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                       const std::string& label) override;
  [[nodiscard]] WorkPtr all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) override;
  [[nodiscard]] WorkPtr broadcast(at::Tensor tensor, int root, const std::string& label) override;
  [[nodiscard]] WorkPtr send(at::Tensor tensor, int peer, const std::string& label) override;
  [[nodiscard]] WorkPtr recv(at::Tensor tensor, int peer, const std::string& label) override;
  void barrier(const std::string& label) override;
  void abort(const std::string& reason) override;
  void close() override;
  [[nodiscard]] bool closed() const override;
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> traffic() const override;
  void reset_traffic() override;

 protected:
  struct Exchange {
    GlooOperation operation;
    at::Tensor from, to;  // on the host
    GlooTransfers transfers;
  };
  // Begins an all_to_all: checks and counts it, and posts what is exchanged with the ranks that `with` says.
  [[nodiscard]] Exchange post_exchange(const at::Tensor& output, const at::Tensor& input,
                                       const std::string& label, const std::function<bool(int)>& with);

  // Shared with the works, which may outlive the communicator.
  std::shared_ptr<GlooLink> link_;
  TrafficCounter traffic_;

 private:
  [[nodiscard]] WorkPtr all_reduce_small(const at::Tensor& tensor, ReduceOp op,
                                         const GlooOperation& operation, std::function<void()> publish);
  [[nodiscard]] WorkPtr all_reduce_large(const at::Tensor& tensor, ReduceOp op,
                                         const GlooOperation& operation, std::function<void()> publish);
};

}  // namespace bmtrain
