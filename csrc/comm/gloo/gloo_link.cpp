#include "comm/gloo/gloo_link.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

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
      received_(sent_.size()),
      seen_(sent_.size()) {
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
  return bmtrain::describe(operation, name_, rank_, size_);
}

c10::intrusive_ptr<c10d::Backend> GlooLink::usable(const GlooOperation& operation) {
  const Lock lock(mutex_);
  if (!standing_.is_open()) {
    standing_.refuse(describe(operation));
  }
  return backend_;
}

void GlooLink::number(GlooOperation& operation) {
  const bool is_message = operation.is_message();
  const Lock lock(mutex_);
  auto& messages = operation.sends.empty() ? received_ : sent_;
  std::int64_t& count =
      is_message ? messages[static_cast<std::size_t>(operation.message_peer)] : num_collectives_;
  operation.num_collectives_before = num_collectives_;
  operation.sequence = count;
  operation.tag = make_tag(is_message ? kMessageBit : 0, operation.sequence, operation.fingerprint);
  if (!standing_.is_open()) {
    standing_.refuse(describe(operation));
  }
  ++count;
}

void GlooLink::post(const GlooOperation& operation, const Piece& piece, int peer, bool is_send,
                    GlooTransfers& transfers) {
  if (piece.bytes == 0) {
    return;
  }
  const auto backend = usable(operation);
  GlooTransfer transfer{nullptr, peer, is_send};
  try {
    std::vector<at::Tensor> tensors{as_bytes(piece.data, piece.bytes)};
    transfer.work =
        is_send ? backend->send(tensors, peer, operation.tag) : backend->recv(tensors, peer, operation.tag);
  } catch (const std::exception& error) {
    fail(operation, transfer, error.what());
  }
  transfers.push_back(std::move(transfer));
}

void GlooLink::await(const GlooOperation& operation, const GlooTransfers& transfers) {
  await_all(operation, transfers);
  note_arrival(operation, transfers);
  for (const Abandoned& ending : take_ending()) {
    await_all(ending.operation, ending.transfers);
  }
}

void GlooLink::await_all(const GlooOperation& operation, const GlooTransfers& transfers) {
  const auto deadline = Clock::now() + timeout_;
  for (const GlooTransfer& transfer : transfers) {
    bool arrived = false;
    std::string what = "the wait was interrupted";
    try {
      arrived = await_one(transfer, deadline);
    } catch (const std::exception& error) {
      what = error.what();
    }
    if (!arrived) {
      fail(operation, transfer, what);
    }
  }
}

bool GlooLink::await_one(const GlooTransfer& transfer, Clock::time_point deadline) {
  using Milliseconds = std::chrono::milliseconds;
  const auto now = Clock::now();
  const auto patience = std::max(std::chrono::duration_cast<Milliseconds>(deadline - now), Milliseconds(1));
  {
    const Lock lock(mutex_);
    if (standing_.is_aborted) {
      return false;
    }
    awaited_.push_back({transfer.work, now + patience});
  }
  const bool arrived = transfer.work->wait(patience);  // if it raises, `fail` looks who was late
  const Lock lock(mutex_);
  awaited_.erase(std::find_if(awaited_.begin(), awaited_.end(),
                              [&](const Awaited& awaited) { return awaited.work == transfer.work; }));
  return arrived;
}

void GlooLink::fail(const GlooOperation& operation, const GlooTransfer& transfer, const std::string& what) {
  const auto now = Clock::now();
  bool is_late = false;
  {
    const Lock lock(mutex_);
    if (standing_.is_aborted) {
      standing_.refuse(describe(operation));
    }
    is_late = std::any_of(awaited_.begin(), awaited_.end(),
                          [now](const Awaited& awaited) { return awaited.deadline <= now; });
  }
  const std::string message =
      is_late ? late_message(describe(operation), static_cast<double>(timeout_.count()) / 1000.0,
                             transfer.peer, transfer.is_send ? " to receive" : " to send")
              : lost_message(describe(operation), transfer.peer, first_line(what));
  abort(message);
  throw CommunicationError(message);
}

std::int64_t& GlooLink::seen_of(const GlooOperation& operation, const GlooTransfer& transfer) {
  Seen& seen = seen_[static_cast<std::size_t>(transfer.peer)];
  return !operation.is_message() ? seen.collectives : transfer.is_send ? seen.sends : seen.receives;
}

void GlooLink::note_arrival(const GlooOperation& operation, const GlooTransfers& transfers) {
  const Lock lock(mutex_);
  for (const GlooTransfer& transfer : transfers) {
    if (operation.is_message() || !transfer.is_send) {
      std::int64_t& seen = seen_of(operation, transfer);
      seen = std::max(seen, operation.sequence);
    }
  }
}

std::vector<GlooLink::Abandoned> GlooLink::take_ending() {
  const Lock lock(mutex_);
  const auto first = std::partition(
      abandoned_.begin(), abandoned_.end(), [this](const Abandoned& abandoned) BMT_REQUIRES(mutex_) {
        return abandoned.phase > 0 ||
               std::any_of(abandoned.transfers.begin(), abandoned.transfers.end(),
                           [&](const GlooTransfer& transfer) BMT_REQUIRES(mutex_) {
                             return abandoned.operation.sequence >= seen_of(abandoned.operation, transfer);
                           });
      });
  std::vector<Abandoned> ending(std::make_move_iterator(first), std::make_move_iterator(abandoned_.end()));
  abandoned_.erase(first, abandoned_.end());
  return ending;
}

void GlooLink::keep_abandoned(Abandoned abandoned) {
  const Lock lock(mutex_);
  if (standing_.is_open()) {
    abandoned_.push_back(std::move(abandoned));
  }
}

void GlooLink::abort(const std::string& reason) {
  {
    const Lock lock(mutex_);
    if (!standing_.abort(reason)) {
      return;
    }
    // Closing the connections does not end all waits: Gloo forgets a send that was under way when the other
    // side closed its end. No reference is taken: Gloo touches the bytes until a work's last one is dropped.
    for (const Awaited& one : awaited_) {
      one.work->abort();
    }
  }
  disconnect();
}

void GlooLink::disconnect() {
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    const Lock lock(mutex_);
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
    const Lock lock(mutex_);
    standing_.is_closed = true;
    // Destroyed after the lock is released: connections go with the last message that uses them.
    process_group.swap(process_group_);
    backend.swap(backend_);
  }
}

bool GlooLink::closed() {
  const Lock lock(mutex_);
  return standing_.is_closed;
}

void GlooLink::add_two_phase(std::int64_t sequence, std::weak_ptr<GlooWork> work) {
  const Lock lock(mutex_);
  two_phase_[sequence] = std::move(work);
}

void GlooLink::carry_on_before(std::int64_t sequence) {
  // One thread after the other: a second one would find what this one has taken gone, and post for a later
  // operation before this one has posted for an earlier.
  const Lock in_order(carrying_on_);
  while (true) {
    std::shared_ptr<GlooWork> work;
    {
      const Lock lock(mutex_);
      const auto first = two_phase_.begin();
      if (first == two_phase_.end() || first->first >= sequence) {
        return;
      }
      work = first->second.lock();
      two_phase_.erase(first);
    }
    if (work) {
      work->carry_on();
    }
  }
}

}  // namespace bmtrain
