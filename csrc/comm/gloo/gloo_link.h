// The connections of one group: posting messages, waiting for them, and what happens when one fails.
//
// [Note: Tags]
// Gloo matches messages of one pair by tag. A tag holds a kind, a sequence number and a fingerprint of
// operation, label and size: a receive never meets a message of another size, which Gloo would answer by
// terminating the process, nor the parameters of another block. Ranks that disagree wait until one of them
// reaches its time-out; the error names it.
//
// [Note: Abandoned operations]
// A work that is dropped before its end leaves messages that still read or write its tensors. The link keeps
// them until they are through. Gloo cannot be asked whether they are, and a wait that times out closes all
// connections. But a rank posts its operations in the order of the program: once something has come from a
// peer that belongs to a later operation, the messages of an earlier one with it end without anybody's help,
// and are waited for. This does not hold for phase 1 of an operation, which a peer may never post: that is
// kept until the link ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/exchange.h"
#include "comm/transport.h"
#include "common/thread_annotations.h"

namespace bmtrain {

struct GlooOperation : Exchange {
  int tag = 0;
  /// Posted before this one, if that is a message; its own number, if it is a collective.
  std::int64_t num_collectives_before = 0;
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
/// once, and every later operation fails with the first reason. Any thread may call it.
class GlooLink {
 public:
  GlooLink(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size, std::string name,
           double timeout_seconds);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  /// Numbers a collective, or a message: those to and those from a peer count apart. Raises StateError when
  /// closed, CommunicationError when aborted.
  void number(GlooOperation& operation) BMT_EXCLUDES(mutex_);
  /// Adds the message to or from `peer` to `transfers`; nothing is posted for zero bytes.
  void post(const GlooOperation& operation, const Piece& piece, int peer, bool is_send,
            GlooTransfers& transfers) BMT_EXCLUDES(mutex_);
  /// Blocks until all of them are through; on failure aborts the link and raises CommunicationError.
  void await(const GlooOperation& operation, const GlooTransfers& transfers) BMT_EXCLUDES(mutex_);

  void abort(const std::string& reason) BMT_EXCLUDES(mutex_);
  void close() BMT_EXCLUDES(mutex_);
  [[nodiscard]] bool closed() BMT_EXCLUDES(mutex_);

  /// Operations that post again in wait(): a wait for a later one carries these on first, so that ranks which
  /// wait in different orders do not wait for each other.
  void add_two_phase(std::int64_t sequence, std::weak_ptr<GlooWork> work) BMT_EXCLUDES(mutex_);
  void carry_on_before(std::int64_t sequence) BMT_EXCLUDES(mutex_, carrying_on_);

  struct Abandoned {
    GlooOperation operation;
    GlooTransfers transfers;
    int phase;
  };
  /// See [Note: Abandoned operations].
  void keep_abandoned(Abandoned abandoned) BMT_EXCLUDES(mutex_);

 private:
  using Clock = std::chrono::steady_clock;

  // How far a peer has come in the program, as far as completed messages show: the numbers below which it has
  // posted its part.
  struct Seen {
    std::int64_t collectives = 0;
    std::int64_t sends = 0;  // messages to it
    std::int64_t receives = 0;
  };
  struct Awaited {
    c10::intrusive_ptr<c10d::Work> work;
    Clock::time_point deadline;
  };

  [[nodiscard]] std::string describe(const GlooOperation& operation) const;
  // The backend, or an exception when closed or aborted.
  [[nodiscard]] c10::intrusive_ptr<c10d::Backend> usable(const GlooOperation& operation) BMT_EXCLUDES(mutex_);
  // `what` is what Gloo says of the failure.
  [[noreturn]] void fail(const GlooOperation& operation, const GlooTransfer& transfer,
                         const std::string& what) BMT_EXCLUDES(mutex_);
  void await_all(const GlooOperation& operation, const GlooTransfers& transfers) BMT_EXCLUDES(mutex_);
  // Waits for one transfer, as abort() can end it; raises what Gloo raises, and returns false if interrupted.
  [[nodiscard]] bool await_one(const GlooTransfer& transfer, Clock::time_point deadline) BMT_EXCLUDES(mutex_);
  [[nodiscard]] std::int64_t& seen_of(const GlooOperation& operation, const GlooTransfer& transfer)
      BMT_REQUIRES(mutex_);
  void note_arrival(const GlooOperation& operation, const GlooTransfers& transfers) BMT_EXCLUDES(mutex_);
  // Takes out those that end without anybody's help.
  [[nodiscard]] std::vector<Abandoned> take_ending() BMT_EXCLUDES(mutex_);
  // Closes all connections: every pending message of this rank and of its peers fails.
  void disconnect() BMT_EXCLUDES(mutex_);

  const int rank_;
  const int size_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;

  Mutex carrying_on_;  // held by the thread that carries on operations; taken before mutex_
  Mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_ BMT_GUARDED_BY(mutex_);
  c10::intrusive_ptr<c10d::Backend> backend_ BMT_GUARDED_BY(mutex_);
  Standing standing_ BMT_GUARDED_BY(mutex_);
  std::int64_t num_collectives_ BMT_GUARDED_BY(mutex_) = 0;
  std::vector<std::int64_t> sent_ BMT_GUARDED_BY(mutex_);      // messages, by peer
  std::vector<std::int64_t> received_ BMT_GUARDED_BY(mutex_);  // likewise
  std::vector<Seen> seen_ BMT_GUARDED_BY(mutex_);              // by peer
  std::map<std::int64_t, std::weak_ptr<GlooWork>> two_phase_ BMT_GUARDED_BY(mutex_);
  std::vector<Abandoned> abandoned_ BMT_GUARDED_BY(mutex_);
  // By a thread each, right now, and those whose time was up: the first of these closed all connections.
  std::vector<Awaited> awaited_ BMT_GUARDED_BY(mutex_);
};

}  // namespace bmtrain
