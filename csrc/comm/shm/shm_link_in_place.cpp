// What a link does with buffers that are used in place (shm_heap.h).
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "comm/host_tensor.h"
#include "comm/shm/shm_link.h"
#include "common/check.h"

namespace bmtrain {
namespace {

// What was borrowed: it keeps the memory mapped.
struct Lease {
  std::shared_ptr<ShmLink> link;
  int slot;
  std::uint64_t use = 0;
};

void end_own_lease(void* context) {
  const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
  lease->link->end_own(lease->slot);
}

void end_common_lease(void* context) {
  const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
  lease->link->end_common(lease->slot, lease->use);
}

}  // namespace

void ShmPeerSlices::release() {
  if (const std::shared_ptr<ShmLink> link = link_.lock()) {
    for (const auto& [peer, slot] : std::exchange(in_place, {})) {
      link->finish_reading(peer, slot);
    }
  }
}

c10::DataPtr ShmLink::borrow_own(std::int64_t bytes) {
  const auto deadline = std::chrono::steady_clock::now() + std::min(timeout_, longest_wait_.load());
  Lock lock(mutex_);
  int slot = ShmHeap::kNone;
  if (bytes == 0) {
    heap_->give_own_memory_back(/*least_uses=*/0);
    return {};
  }
  while (standing_.is_open()) {
    const std::uint32_t seen = header(rank_).bell.count();
    slot = heap_->borrow_own(bytes);
    if (slot != ShmHeap::kBeingRead || any_is_gone() || std::chrono::steady_clock::now() >= deadline) {
      break;
    }
    if (!progress()) {
      sleep_until_called(lock, seen, deadline);
    }
  }
  if (slot < 0) {
    return {};
  }
  auto lease = std::make_unique<Lease>(Lease{shared_from_this(), slot});
  return {heap_->own_data(slot), lease.release(), &end_own_lease, c10::Device(c10::kCPU)};
}

c10::DataPtr ShmLink::borrow_common(std::int64_t bytes) {
  const Lock lock(mutex_);
  const int slot = standing_.is_open() ? heap_->borrow_common(bytes) : ShmHeap::kNone;
  if (slot == ShmHeap::kNone) {
    return {};
  }
  auto lease = std::make_unique<Lease>(Lease{shared_from_this(), slot, heap_->common_use(slot)});
  return {heap_->common_view(slot), lease.release(), &end_common_lease, c10::Device(c10::kCPU)};
}

void ShmLink::give_back_common(const void* view, std::int64_t bytes) {
  if (getpid() != process_) {
    return;  // the rank itself still uses it
  }
  const Lock lock(mutex_);
  const int slot = heap_->find_common(static_cast<const char*>(view), bytes);
  if (slot == ShmHeap::kNone) {
    return;
  }
  heap_->give_back_common(slot);
  call_blocked();
}

void ShmLink::end_common(int slot, std::uint64_t use) {
  if (getpid() != process_) {
    return;
  }
  const Lock lock(mutex_);
  heap_->retire_common(slot, use, static_cast<std::uint64_t>(sequence_));
  call_blocked();
}

void ShmLink::call_blocked() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && collective_readers_[index(peer)].writer_is_blocked()) {
      segments_[index(peer)].call();
      segments_[index(peer)].call_urgently();
    }
  }
}

void ShmLink::finish_reading(int peer, int slot) {
  if (getpid() == process_ && heap_->finish_reading(peer, slot)) {  // what a forked child drops is the rank's
    segments_[index(peer)].call();
  }
}

int ShmLink::publish_own(const at::Tensor& tensor) {
  const Lock lock(mutex_);
  const int slot = heap_->find_own(data_of(tensor), bytes_of(tensor));
  if (slot != ShmHeap::kNone) {
    heap_->expect_readers(slot);
  }
  return slot;
}

int ShmLink::find_common(const at::Tensor& tensor) {
  const Lock lock(mutex_);
  return heap_->find_common(data_of(tensor), bytes_of(tensor));
}

std::int64_t ShmLink::bytes_in_place() {
  const Lock lock(mutex_);
  return heap_->bytes();
}

std::vector<int> ShmLink::users_behind(int slot) const {
  std::vector<int> users;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && !heap_->has_given_back(peer, slot)) {
      users.push_back(peer);
    }
  }
  return users;
}

void ShmLink::write_common(const ShmOperation& operation, const Piece& piece) {
  char* const slice = heap_->common_data(operation.slot) + rank_ * piece.bytes;
  if (operation.write == nullptr) {
    std::memcpy(slice, piece.data, static_cast<std::size_t>(piece.bytes));
  } else {
    const FloatEnvironmentGuard guard(operation.environment);
    operation.write(slice, piece.data);
  }
}

std::uint64_t ShmLink::send_some(Pending& pending, ShmRingWriter& ring, const ShmDescriptor& meta,
                                 const std::function<bool(int)>& is_past) {
  const Piece& piece = pending.piece;
  const auto left = static_cast<std::uint64_t>(piece.bytes - pending.moved);
  const ShmOperation& operation = *pending.operation;
  if (operation.place == ShmPlace::kPrivate) {
    const std::uint64_t written = ring.write(piece.data + pending.moved, left, meta, is_past);
    count_copied(static_cast<std::int64_t>(written));
    return written;
  }
  const bool is_common = operation.place == ShmPlace::kCommon;
  if ((is_common && !users_behind(operation.slot).empty()) || !ring.has_slot(is_past)) {
    return 0;
  }
  ShmDescriptor found = meta;
  found.length = left;
  if (is_common) {
    write_common(operation, piece);
    count_copied(piece.bytes);
  } else {
    found.offset = heap_->own_offset(operation.slot);
  }
  ring.publish(found);
  return left;
}

void ShmLink::receive_chunk(Pending& pending, const ShmDescriptor& chunk, const ShmRingReader& ring,
                            int peer) {
  Piece& piece = pending.piece;
  ShmOperation& operation = *pending.operation;
  if (operation.place == ShmPlace::kCommon) {
    return;  // it lies where it is wanted
  }
  try {
    if (chunk.slot == ShmHeap::kNone) {
      if (piece.data == nullptr) {
        operation.slices->copies.push_back(scratch(piece.bytes));
        piece.data = data_of(operation.slices->copies.back());
        operation.slices->by_rank[index(peer)] = piece.data;
      }
      std::memcpy(piece.data + pending.moved, ring.data() + chunk.offset, chunk.length);
      count_copied(static_cast<std::int64_t>(chunk.length));
      return;
    }
    const char* const slice = heap_->map_peer(peer, chunk.offset, piece.bytes * size_) + rank_ * piece.bytes;
    operation.slices->by_rank[index(peer)] = slice;
    operation.slices->in_place.emplace_back(peer, chunk.slot);
  } catch (const std::exception& error) {
    // There is no memory; the background's thread could raise it nowhere.
    abort_locked(detail::join(describe(operation), ": ", error.what()));
  }
}

}  // namespace bmtrain
