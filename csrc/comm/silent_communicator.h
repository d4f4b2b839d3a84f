// A communicator that moves nothing: what a step costs without communication. For measurements only.
#pragma once

#include <string>

#include "comm/arguments.h"
#include "comm/communicator.h"

namespace bmtrain {

/// Checks arguments and counts messages as the others do; results keep whatever was in their memory.
class SilentCommunicator final : public Communicator {
 public:
  SilentCommunicator(int rank, int size, std::string name);

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::string backend() const override { return "silent"; }

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
  [[nodiscard]] bool closed() const override { return false; }
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> traffic() const override;
  void reset_traffic() override;

 private:
  WorkPtr done(const char* op);

  const int rank_;
  const int size_;
  const std::string name_;
  TrafficCounter traffic_;
};

}  // namespace bmtrain
