// A stand-in for c10d's Gloo backend between threads of one process, which a sanitizer sees both sides of. As
// there, a thread of the transport moves the bytes after send() and recv() have returned, a wait that times
// out closes all connections of its rank, and the end of a work waits while its bytes are moved: nothing
// touches them afterwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <utility>
#include <vector>

class Network;

// One side of a message: what c10d calls a work.
struct Transfer final : c10d::Work {
  enum class State { kOpen, kMoving, kDone, kLost };

  Transfer(Network& network, int rank, at::Tensor bytes)
      : network(network), rank(rank), bytes(std::move(bytes)) {}
  ~Transfer() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;

  Network& network;
  const int rank;
  const at::Tensor bytes;
  State state = State::kOpen;  // this and the next are protected by the network's mutex
  bool is_aborted = false;
};

// All connections, and the thread that moves what goes through them. Outlives the ranks.
class Network {
 public:
  Network();
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  void post(Transfer& transfer, int peer, int tag, bool is_send);
  bool wait(Transfer& transfer, std::chrono::milliseconds timeout);
  // Forgets a transfer; waits for its end if its bytes are on their way.
  void withdraw(Transfer& transfer);
  void abort(Transfer& transfer);
  // Closes all connections of a rank.
  void disconnect(int rank);

 private:
  struct Line {
    std::deque<Transfer*> sends, receives;
  };

  void disconnect_locked(int rank);
  // A pair that can be moved, taken off its line.
  std::pair<Transfer*, Transfer*> next();
  void move();

  std::mutex mutex_;  // protects what follows
  std::condition_variable changed_;
  std::map<std::tuple<int, int, int>, Line> lines_;  // by sender, receiver and tag
  std::set<int> closed_;                             // ranks
  bool is_over_ = false;
  std::thread mover_;
};

class ThreadBackend final : public c10d::Backend {
 public:
  ThreadBackend(Network& network, int rank, int size) : Backend(rank, size), network_(network) {}
  ~ThreadBackend() override { network_.disconnect(getRank()); }
  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return post(tensors, peer, tag, true);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return post(tensors, peer, tag, false);
  }

 private:
  c10::intrusive_ptr<c10d::Work> post(const std::vector<at::Tensor>& tensors, int peer, int tag,
                                      bool is_send) {
    auto transfer = c10::make_intrusive<Transfer>(network_, getRank(), tensors.at(0));
    network_.post(*transfer, peer, tag, is_send);
    return transfer;
  }

  Network& network_;
};
