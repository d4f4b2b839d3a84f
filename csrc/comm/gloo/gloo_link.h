// The connections of one group: posting messages, waiting for them, and what happens when one fails.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace bmtrain {

/// One operation as it was posted: enough to find its messages and to name it in an error.
struct GlooOperation {
  const char* op = "";
  std::string label;
  std::int64_t sequence = 0;
  std::int64_t bytes = 0;
  int tag = 0;
};

/// One message under way. The memory it reads or writes belongs to the operation.
struct GlooTransfer {
  c10::intrusive_ptr<c10d::Work> work;
  int peer = 0;
  bool is_send = false;
};
using GlooTransfers = std::vector<GlooTransfer>;

class GlooWork;

/// After the first failure the link is aborted: its connections close, so that the other ranks learn of it at
/// once, and every later operation fails with the first reason.
class GlooLink {
 public:
  GlooLink(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size, std::string name,
           double timeout_seconds);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const std::string& name() const { return name_; }

  /// Numbers a collective. Raises StateError when closed, CommunicationError when aborted. `detail` is
  /// anything that the ranks must agree on besides operation and size (root, dtype).
  [[nodiscard]] GlooOperation begin(const char* op, const std::string& label, std::int64_t bytes, int detail);
  /// Numbers a message between this rank and `peer`; sends and receives count apart.
  [[nodiscard]] GlooOperation begin_message(bool is_send, int peer, const std::string& label,
                                            std::int64_t bytes);

  /// Adds a message to `transfers`; nothing is posted for zero bytes.
  void post_send(const GlooOperation& operation, const void* data, std::int64_t bytes, int peer,
                 GlooTransfers& transfers);
  void post_recv(const GlooOperation& operation, void* data, std::int64_t bytes, int peer,
                 GlooTransfers& transfers);

  /// Blocks until all of them are through; on failure aborts the link and raises CommunicationError.
  void await(const GlooOperation& operation, GlooTransfers& transfers);

  void abort(const std::string& reason);
  void close();
  [[nodiscard]] bool closed();

  /// Operations that post again in wait(): a wait for a later one carries these on first, so that ranks which
  /// wait in different orders do not wait for each other.
  void add_two_step(std::int64_t sequence, std::weak_ptr<GlooWork> work);
  void carry_on_before(std::int64_t sequence);

  /// Keeps what an operation that nobody waited for still reads or writes.
  void keep_abandoned(GlooTransfers transfers, std::vector<at::Tensor> tensors);

 private:
  [[nodiscard]] std::string describe(const GlooOperation& operation) const;
  // The backend, or an exception when closed or aborted.
  [[nodiscard]] c10::intrusive_ptr<c10d::Backend> usable(const GlooOperation& operation);
  [[noreturn]] void fail(const GlooOperation& operation, const GlooTransfer& transfer,
                         const std::string& what);
  // Waits for one transfer, as abort() can end it.
  bool await_one(const GlooTransfer& transfer, std::chrono::milliseconds patience);
  // Closes all connections: every pending message of this rank and of its peers fails.
  void disconnect();

  const int rank_;
  const int size_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;

  std::mutex carrying_on_;  // held by whoever carries on operations; taken before mutex_
  std::mutex mutex_;        // protects everything below
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  bool closed_ = false;
  bool aborted_ = false;
  std::string reason_;
  std::int64_t sequence_ = 0;
  std::vector<std::int64_t> sent_;
  std::vector<std::int64_t> received_;
  std::map<std::int64_t, std::weak_ptr<GlooWork>> two_step_;
  std::vector<std::pair<GlooTransfers, std::vector<at::Tensor>>> abandoned_;
  std::vector<c10::intrusive_ptr<c10d::Work>> awaited_;  // by a thread each, right now
};

}  // namespace bmtrain
