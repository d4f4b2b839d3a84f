// A communicator over shared memory, for ranks of one host; what carries the bytes is ShmLink.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/exchange_communicator.h"
#include "comm/shm/shm_link.h"

namespace bmtrain {

class ShmCommunicator final : public ExchangeCommunicator {
 public:
  /// See ShmLink. Operations give up after `timeout_seconds` in wait().
  ShmCommunicator(const std::vector<int>& files, std::vector<int> watches, int rank, int size,
                  std::string name, double timeout_seconds);
  ~ShmCommunicator() override { link_->close(); }

  /// How large the memory file of each rank has to be.
  [[nodiscard]] static std::size_t segment_bytes(int size) { return ShmLink::segment_bytes(size); }

  [[nodiscard]] std::string backend() const override { return "shm"; }
  [[nodiscard]] bool works_in_place() const override { return true; }
  [[nodiscard]] c10::DataPtr borrow_output(std::int64_t nbytes) override {
    return link_->borrow_common(nbytes);
  }
  void give_back_output(const void* data, std::int64_t nbytes) override {
    link_->give_back_common(data, nbytes);
  }
  [[nodiscard]] c10::DataPtr borrow_input(std::int64_t nbytes) override { return link_->borrow_own(nbytes); }
  /// How long borrow_input() waits for peers to read what they have been given, in seconds.
  [[nodiscard]] double longest_wait() const;
  void set_longest_wait(double seconds);
  [[nodiscard]] std::int64_t bytes_copied() const override { return link_->bytes_copied(); }
  [[nodiscard]] std::int64_t bytes_in_place() const override { return link_->bytes_in_place(); }
  void abort(const std::string& reason) override { link_->abort(reason); }
  void close() override { link_->close(); }
  [[nodiscard]] bool closed() const override { return link_->closed(); }
  void reset_traffic() override;

 protected:
  [[nodiscard]] WorkPtr perform(const Call& call) override;
  [[nodiscard]] WorkPtr submit(Exchange exchange) override;
  void count_copied(std::int64_t bytes) override { link_->count_copied(bytes); }

 private:
  [[nodiscard]] WorkPtr gather_in_place(const Call& call);
  [[nodiscard]] WorkPtr exchange_in_place(const Call& call);
  [[nodiscard]] WorkPtr post(const ShmOperationPtr& operation);

  // Shared with the works, which may outlive the communicator.
  const std::shared_ptr<ShmLink> link_;
};

}  // namespace bmtrain
