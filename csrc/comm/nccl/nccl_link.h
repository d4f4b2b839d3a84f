// One NCCL communicator and its stream: from connecting to an end that never hangs.
//
// [Note: Order on the device]
// A communicator has a stream of its own. An operation waits there for what the caller's stream had queued
// when it was submitted, and Work::wait makes the caller's stream wait for the operation: the host waits for
// neither. So gathers, reductions and computation overlap where their data allow, whatever stream the user
// computes on.
//
// [Note: Memory of an operation under way]
// torch's allocator reuses freed memory in the order of the stream it was allocated on. After a wait on that
// stream everything is in order; until then the operation holds its tensors, and callers drop them once its
// event has happened.
//
// [Note: Calls that do not block]
// Communicators are non-blocking: a call that would wait for other ranks (connecting, the first operation
// with a peer) returns "in progress", and we ask until it is through, failed, aborted or late. So the
// time-out holds for calls that NCCL itself would block in.
//
// [Note: Operations that an abort ends]
// Abort makes kernels leave that wait in vain, so that their events happen, over data that never came. An
// operation counts as complete only if that was seen before. A close that takes too long ends like that too.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.h"
#include "common/device_runtime.h"
#include "common/thread_annotations.h"

namespace bmtrain {

using NcclClock = std::chrono::steady_clock;

struct NcclOperation {
  const char* op;
  std::string label;
  std::uint64_t sequence;
  std::int64_t bytes;
  std::int64_t issue_stream;          // of the caller
  NcclClock::time_point started;      // or when the one before it was seen to be over
  std::shared_ptr<DeviceEvent> done;  // nullptr inside a group
  std::vector<at::Tensor> tensors;    // protected by the link's mutex, like `started` and `done`
  bool is_over = false;               // seen to be complete, while its communicator was well; protected too
};
using NcclOperationPtr = std::shared_ptr<NcclOperation>;

class NcclLink final : public NcclMember {
 public:
  struct Options {
    std::shared_ptr<NcclLibrary> library;
    int rank;
    int size;
    std::string name;
    c10::Device device;
    double timeout_seconds;
  };
  using Issue = std::function<nccl::Result(nccl::Comm, nccl::Stream)>;

  /// Meets the other ranks. CommunicationError if that fails or takes longer than the time-out.
  static std::shared_ptr<NcclLink> connect(Options options, const std::string& unique_id);
  /// A communicator of those ranks of this one that give the same `color`; their ranks are ordered by `key`.
  /// The host waits for the operations of this one.
  [[nodiscard]] std::shared_ptr<NcclLink> split(int color, int key, Options options);
  ~NcclLink() override;
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const nccl::Functions& call() const { return options_.library->call(); }

  /// Puts NCCL calls into the stream, those of each of `groups` as one group of NCCL's, then `after` (tensor
  /// operations; may be empty).
  [[nodiscard]] NcclOperationPtr submit(const char* op, const std::string& label, std::int64_t bytes,
                                        std::vector<at::Tensor> tensors, std::vector<Issue> groups,
                                        std::function<void()> after = {});
  /// Until the matching end, operations are collected; then they start as one. Nestable.
  void begin_group();
  void end_group();

  /// The caller's stream waits for the operation.
  void wait(NcclOperation& operation);
  void wait_on_host(NcclOperation& operation);
  [[nodiscard]] bool is_complete(NcclOperation& operation);
  /// Drops operations that have completed: afterwards nobody asks for their events.
  void forget_completed();
  /// Waits for operations under way, or, after close(), for the end; false if that takes longer.
  [[nodiscard]] bool wait_idle(double seconds);
  /// Why it was aborted; empty if it was not.
  [[nodiscard]] std::string failure() const { return aborted_ ? reason() : std::string(); }

  /// Looks for errors and time-outs of operations under way; aborts all communicators where it finds one.
  void poll() override;
  void abort(const std::string& reason) override;
  [[nodiscard]] bool is_over() const override { return has_ended(); }
  void close();
  [[nodiscard]] bool closed() const { return closed_; }

 private:
  struct Handle;  // what outlives the link until NCCL has let go
  struct Entry {
    NcclOperationPtr operation;
    std::vector<Issue> groups;
    std::function<void()> after;
  };

  explicit NcclLink(Options options);
  void check_usable(const char* op) const;
  [[nodiscard]] std::string describe(const char* op) const;
  [[nodiscard]] std::string describe(const NcclOperation& operation) const;
  [[nodiscard]] bool has_ended() const { return closed_ || aborted_; }
  [[nodiscard]] std::string reason() const;
  [[nodiscard]] std::shared_future<void> ending() const;
  [[noreturn]] void fail(const std::string& message);
  void check(nccl::Result result, const std::string& what);
  void settle(const std::string& what, nccl::Comm& comm);
  void launch(std::vector<Entry> batch);
  void issue_group(const std::vector<Entry>& batch, std::size_t group, nccl::Stream stream,
                   const std::string& what);
  [[nodiscard]] std::string find_failure();
  void wait_for_pending();
  // Ends the communicator, in a thread of its own.
  void take_down(bool gracefully) BMT_EXCLUDES(reason_mutex_);

  const Options options_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  const std::int64_t stream_;
  const std::shared_ptr<Handle> handle_;

  std::atomic<bool> aborted_ = false;
  std::atomic<bool> closed_ = false;
  mutable Mutex reason_mutex_;
  std::string reason_ BMT_GUARDED_BY(reason_mutex_);
  std::shared_future<void> ended_ BMT_GUARDED_BY(reason_mutex_);

  // Protected by the handle's mutex, as everything that calls NCCL is.
  std::uint64_t sequence_ = 0;
  int group_depth_ = 0;
  std::vector<Entry> group_;
};

}  // namespace bmtrain
