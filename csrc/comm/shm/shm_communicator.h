// A communicator over shared memory, for ranks of one host.
//
// The collectives are those of the Gloo communicator: the same bytes, the same sums in rank order, the same
// numbers of operations in errors; only what carries the bytes differs (shm_link.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/arguments.h"
#include "comm/communicator.h"
#include "comm/shm/shm_link.h"

namespace bmtrain {

class ShmCommunicator final : public Communicator {
 public:
  /// See ShmLink. Operations give up after `timeout_seconds` in wait().
  ShmCommunicator(const std::vector<int>& files, std::vector<int> watches, int rank, int size,
                  std::string name, double timeout_seconds);
  ~ShmCommunicator() override;
  ShmCommunicator(const ShmCommunicator&) = delete;
  ShmCommunicator& operator=(const ShmCommunicator&) = delete;

  /// How large the memory file of each rank has to be.
  [[nodiscard]] static std::size_t segment_bytes(int size) { return ShmLink::segment_bytes(size); }

  [[nodiscard]] int rank() const override { return link_->rank(); }
  [[nodiscard]] int size() const override { return link_->size(); }
  [[nodiscard]] const std::string& name() const override { return link_->name(); }
  [[nodiscard]] std::string backend() const override { return "shm"; }

  [[nodiscard]] WorkPtr all_gather(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr all_to_all(at::Tensor output, at::Tensor input, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                       const std::string& label) override;
  [[nodiscard]] WorkPtr all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) override;
  [[nodiscard]] WorkPtr reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) override;
  [[nodiscard]] WorkPtr broadcast(at::Tensor tensor, int root, const std::string& label) override;
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
  [[nodiscard]] WorkPtr all_to_all_in_place(at::Tensor input, std::shared_ptr<PeerSlices>& slices,
                                            const std::string& label) override;
  [[nodiscard]] std::int64_t bytes_copied() const override { return link_->bytes_copied(); }
  [[nodiscard]] std::int64_t bytes_in_place() const override { return link_->bytes_in_place(); }
  [[nodiscard]] WorkPtr send(at::Tensor tensor, int peer, const std::string& label) override;
  [[nodiscard]] WorkPtr recv(at::Tensor tensor, int peer, const std::string& label) override;
  void barrier(const std::string& label) override;
  void abort(const std::string& reason) override { link_->abort(reason); }
  void close() override { link_->close(); }
  [[nodiscard]] bool closed() const override { return link_->closed(); }
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> traffic() const override {
    return traffic_.snapshot();
  }
  void reset_traffic() override {
    traffic_.reset();
    link_->reset_copied();
  }

 private:
  using Pieces = std::vector<ShmPiece>;

  // This rank's own slice, to its place among the others.
  void copy_slice(char* to, const char* from, std::int64_t bytes);
  [[nodiscard]] WorkPtr gather_in_place(const at::Tensor& output, const at::Tensor& input, int slot,
                                        const std::string& label);
  [[nodiscard]] ShmOperationPtr begin(const char* op, const std::string& label, std::int64_t bytes,
                                      int detail) const;
  [[nodiscard]] WorkPtr start(const ShmOperationPtr& operation, Pieces sends, Pieces receives,
                              std::int64_t wire_bytes, std::function<void()> publish = nullptr);
  [[nodiscard]] WorkPtr all_reduce_small(const ShmOperationPtr& operation, const at::Tensor& tensor,
                                         ReduceOp op, std::function<void()> publish);
  [[nodiscard]] WorkPtr all_reduce_large(const ShmOperationPtr& operation, const at::Tensor& tensor,
                                         ReduceOp op, std::function<void()> publish);
  // The receives that put the others' slices one after the other into `received`.
  [[nodiscard]] Pieces from_others(const at::Tensor& received, std::int64_t bytes) const;

  // Shared with the works, which may outlive the communicator.
  std::shared_ptr<ShmLink> link_;
  TrafficCounter traffic_;
};

}  // namespace bmtrain
