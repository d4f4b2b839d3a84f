// A communicator that moves nothing: what a step costs without communication. For measurements only.
#pragma once

#include <memory>
#include <string>

#include "comm/transport.h"

namespace bmtrain {

/// Stands for another communicator: checks arguments, counts messages and lends memory as that one does.
/// Results keep whatever was in their memory; of what ranks add up in place each has its own part alone.
class SilentCommunicator final : public Transport {
 public:
  explicit SilentCommunicator(const std::shared_ptr<Communicator>& replaced);

  [[nodiscard]] std::string backend() const override { return "silent"; }
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
  void abort(const std::string& /*reason*/) override {}
  void close() override {}
  [[nodiscard]] bool closed() const override { return false; }

 protected:
  [[nodiscard]] WorkPtr perform(const Call& call) override;
  [[nodiscard]] std::int64_t wire_bytes(const Call& /*call*/) const override { return 0; }

 private:
  const std::shared_ptr<Communicator> replaced_;
};

}  // namespace bmtrain
