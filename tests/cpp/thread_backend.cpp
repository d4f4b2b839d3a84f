#include "thread_backend.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

Transfer::~Transfer() { network.withdraw(*this); }

bool Transfer::wait(std::chrono::milliseconds timeout) { return network.wait(*this, timeout); }

void Transfer::abort() { network.abort(*this); }

Network::Network() : mover_([this] { move(); }) {}

Network::~Network() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  mover_.join();
}

void Network::post(Transfer& transfer, int peer, int tag, bool is_send) {
  const std::lock_guard lock(mutex_);
  if (closed_.count(transfer.rank) + closed_.count(peer) > 0) {
    throw std::runtime_error("Connection closed by peer");
  }
  const int rank = transfer.rank;
  Line& line = lines_[is_send ? std::tuple(rank, peer, tag) : std::tuple(peer, rank, tag)];
  (is_send ? line.sends : line.receives).push_back(&transfer);
  changed_.notify_all();
}

bool Network::wait(Transfer& transfer, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const bool is_over = changed_.wait_for(lock, timeout, [&transfer] {
    return transfer.state != Transfer::State::kMoving &&
           (transfer.state != Transfer::State::kOpen || transfer.is_aborted);
  });
  if (!is_over) {
    disconnect_locked(transfer.rank);
    throw std::runtime_error("Timed out waiting for a message");
  }
  if (transfer.state == Transfer::State::kLost) {
    throw std::runtime_error("Connection closed by peer");
  }
  return transfer.state == Transfer::State::kDone;
}

void Network::withdraw(Transfer& transfer) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&transfer] { return transfer.state != Transfer::State::kMoving; });
  for (auto& [key, line] : lines_) {
    std::erase(line.sends, &transfer);
    std::erase(line.receives, &transfer);
  }
}

void Network::abort(Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  transfer.is_aborted = true;
  changed_.notify_all();
}

void Network::disconnect(int rank) {
  const std::lock_guard lock(mutex_);
  disconnect_locked(rank);
}

void Network::disconnect_locked(int rank) {
  closed_.insert(rank);
  for (auto& [key, line] : lines_) {
    if (std::get<0>(key) != rank && std::get<1>(key) != rank) continue;
    for (auto* queue : {&line.sends, &line.receives}) {
      for (Transfer* const transfer : *queue) transfer->state = Transfer::State::kLost;
      queue->clear();
    }
  }
  changed_.notify_all();
}

std::pair<Transfer*, Transfer*> Network::next() {
  for (auto entry = lines_.begin(); entry != lines_.end();) {
    Line& line = entry->second;
    if (line.sends.empty() && line.receives.empty()) {
      entry = lines_.erase(entry);
      continue;
    }
    if (!line.sends.empty() && !line.receives.empty()) {
      std::pair found{line.sends.front(), line.receives.front()};
      line.sends.pop_front();
      line.receives.pop_front();
      return found;
    }
    ++entry;
  }
  return {nullptr, nullptr};
}

void Network::move() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto [send, receive] = next();
    if (send == nullptr) {
      if (is_over_) return;
      changed_.wait(lock);
      continue;
    }
    send->state = receive->state = Transfer::State::kMoving;
    lock.unlock();
    const auto bytes = static_cast<std::size_t>(send->bytes.numel());
    if (receive->bytes.numel() != send->bytes.numel()) {  // Gloo ends the process too
      std::fputs("both sides of a message must be as large\n", stderr);
      std::_Exit(1);
    }
    std::memcpy(receive->bytes.data_ptr(), send->bytes.data_ptr(), bytes);
    lock.lock();
    send->state = receive->state = Transfer::State::kDone;
    changed_.notify_all();
  }
}
