// The communicator of a group with one rank: every collective is a local copy, or nothing.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <string>

#include "comm/arguments.h"
#include "comm/communicator.h"

namespace bmtrain {

class SingleCommunicator final : public Communicator {
 public:
  explicit SingleCommunicator(std::string name);

  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::string backend() const override { return "single"; }

  [[nodiscard]] WorkPtr all_gather(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr all_to_all(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                       const std::string& label) override;
  [[nodiscard]] WorkPtr all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) override;
  [[nodiscard]] WorkPtr broadcast(at::Tensor tensor, int root, const std::string& label) override;
  /// A rank may send to itself: the message waits in a queue for its recv.
  [[nodiscard]] WorkPtr send(at::Tensor tensor, int peer, const std::string& label) override;
  /// Raises CommunicationError when nothing was sent: with one rank nobody else ever will.
  [[nodiscard]] WorkPtr recv(at::Tensor tensor, int peer, const std::string& label) override;
  void barrier(const std::string& label) override;
  void abort(const std::string& reason) override;
  void close() override;
  [[nodiscard]] bool closed() const override;
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> traffic() const override;
  void reset_traffic() override;

 private:
  // Raises unless the communicator is usable; counts the operation.
  void begin(const char* op);
  WorkPtr copy(const char* op, const at::Tensor& output, const at::Tensor& input);

  const std::string name_;
  TrafficCounter traffic_;
  mutable std::mutex mutex_;  // protects everything below
  bool closed_ = false;
  bool aborted_ = false;
  std::string reason_;
  std::deque<at::Tensor> mailbox_;
};

}  // namespace bmtrain
