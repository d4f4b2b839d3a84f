#include "comm/nccl/nccl_link.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/nccl/nccl_handle.h"
#include "common/check.h"

namespace bmtrain {
namespace {

using nccl::Result;

constexpr std::chrono::milliseconds kAskLimit{200};

NcclClock::duration seconds(double value) {
  return std::chrono::duration_cast<NcclClock::duration>(std::chrono::duration<double>(value));
}

nccl::UniqueId unique_id_of(const std::string& bytes) {
  BMT_CHECK(ValueError, bytes.size() == nccl::kUniqueIdBytes, "unique_id: expected ", nccl::kUniqueIdBytes,
            " bytes, got ", bytes.size());
  nccl::UniqueId id = {};
  std::memcpy(id.bytes, bytes.data(), nccl::kUniqueIdBytes);
  return id;
}

}  // namespace

NcclLink::NcclLink(Options options)
    : options_(std::move(options)),
      runtime_(device_runtime(options_.device)),
      stream_(runtime_->make_stream()),
      handle_(std::make_shared<Handle>(options_.library)) {
  BMT_CHECK(ValueError, options_.size >= 1 && 0 <= options_.rank && options_.rank < options_.size,
            "NCCL group \"", options_.name, "\": expected 0 <= rank < size, got rank ", options_.rank, " of ",
            options_.size);
  BMT_CHECK(ValueError, options_.timeout_seconds > 0, "timeout_seconds: expected more than 0, got ",
            options_.timeout_seconds);
}

std::shared_ptr<NcclLink> NcclLink::connect(Options options, const std::string& unique_id) {
  const nccl::UniqueId id = unique_id_of(unique_id);
  const std::shared_ptr<NcclLink> link(new NcclLink(std::move(options)));
  link->options_.library->add(link);
  const c10::DeviceGuard guard(link->options_.device);
  const std::string what = link->describe("connecting");
  const std::unique_lock lock(link->handle_->mutex);
  nccl::Config config;
  nccl::Comm& comm = link->handle_->comm;
  link->check(link->call().CommInitRankConfig(&comm, link->options_.size, id, link->options_.rank, &config),
              what);
  link->settle(what, comm);
  return link;
}

std::shared_ptr<NcclLink> NcclLink::split(int color, int key, Options options) {
  const std::shared_ptr<NcclLink> link(new NcclLink(std::move(options)));
  link->options_.library->add(link);
  const c10::DeviceGuard guard(options_.device);
  const std::string what = describe("splitting");
  // NCCL splits no communicator that has operations under way: ranks might wait for each other.
  wait_for_pending();
  const std::unique_lock lock(handle_->mutex);
  check_usable("splitting");
  const std::unique_lock part_lock(link->handle_->mutex);
  handle_->part = link->handle_;
  // Whether it shared this one's connections, the configuration of this one would say: then they could not
  // overlap.
  nccl::Config config;
  nccl::Comm& comm = link->handle_->comm;
  check(call().CommSplit(handle_->comm, color, key, &comm, &config), what);
  settle(what, handle_->comm);
  link->settle(link->describe("connecting"), comm);
  handle_->part = nullptr;
  return link;
}

NcclLink::~NcclLink() {
  close();
  if (ending().wait_for(kTakedownLimit) != std::future_status::ready) {
    return;  // NCCL may still use the tensors: they stay with the thread that ends it
  }
  // Dropped here, not by that thread: a tensor that Python knows needs the interpreter's lock, and whoever
  // destroys us may hold it.
  std::deque<NcclOperationPtr> pending;
  std::vector<NcclOperationPtr> launching;
  std::vector<std::vector<at::Tensor>> over;
  const std::unique_lock lock(handle_->mutex);
  pending.swap(handle_->pending);
  launching.swap(handle_->launching);
  over.swap(handle_->over);
  launching.insert(launching.end(), pending.begin(), pending.end());
  for (const NcclOperationPtr& operation : launching) {  // whoever follows one holds it
    over.push_back(std::exchange(operation->tensors, {}));
  }
}

std::string NcclLink::describe(const char* op) const {
  return detail::join(op, " on group \"", options_.name, "\", rank ", options_.rank, " of ", options_.size,
                      " (nccl)");
}

std::string NcclLink::describe(const NcclOperation& operation) const {
  const std::string serves = operation.label.empty() ? "" : " for " + operation.label;
  return detail::join(describe(operation.op), serves, ", operation ", operation.sequence, ", ",
                      operation.bytes, " bytes");
}

std::string NcclLink::reason() const {
  const Lock lock(reason_mutex_);
  return reason_;
}

std::shared_future<void> NcclLink::ending() const {
  const Lock lock(reason_mutex_);
  return ended_;
}

void NcclLink::check_usable(const char* op) const {
  BMT_CHECK(CommunicationError, !aborted_, describe(op), ": the communicator was aborted: ", reason());
  BMT_CHECK(StateError, !closed_, describe(op), ": the communicator is closed");
}

void NcclLink::fail(const std::string& message) {
  options_.library->abort_all(message);
  throw CommunicationError(message);
}

void NcclLink::check(Result result, const std::string& what) {
  if (nccl::is_error(result)) {
    fail(what + ": " + options_.library->explain(result));
  }
}

// See [Note: Calls that do not block]. A communicator made by a split may be there only some time later.
void NcclLink::settle(const std::string& what, nccl::Comm& comm) {
  const auto deadline = NcclClock::now() + seconds(options_.timeout_seconds);
  Pause pause;
  while (true) {
    Result state = Result::kInProgress;
    if (nccl::Comm const made = std::atomic_ref(comm).load(); made != nullptr) {
      check(call().CommGetAsyncError(made, &state), what);
    }
    if (state == Result::kSuccess) {
      return;
    }
    check(state, what);
    BMT_CHECK(CommunicationError, !has_ended(), what, ": the communicator was aborted: ", reason());
    if (NcclClock::now() > deadline) {
      fail(detail::join(what, ": not all ranks took part within ", options_.timeout_seconds, " s"));
    }
    pause();
  }
}

NcclOperationPtr NcclLink::submit(const char* op, const std::string& label, std::int64_t bytes,
                                  std::vector<at::Tensor> tensors, std::vector<Issue> groups,
                                  std::function<void()> after) {
  std::vector<std::vector<at::Tensor>> over;  // dropped after the lock is released
  const std::unique_lock lock(handle_->mutex);
  check_usable(op);
  const auto operation =
      std::make_shared<NcclOperation>(NcclOperation{op, label, ++sequence_, bytes, runtime_->current_stream(),
                                                    NcclClock::now(), nullptr, std::move(tensors)});
  Entry entry{operation, std::move(groups), std::move(after)};
  if (group_depth_ > 0) {
    group_.push_back(std::move(entry));
    return operation;
  }
  handle_->retire();
  over.swap(handle_->over);
  std::vector<Entry> batch;
  batch.push_back(std::move(entry));
  launch(std::move(batch));
  return operation;
}

void NcclLink::launch(std::vector<Entry> batch) {
  const NcclOperation& first = *batch.front().operation;
  const std::string what = describe(first);
  runtime_->mark(runtime_->current_stream())->block(stream_);
  nccl::Stream const stream = runtime_->native_handle(stream_);
  for (const Entry& entry : batch) {
    handle_->launching.push_back(entry.operation);
  }
  std::size_t num_groups = 0;
  for (const Entry& entry : batch) {
    num_groups = std::max(num_groups, entry.groups.size());
  }
  for (std::size_t group = 0; group < num_groups; ++group) {
    issue_group(batch, group, stream, what);
  }
  for (const Entry& entry : batch) {
    if (entry.after) {
      runtime_->run_on(stream_, entry.after);
    }
  }
  const std::shared_ptr<DeviceEvent> done = runtime_->mark(stream_);
  for (const Entry& entry : batch) {
    entry.operation->done = done;
    handle_->pending.push_back(entry.operation);
  }
  handle_->launching.resize(handle_->launching.size() - batch.size());
}

void NcclLink::issue_group(const std::vector<Entry>& batch, std::size_t group, nccl::Stream stream,
                           const std::string& what) {
  check(call().GroupStart(), what);
  Result result = Result::kSuccess;
  for (const Entry& entry : batch) {
    if (group < entry.groups.size() && !nccl::is_error(result)) {
      result = entry.groups[group](handle_->comm, stream);
    }
  }
  const Result closing = call().GroupEnd();  // even after an error: NCCL counts starts and ends of a thread
  check(result, what);
  check(closing, what);
  settle(what, handle_->comm);
}

void NcclLink::begin_group() {
  const std::unique_lock lock(handle_->mutex);
  ++group_depth_;
}

void NcclLink::end_group() {
  const std::unique_lock lock(handle_->mutex);
  BMT_CHECK(StateError, group_depth_ > 0, describe("group end"), ": no group was begun");
  if (--group_depth_ > 0) {
    return;
  }
  std::vector<Entry> batch = std::exchange(group_, {});
  if (!batch.empty()) {
    check_usable("group end");
    launch(std::move(batch));
  }
}

void NcclLink::wait(NcclOperation& operation) {
  std::vector<at::Tensor> dropped;
  const std::unique_lock lock(handle_->mutex);
  BMT_CHECK(CommunicationError, !(aborted_ || handle_->is_cut) || operation.is_over, describe(operation),
            ": the communicator was ", aborted_ ? "aborted: " + reason() : "closed before this had ended");
  BMT_CHECK(StateError, operation.done, describe(operation), ": its group has not ended yet");
  const std::int64_t current = runtime_->current_stream();
  operation.done->block(current);
  if (current == operation.issue_stream) {
    dropped.swap(operation.tensors);
  }
}

bool NcclLink::is_complete(NcclOperation& operation) {
  if (aborted_) {
    return true;
  }
  // Whoever is inside NCCL may be there for long, and the watchdog that asks is not to be stuck with it.
  const std::unique_lock lock(handle_->mutex, kAskLimit);
  return lock.owns_lock() && (operation.is_over || (operation.done && operation.done->is_complete()));
}

void NcclLink::forget_completed() {
  std::vector<std::vector<at::Tensor>> over;  // dropped after the lock is released
  const std::unique_lock lock(handle_->mutex, kAskLimit);
  if (lock.owns_lock() && !has_ended()) {
    handle_->retire_quietly();
    over.swap(handle_->over);
  }
}

bool NcclLink::wait_idle(double limit) {
  const auto deadline = NcclClock::now() + seconds(limit);
  Pause pause;
  while (!has_ended()) {
    {
      const std::unique_lock lock(handle_->mutex, kAskLimit);
      if (lock.owns_lock()) {
        handle_->retire_quietly();
        if (handle_->pending.empty()) {
          return true;
        }
      }
    }
    if (NcclClock::now() > deadline) {
      return false;
    }
    pause();
  }
  const std::shared_future<void> ended = ending();
  return ended.valid() && ended.wait_until(deadline) == std::future_status::ready;
}

void NcclLink::wait_on_host(NcclOperation& operation) {
  Pause pause;
  while (true) {
    {
      const std::unique_lock lock(handle_->mutex);
      // In this order: see [Note: Operations that an abort ends].
      if (operation.done && operation.done->is_complete() && !aborted_) {
        return;
      }
    }
    BMT_CHECK(CommunicationError, !has_ended(), describe(operation),
              ": the communicator was aborted: ", reason());
    poll();
    pause();
  }
}

void NcclLink::wait_for_pending() {
  std::deque<NcclOperationPtr> pending;
  {
    const std::unique_lock lock(handle_->mutex);
    pending = handle_->pending;
  }
  for (const NcclOperationPtr& operation : pending) {
    wait_on_host(*operation);
  }
}

void NcclLink::poll() {
  if (has_ended()) {
    return;
  }
  const std::string failure = find_failure();
  if (!failure.empty()) {
    options_.library->abort_all(failure);
  }
}

std::string NcclLink::find_failure() {
  const std::unique_lock lock(handle_->mutex, std::try_to_lock);
  if (!lock.owns_lock() || handle_->comm == nullptr) {
    return {};  // whoever is inside NCCL sees errors itself
  }
  try {
    handle_->retire();
  } catch (const std::exception& error) {
    return detail::join(describe("watching"), ": the device failed: ", error.what());
  }
  const auto& pending = handle_->pending;
  const std::string what = pending.empty() ? describe("idle") : describe(*pending.front());
  Result state = Result::kSuccess;
  const Result asked = call().CommGetAsyncError(handle_->comm, &state);
  if (asked != Result::kSuccess || nccl::is_error(state)) {
    return what + ": " + options_.library->explain(asked != Result::kSuccess ? asked : state);
  }
  if (!pending.empty() && NcclClock::now() - pending.front()->started > seconds(options_.timeout_seconds)) {
    return detail::join(what, ": not completed within ", options_.timeout_seconds,
                        " s; a rank is gone, late, or does something else");
  }
  return {};
}

void NcclLink::abort(const std::string& reason) {
  {
    const Lock lock(reason_mutex_);
    if (aborted_) {
      return;
    }
    reason_ = reason;
    aborted_ = true;
  }
  take_down(false);
}

void NcclLink::close() {
  if (!closed_.exchange(true)) {
    take_down(!aborted_);
  }
}

void NcclLink::take_down(bool gracefully) {
  const Lock lock(reason_mutex_);
  if (ended_.valid()) {
    return;
  }
  std::promise<void> promise;
  ended_ = promise.get_future().share();
  const auto end = [handle = handle_, device = options_.device, gracefully](std::promise<void> ended) {
    // See [Note: Threads of our own] in common/device_runtime.cpp.
    std::optional<c10::DeviceGuard> guard;
    try {
      guard.emplace(device);
    } catch (const std::exception&) {
      // The device has failed: NCCL will find that too.
    }
    try {
      handle->end(gracefully);
    } catch (const std::exception&) {
      // What NCCL has not ended goes with the process.
    }
    ended.set_value();
  };
  try {
    std::thread(end, std::move(promise)).detach();
  } catch (const std::system_error&) {
    // No thread is to be had, and the caller must not wait: NCCL's part goes with the process. Whoever waits
    // for the end finds a broken promise, which is as good.
  }
}

}  // namespace bmtrain
