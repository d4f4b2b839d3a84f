// Drives HostsCommunicator, and the Gloo communicator below it, from several threads: see
// tests/unit/test_hosts_races.py.
//
// The ranks are threads of one process. Those of a host share memory at one address (shared_mappings.cpp),
// and hosts are connected by a stand-in for Gloo (thread_backend.h).
#include <ATen/ATen.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/hosts/hosts_communicator.h"
#include "common/check.h"
#include "cpu/kernels.h"
#include "expect.h"
#include "ranks.h"
#include "thread_backend.h"

namespace bmtrain::cpu {
// Of floating-point numbers, which nobody sums here.
void ordered_sum(void*, const void* const*, int, std::int64_t, DType, DType, bool, double) { std::abort(); }
void cast(void*, DType, const void*, DType, std::int64_t) { std::abort(); }
}  // namespace bmtrain::cpu

namespace {

using bmtrain::CommunicationError;
using bmtrain::HostsCommunicator;
using bmtrain::ReduceOp;
using bmtrain::WorkPtr;

constexpr int kHosts = 2;
constexpr int kLocal = 2;
constexpr int kRanks = kHosts * kLocal;
constexpr int kRounds = 60;
constexpr int kMessages = 200;
constexpr double kTimeout = 60.0;

// What every rank sends in a round, told apart by `kind`.
std::int32_t mark(int rank, int round, int kind) { return 1000 * round + 10 * kind + rank; }

at::Tensor filled(std::int64_t numel, std::int32_t value) {
  at::Tensor tensor = at::empty({numel}, at::kInt);
  auto* const data = tensor.mutable_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < numel; ++i) data[i] = value;
  return tensor;
}

bool is_filled(const at::Tensor& tensor, std::int64_t begin, std::int64_t numel, std::int32_t value) {
  const auto* const data = tensor.const_data_ptr<std::int32_t>() + begin;
  for (std::int64_t i = 0; i < numel; ++i) {
    if (data[i] != value) return false;
  }
  return true;
}

// An operation that was posted, and what must hold when it is over.
struct Posted {
  WorkPtr work;
  std::function<void()> check;

  void finish() const {
    work->wait();
    check();
  }
};

Posted gather(HostsCommunicator& comm, int round, int kind, std::int64_t numel) {
  const at::Tensor output = at::empty({kRanks * numel}, at::kInt);
  const at::Tensor input = filled(numel, mark(comm.rank(), round, kind));
  return {comm.all_gather(output, input, "gather"), [=] {
            for (int r = 0; r < kRanks; ++r) {
              expect(is_filled(output, r * numel, numel, mark(r, round, kind)), "what the rank gathered");
            }
          }};
}

Posted exchange(HostsCommunicator& comm, int round, int kind, std::int64_t numel) {
  const at::Tensor output = at::empty({kRanks * numel}, at::kInt);
  const at::Tensor input = filled(kRanks * numel, mark(comm.rank(), round, kind));
  return {comm.all_to_all(output, input, "exchange"), [=] {
            for (int r = 0; r < kRanks; ++r) {
              expect(is_filled(output, r * numel, numel, mark(r, round, kind)), "what the rank sent here");
            }
          }};
}

Posted maximum(HostsCommunicator& comm, int round, int kind, std::int64_t numel) {
  const at::Tensor tensor = filled(numel, mark(comm.rank(), round, kind));
  return {comm.all_reduce(tensor, ReduceOp::kMax, "maximum"),
          [=] { expect(is_filled(tensor, 0, numel, mark(kRanks - 1, round, kind)), "the largest"); }};
}

Posted from_root(HostsCommunicator& comm, int round, int kind, std::int64_t numel) {
  const int root = round % kRanks;
  const at::Tensor tensor = filled(numel, mark(comm.rank(), round, kind));
  return {comm.broadcast(tensor, root, "root"),
          [=] { expect(is_filled(tensor, 0, numel, mark(root, round, kind)), "what the root has"); }};
}

// Two threads wait, each for every other operation and in an order of its own.
void collectives(HostsCommunicator& comm, int round) {
  const std::int64_t numel = round % 7 == 0 ? 20'000 : 300 + round;  // above 64 KiB sums take two steps
  std::vector<Posted> posted;
  posted.push_back(gather(comm, round, 1, numel));
  posted.push_back(exchange(comm, round, 2, numel));
  posted.push_back(gather(comm, round, 3, numel));
  posted.push_back(maximum(comm, round, 4, numel));
  posted.push_back(gather(comm, round, 5, numel));
  posted.push_back(from_root(comm, round, 6, numel));
  const bool backwards = (round + comm.rank()) % 2 == 0;
  const auto wait_for = [&](std::size_t first) {
    for (std::size_t i = 0; i < posted.size() / 2; ++i) {
      posted[first + 2 * (backwards ? posted.size() / 2 - 1 - i : i)].finish();
    }
  };
  std::thread other([&] { wait_for(1); });
  wait_for(0);
  other.join();
}

// Each rank to each, from a thread of their own.
void messages(HostsCommunicator& comm) {
  for (int round = 0; round < kMessages; ++round) {
    const int distance = 1 + round % (kRanks - 1);
    const int from = (comm.rank() + kRanks - distance) % kRanks;
    const at::Tensor received = at::empty({100}, at::kInt);
    const WorkPtr send =
        comm.send(filled(100, mark(comm.rank(), round, 7)), (comm.rank() + distance) % kRanks, "m");
    const WorkPtr receive = comm.recv(received, from, "m");
    receive->wait();
    send->wait();
    expect(is_filled(received, 0, 100, mark(from, round, 7)), "the message");
  }
}

// As a report or the timeline does.
void watch(HostsCommunicator& comm, const std::atomic<bool>& is_over) {
  while (!is_over) {
    expect(!comm.closed(), "an open communicator");
    for (const auto& [op, traffic] : comm.traffic()) expect(traffic.messages > 0, "traffic of what was used");
    expect(comm.bytes_copied() >= 0, "bytes");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void train(HostsCommunicator& comm) {
  std::atomic<bool> is_over = false;
  std::thread watcher([&] { watch(comm, is_over); });
  std::thread messenger([&] { messages(comm); });
  for (int round = 0; round < kRounds; ++round) {
    collectives(comm, round);
    if (round % 10 == 0) comm.barrier("barrier");
  }
  messenger.join();
  comm.barrier("the end");
  is_over = true;
  watcher.join();
  comm.close();
}

// What an operation that was dropped still reads is kept, until a later one shows that it is over.
void abandon(HostsCommunicator& comm) {
  const at::Tensor tensor = filled(300, mark(comm.rank(), 0, 8));
  static_cast<void>(comm.all_reduce(tensor, ReduceOp::kMax, "dropped"));
  expect(tensor.use_count() > 1, "a tensor in use");
  comm.barrier("later");
  expect(tensor.use_count() == 1, "a tensor that is not in use any more");
}

// A rank of one host waits for a message from a rank of the other, which waits before for a sum of two
// phases.
void wait_across(HostsCommunicator& comm) {
  const Posted sum = maximum(comm, 0, 4, 20'000);
  const int peer = (comm.rank() + kLocal) % kRanks;
  if (comm.rank() < kLocal) {
    comm.recv(at::empty({1}, at::kInt), peer, "m")->wait();
    sum.finish();
  } else {
    sum.finish();
    comm.send(filled(1, 0), peer, "m")->wait();
  }
}

bool fails(const std::function<void()>& work) {
  try {
    work();
  } catch (const CommunicationError&) {
    return true;
  }
  return false;
}

// Two threads of each rank wait for one that does not come, and which a third thread aborts.
void abort_one(HostsCommunicator& comm) {
  if (comm.rank() == 1) {
    std::thread watchdog([&] { comm.abort("on request"); });
    expect(fails([&] { comm.barrier("too late"); }), "an error where it was aborted");
    watchdog.join();
    return;
  }
  std::vector<Posted> posted;
  const bool refused = fails([&] {
    posted.push_back(gather(comm, 1, 1, 500));
    posted.push_back(exchange(comm, 1, 2, 500));
  });
  std::atomic<int> failed = 0;
  std::vector<std::thread> waiters;
  for (const Posted& operation : posted) {
    waiters.emplace_back([&] { failed += fails([&] { operation.finish(); }) ? 1 : 0; });
  }
  for (std::thread& waiter : waiters) waiter.join();
  expect(refused || failed == 2, "an error wherever somebody waits");
}

void run_ranks(void (*work)(HostsCommunicator&)) {
  Network network;  // outlives all ranks
  std::vector<std::vector<int>> files(kHosts);
  for (int rank = 0; rank < kRanks; ++rank) {
    files[static_cast<std::size_t>(rank / kLocal)].push_back(
        memory_file(bmtrain::ShmCommunicator::segment_bytes(kLocal)));
  }
  run_in_threads(kRanks, [&](int rank) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, kRanks);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::make_intrusive<ThreadBackend>(network, rank, kRanks));
    const auto local = std::make_shared<bmtrain::ShmCommunicator>(
        files[static_cast<std::size_t>(rank / kLocal)], std::vector<int>(2 * kLocal, -1), rank % kLocal,
        kLocal, "test", kTimeout);
    HostsCommunicator comm(std::move(group), rank, kRanks, "test", kTimeout, local);
    work(comm);
  });
  for (const auto& host : files) {
    for (const int file : host) ::close(file);
  }
}

}  // namespace

int main() {
  run_ranks(train);
  run_ranks(abandon);
  run_ranks(wait_across);
  for (int i = 0; i < 10; ++i) run_ranks(abort_one);
  std::puts("ok");
}
