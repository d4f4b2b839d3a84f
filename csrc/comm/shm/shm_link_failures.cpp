// How a link finds out that a peer is gone or late, and what it says then.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/shm/shm_link.h"
#include "common/check.h"

namespace bmtrain {

bool ShmLink::is_gone(int peer) const {
  return peers_[index(peer)].died || header(peer).state.load() != ShmState::kOpen;
}

bool ShmLink::any_is_gone() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && is_gone(peer)) {
      return true;
    }
  }
  return false;
}

bool ShmLink::poll_peer_exits() {
  bool found = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || peers_[index(peer)].died) {
      continue;
    }
    pollfd watched[2] = {{watches_[2 * index(peer)], POLLIN | POLLHUP, 0},
                         {watches_[2 * index(peer) + 1], POLLIN | POLLHUP, 0}};
    if (poll(watched, 2, 0) > 0) {  // negative descriptors are passed over
      peers_[index(peer)].died = true;
      found = true;
    }
  }
  return found;
}

std::vector<int> ShmLink::blockers(const ShmOperation& operation) const {
  std::vector<int> ranks;
  const auto belongs = [&](const Pending& pending) { return pending.operation.get() == &operation; };
  for (int peer = 0; peer < size_; ++peer) {
    const Peer& other = peers_[index(peer)];
    const Queue& queue = operation.message_peer < 0 ? other.collectives : other.messages;
    if (std::any_of(queue.begin(), queue.end(), belongs)) {
      ranks.push_back(peer);
    }
  }
  const bool is_message = operation.message_peer >= 0;
  const Queue& sends = is_message ? peers_[index(operation.message_peer)].sends : collective_sends_;
  if (!sends.empty() && std::any_of(sends.begin(), sends.end(), belongs)) {
    const Pending& first = sends.front();
    if (first.piece.phase == 1 && !first.operation->combined && first.operation.get() != &operation) {
      const std::vector<int> before = blockers(*first.operation);
      ranks.insert(ranks.end(), before.begin(), before.end());
    } else {
      add_readers_behind(first, ranks);
    }
  }
  return ranks;
}

void ShmLink::add_readers_behind(const Pending& pending, std::vector<int>& ranks) const {
  const int message_peer = pending.operation->message_peer;
  if (message_peer >= 0) {
    ranks.push_back(message_peer);
    return;
  }
  if (pending.operation->place == ShmPlace::kCommon) {
    const std::vector<int> users = users_behind(pending.operation->slot);
    ranks.insert(ranks.end(), users.begin(), users.end());
    if (!users.empty()) {
      return;
    }
  }
  const std::uint64_t end = collective_writer_.published();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && collective_writer_.consumed(peer) < end) {
      ranks.push_back(peer);
    }
  }
}

void ShmLink::fail_lost(const ShmOperation& operation, int peer) {
  poll_peer_exits();
  for (int other = 0; other < size_; ++other) {
    // A rank that died is the cause; one that gave up because of it is not.
    if (peers_[index(other)].died && !peers_[index(peer)].died) {
      peer = other;
    }
  }
  const ShmHeader& theirs = header(peer);
  const std::string message =
      lost_message(describe(operation), peer, theirs.state.load() == ShmState::kAborted ? theirs.reason : "");
  abort_locked(message);
  throw CommunicationError(message);
}

void ShmLink::fail_late(const ShmOperation& operation, const std::vector<int>& peers) {
  const std::string message =
      late_message(describe(operation), static_cast<double>(timeout_.count()) / 1000.0,
                   peers.empty() ? rank_ : peers.front(), "");
  abort_locked(message);
  throw CommunicationError(message);
}

void ShmLink::abort(const std::string& reason) {
  if (getpid() != process_) {
    return;
  }
  const Lock lock(mutex_);
  abort_locked(reason);
}

void ShmLink::abort_locked(const std::string& reason) {
  if (!standing_.abort(reason)) {
    return;
  }
  ShmHeader& mine = header(rank_);
  const std::size_t length = std::min(reason.size(), ShmHeader::kReasonBytes - 1);
  std::memcpy(mine.reason, reason.data(), length);
  mine.state.store(ShmState::kAborted);
  mine.bell.ring();
  notify(ShmRing::kEverybody);
}

}  // namespace bmtrain
