#include "comm/gloo/gloo_link.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "comm/arguments.h"
#include "comm/gloo/gloo_work.h"
#include "common/check.h"

namespace bmtrain {
namespace {

// See [Note: Tags]. Bit 30 tells messages from collectives; 18 bits count, 12 bits are the fingerprint.
constexpr int kMessageBit = 1 << 30;
constexpr int kFingerprintBits = 12;
constexpr std::int64_t kSequenceMask = (std::int64_t{1} << 18) - 1;
constexpr int kDisconnectTag = 0x7fffffff;

int make_tag(int kind, std::int64_t sequence, std::uint64_t print) {
  print ^= print >> 32;
  const auto folded = static_cast<int>((print ^ (print >> 16)) & ((1U << kFingerprintBits) - 1));
  return kind | (static_cast<int>(sequence & kSequenceMask) << kFingerprintBits) | folded;
}

at::Tensor as_bytes(const void* data, std::int64_t bytes) {
  return at::from_blob(const_cast<void*>(data), {bytes}, at::TensorOptions().dtype(at::kByte));
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

GlooLink::GlooLink(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size, std::string name,
                   double timeout_seconds)
    : rank_(rank),
      size_(size),
      name_(std::move(name)),
      timeout_(static_cast<std::int64_t>(std::max(timeout_seconds, 0.001) * 1000)),
      process_group_(std::move(process_group)),
      sent_(static_cast<std::size_t>(std::max(size, 0))),
      received_(static_cast<std::size_t>(std::max(size, 0))) {
  BMT_CHECK(ValueError, size_ >= 1 && 0 <= rank_ && rank_ < size_, "communicator \"", name_,
            "\": rank must be within 0 to size - 1, got rank ", rank_, " of ", size_);
  BMT_CHECK(ValueError, process_group_ != nullptr, "communicator \"", name_,
            "\": process_group must not be None");
  BMT_CHECK(ValueError, process_group_->getRank() == rank_ && process_group_->getSize() == size_,
            "communicator \"", name_, "\": the process group is rank ", process_group_->getRank(), " of ",
            process_group_->getSize(), ", expected rank ", rank_, " of ", size_);
  backend_ = process_group_->getBackend(c10::DeviceType::CPU);
}

std::string GlooLink::describe(const GlooOperation& operation) const {
  const std::string label = operation.label.empty() ? "" : " for \"" + operation.label + "\"";
  return detail::join(operation.op, " #", operation.sequence, label, " (", operation.bytes,
                      " bytes) on group \"", name_, "\", rank ", rank_, " of ", size_);
}

c10::intrusive_ptr<c10d::Backend> GlooLink::usable(const GlooOperation& operation) {
  const std::lock_guard lock(mutex_);
  BMT_CHECK(CommunicationError, !aborted_, describe(operation), ": the communicator was aborted: ", reason_);
  BMT_CHECK(StateError, !closed_, describe(operation), ": the communicator is closed");
  return backend_;
}

GlooOperation GlooLink::begin(const char* op, const std::string& label, std::int64_t bytes, int detail) {
  GlooOperation operation{op, label, 0, bytes, 0};
  {
    const std::lock_guard lock(mutex_);
    operation.sequence = sequence_;
    sequence_ += aborted_ || closed_ ? 0 : 1;
  }
  operation.tag = make_tag(0, operation.sequence, fingerprint(op, label, bytes, detail));
  static_cast<void>(usable(operation));
  return operation;
}

GlooOperation GlooLink::begin_message(bool is_send, int peer, const std::string& label, std::int64_t bytes) {
  GlooOperation operation{is_send ? "send" : "recv", label, 0, bytes, 0};
  {
    const std::lock_guard lock(mutex_);
    std::int64_t& count = (is_send ? sent_ : received_)[static_cast<std::size_t>(peer)];
    operation.sequence = count;
    count += aborted_ || closed_ ? 0 : 1;
  }
  operation.tag = make_tag(kMessageBit, operation.sequence, fingerprint("message", "", bytes, 0));
  static_cast<void>(usable(operation));
  return operation;
}

void GlooLink::post_send(const GlooOperation& operation, const void* data, std::int64_t bytes, int peer,
                         GlooTransfers& transfers) {
  if (bytes == 0) {
    return;
  }
  const auto backend = usable(operation);
  GlooTransfer transfer{nullptr, peer, true};
  try {
    std::vector<at::Tensor> tensors{as_bytes(data, bytes)};
    transfer.work = backend->send(tensors, peer, operation.tag);
  } catch (const std::exception& error) {
    fail(operation, transfer, error.what());
  }
  transfers.push_back(std::move(transfer));
}

void GlooLink::post_recv(const GlooOperation& operation, void* data, std::int64_t bytes, int peer,
                         GlooTransfers& transfers) {
  if (bytes == 0) {
    return;
  }
  const auto backend = usable(operation);
  GlooTransfer transfer{nullptr, peer, false};
  try {
    std::vector<at::Tensor> tensors{as_bytes(data, bytes)};
    transfer.work = backend->recv(tensors, peer, operation.tag);
  } catch (const std::exception& error) {
    fail(operation, transfer, error.what());
  }
  transfers.push_back(std::move(transfer));
}

void GlooLink::await(const GlooOperation& operation, GlooTransfers& transfers) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  for (const GlooTransfer& transfer : transfers) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    bool arrived = false;
    std::string what = "the wait was interrupted";
    try {
      arrived = await_one(transfer, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      what = error.what();
    }
    if (!arrived) {
      fail(operation, transfer, what);
    }
  }
}

bool GlooLink::await_one(const GlooTransfer& transfer, std::chrono::milliseconds patience) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      return false;
    }
    awaited_.push_back(transfer.work);
  }
  const auto forget = [&] {
    const std::lock_guard lock(mutex_);
    awaited_.erase(std::find(awaited_.begin(), awaited_.end(), transfer.work));
  };
  try {
    const bool arrived = transfer.work->wait(patience);
    forget();
    return arrived;
  } catch (...) {
    forget();
    throw;
  }
}

void GlooLink::fail(const GlooOperation& operation, const GlooTransfer& transfer, const std::string& what) {
  const bool timed_out = what.find("Timed out") != std::string::npos;
  std::string message = describe(operation);
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      throw CommunicationError(message + ": the communicator was aborted: " + reason_);
    }
  }
  if (timed_out) {
    message +=
        detail::join(": timed out after ", static_cast<double>(timeout_.count()) / 1000.0,
                     " s waiting for rank ", transfer.peer, transfer.is_send ? " to receive" : " to send",
                     "; that rank is stalled, gone, or in another operation");
  } else {
    message += detail::join(
        ": the connection to rank ", transfer.peer,
        " was lost; that rank ended, died, or failed first (see its output): ", first_line(what));
  }
  abort(message);
  throw CommunicationError(message);
}

void GlooLink::abort(const std::string& reason) {
  std::vector<c10::intrusive_ptr<c10d::Work>> awaited;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_ || closed_) {
      return;
    }
    aborted_ = true;
    reason_ = reason;
    awaited = awaited_;
  }
  // Closing the connections does not end all waits: Gloo forgets a send that was under way when the other
  // side closed its end.
  for (const auto& work : awaited) {
    work->abort();
  }
  disconnect();
}

void GlooLink::disconnect() {
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    const std::lock_guard lock(mutex_);
    backend = backend_;
  }
  if (backend == nullptr) {
    return;
  }
  // Gloo closes all connections of a context when one wait times out; nothing else makes it do so while other
  // threads wait. A receive that nobody answers gives it a reason within a millisecond.
  at::Tensor nothing = at::zeros({1}, at::TensorOptions().dtype(at::kByte));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) {
      continue;
    }
    try {
      std::vector<at::Tensor> tensors{nothing};
      backend->recv(tensors, peer, kDisconnectTag)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // The expected end; a pair that is closed already raises at once, and the next one is tried.
    }
  }
}

void GlooLink::close() {
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    // Destroyed after the lock is released: connections go with the last message that uses them.
    process_group.swap(process_group_);
    backend.swap(backend_);
  }
}

bool GlooLink::closed() {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void GlooLink::add_two_step(std::int64_t sequence, std::weak_ptr<GlooWork> work) {
  const std::lock_guard lock(mutex_);
  two_step_[sequence] = std::move(work);
}

void GlooLink::carry_on_before(std::int64_t sequence) {
  // One thread after the other: a second one would find what this one has taken gone, and post for a later
  // operation before this one has posted for an earlier.
  const std::lock_guard in_order(carrying_on_);
  while (true) {
    std::shared_ptr<GlooWork> work;
    {
      const std::lock_guard lock(mutex_);
      const auto first = two_step_.begin();
      if (first == two_step_.end() || first->first >= sequence) {
        return;
      }
      work = first->second.lock();
      two_step_.erase(first);
    }
    if (work) {
      work->carry_on();
    }
  }
}

void GlooLink::keep_abandoned(GlooTransfers transfers, std::vector<at::Tensor> tensors) {
  const std::lock_guard lock(mutex_);
  if (!aborted_ && !closed_) {
    abandoned_.emplace_back(std::move(transfers), std::move(tensors));
  }
}

}  // namespace bmtrain
