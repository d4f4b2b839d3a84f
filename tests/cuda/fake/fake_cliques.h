// What fake_nccl.cpp knows of communicators: the faults that tests ask for, the operations that ranks have
// issued, and how they move data once every rank has issued its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/nccl/nccl_api.h"
#include "fake_device.h"
#include "type_sizes.h"

using bmtrain::nccl::Config;
using bmtrain::nccl::Op;
using bmtrain::nccl::Result;
using bmtrain::nccl::Type;
using bmtrain::nccl::UniqueId;

namespace fake {

struct Fault {
  Result result = Result::kSuccess;
  int calls_before = 0;
};
std::map<std::string, Fault> faults;
std::map<std::string, int> num_calls;
Result async_error = Result::kSuccess;
bool is_stuck = false;        // operations never complete
bool is_mirrored = false;     // the other ranks do, with the same data, what one rank does
bool is_in_progress = false;  // calls stay in progress
int num_open = 0, num_aborted = 0, num_destroyed = 0;

Result called(const std::string& name) {
  num_calls[name] += 1;
  const auto found = faults.find(name);
  if (found == faults.end() || found->second.calls_before-- > 0) {
    return Result::kSuccess;
  }
  return found->second.result;
}

struct Call {
  std::string name;
  const char* from = nullptr;
  char* to = nullptr;
  std::size_t count = 0;
  Type type = Type::kUint8;
  Op op = Op::kSum;
  int root = 0;  // or peer
};
struct Round {  // what the ranks issued as their n-th operation
  std::vector<std::vector<Call>> calls;
  std::size_t num_arrived = 0;
  bool is_done = false;
};
struct Clique {
  int size;
  std::map<std::int64_t, Round> rounds;
  std::map<std::string, std::shared_ptr<Clique>> parts;
};
std::map<std::string, std::shared_ptr<Clique>> cliques;  // by unique id

}  // namespace fake
using namespace fake;  // NOLINT: one library

namespace bmtrain::nccl {
struct OpaqueComm {
  std::shared_ptr<Clique> clique;
  int rank;
  std::int64_t num_issued = 0, num_splits = 0;
  std::vector<Call> group;
  Stream stream = nullptr;
  OpaqueComm** part_to = nullptr;  // where a split that is in progress puts what it makes
  OpaqueComm* part = nullptr;
  std::shared_ptr<bool> is_aborted = std::make_shared<bool>(false);
};
}  // namespace bmtrain::nccl
using bmtrain::nccl::Comm;

namespace fake {

int depth = 0;
std::vector<Comm> grouped;

std::vector<Comm> all_comms;

double combined(double a, double b, Op op) {
  switch (op) {
    case Op::kProd:
      return a * b;
    case Op::kMax:
      return std::max(a, b);
    case Op::kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// fp32 and fp64: what is reduced by NCCL itself.
template <typename T>
std::vector<T> reduced(const Round& round, std::size_t count) {
  std::vector<T> total(count);
  const auto size = static_cast<T>(round.calls.size());
  for (std::size_t r = 0; r < round.calls.size(); ++r) {
    const Call& call = round.calls[r].front();
    const auto* values = reinterpret_cast<const T*>(call.from);
    for (std::size_t i = 0; i < count; ++i) {
      total[i] = r == 0 ? values[i] : static_cast<T>(combined(total[i], values[i], call.op));
    }
  }
  for (T& value : total) {
    value = round.calls[0].front().op == Op::kAvg ? value / size : value;
  }
  return total;
}

void exchange(const Round& round) {
  for (std::size_t r = 0; r < round.calls.size(); ++r) {
    std::map<int, std::size_t> num_taken;
    for (const Call& recv : round.calls[r]) {
      if (recv.name != "Recv") continue;
      std::size_t skip = num_taken[recv.root]++;
      for (const Call& send : round.calls[static_cast<std::size_t>(recv.root)]) {
        if (send.name == "Send" && send.root == static_cast<int>(r) && skip-- == 0) {
          std::memcpy(recv.to, send.from, recv.count * size_of(recv.type));
          break;
        }
      }
    }
  }
}

template <typename T>
void reduce(const Round& round, const Call& first) {
  const bool scatters = first.name == "ReduceScatter";
  const std::size_t parts = scatters ? round.calls.size() : 1;
  const std::vector<T> total = reduced<T>(round, first.count * parts);
  for (std::size_t r = 0; r < round.calls.size(); ++r) {
    if (first.name != "Reduce" || static_cast<int>(r) == first.root) {
      const T* values = total.data() + (scatters ? r * first.count : 0);
      std::memcpy(round.calls[r].front().to, values, first.count * sizeof(T));
    }
  }
}

void move(const Round& round) {
  const Call& first = round.calls[0].front();
  const std::size_t bytes = first.count * size_of(first.type);
  for (std::size_t r = 0; r < round.calls.size(); ++r) {
    for (const auto& calls : round.calls) {
      const std::size_t s = static_cast<std::size_t>(&calls - round.calls.data());
      if (first.name == "AllGather") {
        std::memmove(round.calls[r].front().to + s * bytes, calls.front().from, bytes);
      } else if (static_cast<int>(s) == first.root) {
        std::memmove(round.calls[r].front().to, calls.front().from, bytes);
      }
    }
  }
}

void execute(const Round& round) {
  const Call& first = round.calls[0].front();
  if (first.name == "Send" || first.name == "Recv") {
    exchange(round);
  } else if (first.name == "AllGather" || first.name == "Broadcast") {
    move(round);
  } else if (first.type == Type::kFloat64) {
    reduce<double>(round, first);
  } else {
    reduce<float>(round, first);
  }
}

// The other ranks' calls, as one rank's: what they receive goes nowhere.
std::vector<char> nowhere(std::size_t{1} << 24);

void mirror(Round& round, const bmtrain::nccl::OpaqueComm& comm) {
  for (std::size_t r = 0; r < round.calls.size(); ++r) {
    round.calls[r] = comm.group;
    for (Call& call : round.calls[r]) {
      call.to = call.to == nullptr ? nullptr : nowhere.data();
    }
  }
}

// The calls of one group, as one step of the stream.
void launch(Comm comm) {
  const std::shared_ptr<Clique> clique = comm->clique;
  const std::int64_t number = comm->num_issued++;
  Round& round = clique->rounds[number];
  note(comm->group.front().name + " on " + std::to_string(reinterpret_cast<std::int64_t>(comm->stream)));
  round.calls.resize(static_cast<std::size_t>(clique->size));
  if (is_mirrored) {
    mirror(round, *comm);
  }
  round.calls[static_cast<std::size_t>(comm->rank)] = std::exchange(comm->group, {});
  const auto ready = [clique, number, arrived = false, is_aborted = comm->is_aborted]() mutable {
    if (*is_aborted) return true;
    Round& mine = clique->rounds[number];
    mine.num_arrived += arrived ? 0 : is_mirrored ? static_cast<std::size_t>(clique->size) : 1;
    arrived = true;
    return !is_stuck && mine.num_arrived == static_cast<std::size_t>(clique->size);
  };
  enqueue(reinterpret_cast<std::int64_t>(comm->stream),
          {ready, [clique, number, is_aborted = comm->is_aborted] {
             if (*is_aborted) return;
             Round& mine = clique->rounds[number];
             if (!mine.is_done) {
               mine.is_done = true;
               execute(mine);
             }
           }});
  advance();
}

Result issue(Call call, Comm comm, bmtrain::nccl::Stream stream) {
  const std::lock_guard lock(mutex);
  const Result result = called(call.name);
  if (bmtrain::nccl::is_error(result)) {
    return result;
  }
  comm->stream = stream;
  comm->group.push_back(std::move(call));
  if (std::find(grouped.begin(), grouped.end(), comm) == grouped.end()) {
    grouped.push_back(comm);
  }
  return result;
}

Result open(const std::shared_ptr<Clique>& clique, int rank, Comm* comm) {
  *comm = new bmtrain::nccl::OpaqueComm{clique, rank, 0, 0, {}, nullptr};
  all_comms.push_back(*comm);
  num_open += 1;
  return is_in_progress ? Result::kInProgress : Result::kSuccess;
}

}  // namespace fake
using namespace fake;  // NOLINT: one library
