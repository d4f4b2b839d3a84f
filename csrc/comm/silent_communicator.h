// A communicator that moves nothing: what a step costs without communication. For measurements only.
#pragma once

#include <memory>
#include <string>

#include "comm/arguments.h"
#include "comm/communicator.h"

namespace bmtrain {

/// Stands for another communicator: checks arguments, counts messages and lends memory as that one does.
/// Results keep whatever was in their memory; of what ranks add up in place each has its own part alone.
class SilentCommunicator final : public Communicator {
 public:
  explicit SilentCommunicator(std::shared_ptr<Communicator> replaced);

  [[nodiscard]] int rank() const override { return replaced_->rank(); }
  [[nodiscard]] int size() const override { return replaced_->size(); }
  [[nodiscard]] const std::string& name() const override { return replaced_->name(); }
  [[nodiscard]] std::string backend() const override { return "silent"; }

  [[nodiscard]] WorkPtr all_gather(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr all_to_all(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                       const std::string& label) override;
  [[nodiscard]] WorkPtr all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) override;
  [[nodiscard]] WorkPtr broadcast(at::Tensor tensor, int root, const std::string& label) override;
  [[nodiscard]] bool works_in_place() const override { return replaced_->works_in_place(); }
  [[nodiscard]] c10::DataPtr borrow_output(std::int64_t nbytes) override {
    return replaced_->borrow_output(nbytes);
  }
  void give_back_output(const void* data, std::int64_t nbytes) override {
    replaced_->give_back_output(data, nbytes);
  }
  [[nodiscard]] c10::DataPtr borrow_input(std::int64_t nbytes) override {
    return replaced_->borrow_input(nbytes);
  }
  [[nodiscard]] WorkPtr all_to_all_in_place(at::Tensor input, std::shared_ptr<PeerSlices>& slices,
                                            const std::string& label) override;
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

  const std::shared_ptr<Communicator> replaced_;
  TrafficCounter traffic_;
};

}  // namespace bmtrain
