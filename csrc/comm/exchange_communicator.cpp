#include "comm/exchange_communicator.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "comm/host_tensor.h"
#include "comm/ordered_reduce.h"
#include "common/check.h"

namespace bmtrain {
namespace {

// Up to here an all_reduce gathers everything everywhere: one exchange instead of two.
constexpr std::int64_t kSmallAllReduceBytes = 64 * 1024;

std::uint64_t fingerprint_of(std::string_view op, std::string_view label, std::int64_t bytes, int detail) {
  std::uint64_t hash = 1469598103934665603ULL;  // FNV-1a
  const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
  for (const std::string_view text : {op, label}) {
    for (const char c : text) {
      mix(static_cast<unsigned char>(c));
    }
  }
  mix(static_cast<std::uint64_t>(bytes));
  mix(static_cast<std::uint64_t>(detail));
  return hash;
}

int reduction_detail(const Call& call, int root = 0) {
  return static_cast<int>(call.input.scalar_type()) * 1000003 + static_cast<int>(call.reduce_op) * 10007 +
         root;
}

// Elements of slice r of a tensor cut into `size` slices, the last ones shorter or empty.
struct Slice {
  std::int64_t begin;
  std::int64_t numel;
};

Slice slice_of(std::int64_t numel, int size, int r) {
  const std::int64_t partition = (numel + size - 1) / size;
  const std::int64_t begin = std::min(numel, r * partition);
  return {begin, std::min(numel, begin + partition) - begin};
}

// Visits peers in the order rank + 1, rank + 2, ...: so that not all ranks send to the same one first.
template <typename Visit>
void for_each_peer(const Communicator& comm, const Visit& visit) {
  for (int distance = 1; distance < comm.size(); ++distance) {
    visit((comm.rank() + distance) % comm.size());
  }
}

// Receives `bytes` from each peer into scratch memory.
at::Tensor receive_from_peers(Exchange& exchange, const Communicator& comm, std::int64_t bytes) {
  at::Tensor received = scratch(bytes * (comm.size() - 1));
  exchange.kept.push_back(received);
  for (int r = 0, slot = 0; r < comm.size(); ++r) {
    if (r != comm.rank()) {
      exchange.receives.push_back({data_of(received) + slot++ * bytes, bytes, r});
    }
  }
  return received;
}

// Receives a slice like `own` from each peer; `own` becomes what they reduce to. It lies in `exchange.to`.
void reduce_with_peers(Exchange& exchange, const Communicator& comm, const Call& call, const char* own,
                       char* to, std::int64_t numel) {
  const auto bytes = numel * static_cast<std::int64_t>(call.input.element_size());
  const at::Tensor received = receive_from_peers(exchange, comm, bytes);
  std::vector<const void*> inputs;
  inputs.reserve(static_cast<std::size_t>(comm.size()));
  for (int r = 0; r < comm.size(); ++r) {
    inputs.push_back(r == comm.rank() ? own : data_of(received) + (r < comm.rank() ? r : r - 1) * bytes);
  }
  exchange.combine = [inputs = std::move(inputs), to, numel, dtype = call.input.scalar_type(),
                      op = call.reduce_op] { ordered_reduce(to, inputs, numel, dtype, op); };
}

void plan_gather(Exchange& exchange, const Communicator& comm) {
  const std::int64_t bytes = exchange.bytes;
  exchange.sends.push_back({data_of(exchange.from), bytes});
  for_each_peer(comm,
                [&](int r) { exchange.receives.push_back({data_of(exchange.to) + r * bytes, bytes, r}); });
  exchange.own = {data_of(exchange.to) + comm.rank() * bytes, data_of(exchange.from), bytes};
}

void send_slices(Exchange& exchange, const Communicator& comm) {
  const std::int64_t bytes = exchange.bytes;
  for_each_peer(comm,
                [&](int r) { exchange.sends.push_back({data_of(exchange.from) + r * bytes, bytes, r}); });
}

void plan_all_to_all(Exchange& exchange, const Communicator& comm) {
  const std::int64_t bytes = exchange.bytes;
  send_slices(exchange, comm);
  for_each_peer(comm,
                [&](int r) { exchange.receives.push_back({data_of(exchange.to) + r * bytes, bytes, r}); });
  const std::int64_t own = comm.rank() * bytes;
  exchange.own = {data_of(exchange.to) + own, data_of(exchange.from) + own, bytes};
}

void plan_uneven(Exchange& exchange, const Communicator& comm, const Call& call) {
  const auto element = static_cast<std::int64_t>(call.input.element_size());
  char* from = data_of(exchange.from);
  char* to = data_of(exchange.to);
  for (int r = 0; r < comm.size(); ++r) {
    const std::int64_t sent = call.counts->input[static_cast<std::size_t>(r)] * element;
    const std::int64_t received = call.counts->output[static_cast<std::size_t>(r)] * element;
    if (r == comm.rank()) {
      exchange.own = {to, from, sent};
    } else {
      exchange.sends.push_back({from, sent, r});
      exchange.receives.push_back({to, received, r});
    }
    from += sent;
    to += received;
  }
  // As in for_each_peer().
  std::rotate(exchange.sends.begin(), exchange.sends.begin() + comm.rank(), exchange.sends.end());
}

void plan_reduce_scatter(Exchange& exchange, const Communicator& comm, const Call& call) {
  send_slices(exchange, comm);
  reduce_with_peers(exchange, comm, call, data_of(exchange.from) + comm.rank() * exchange.bytes,
                    data_of(exchange.to), exchange.to.numel());
}

void plan_small_all_reduce(Exchange& exchange, const Communicator& comm, const Call& call) {
  char* const data = data_of(exchange.to);
  exchange.sends.push_back({data, exchange.bytes});
  reduce_with_peers(exchange, comm, call, data, data, exchange.to.numel());
}

// Each slice is reduced on its own rank, then the slices are gathered.
void plan_large_all_reduce(Exchange& exchange, const Communicator& comm, const Call& call) {
  const auto element = static_cast<std::int64_t>(call.input.element_size());
  const std::int64_t numel = exchange.to.numel();
  const Slice own = slice_of(numel, comm.size(), comm.rank());
  char* const own_data = data_of(exchange.to) + own.begin * element;
  reduce_with_peers(exchange, comm, call, own_data, own_data, own.numel);
  for_each_peer(comm, [&](int r) {
    const Slice slice = slice_of(numel, comm.size(), r);
    char* const data = data_of(exchange.to) + slice.begin * element;
    exchange.sends.push_back({data, slice.numel * element, r, 0});
    exchange.receives.push_back({data, slice.numel * element, r, 1});
  });
  exchange.sends.push_back({own_data, own.numel * element, Piece::kEveryPeer, 1});
}

void plan_reduce(Exchange& exchange, const Communicator& comm, const Call& call) {
  char* const data = data_of(exchange.to);
  if (comm.rank() == call.peer) {
    reduce_with_peers(exchange, comm, call, data, data, exchange.to.numel());
    return;
  }
  exchange.sends.push_back({data, exchange.bytes, call.peer});
  exchange.publish = nullptr;
}

void plan_broadcast(Exchange& exchange, const Communicator& comm, const Call& call) {
  char* const data = data_of(exchange.to);
  if (comm.rank() == call.peer) {
    exchange.sends.push_back({data, exchange.bytes});
    exchange.publish = nullptr;
  } else {
    exchange.receives.push_back({data, exchange.bytes, call.peer});
  }
}

void plan_message(Exchange& exchange, const Call& call) {
  exchange.fingerprint = fingerprint_of("message", "", exchange.bytes, 0);
  exchange.message_peer = call.peer;
  if (call.op == Op::kSend) {
    exchange.sends.push_back({data_of(exchange.from), exchange.bytes, call.peer});
  } else {
    exchange.receives.push_back({data_of(exchange.to), exchange.bytes, call.peer});
  }
}

void plan_barrier(Exchange& exchange, const Communicator& comm) {
  exchange.from = at::zeros({1}, at::TensorOptions().dtype(at::kByte));
  exchange.sends.push_back({data_of(exchange.from), 1});
  static_cast<void>(receive_from_peers(exchange, comm, 1));
}

// The tensors on the host: what is sent, and where the result goes before it is published.
void stage(Exchange& exchange, const Communicator& comm, const Call& call) {
  if (call.input.defined() && call.input.is_same(call.output)) {
    const bool is_sent = call.op != Op::kBroadcast || comm.rank() == call.peer;
    exchange.from = exchange.to = is_sent ? staged(call.input) : staged_empty(call.output);
  } else {
    exchange.from = call.input.defined() ? staged(call.input) : at::Tensor();
    exchange.to = call.output.defined() ? staged_empty(call.output) : at::Tensor();
  }
  exchange.kept = {call.output, call.input};
  if (call.output.defined()) {
    exchange.publish = publisher(exchange.to, call.output);
  }
}

}  // namespace

Exchange ExchangeCommunicator::begin(const Call& call, std::int64_t bytes, int detail) {
  Exchange exchange;
  exchange.op = name_of(call.op);
  exchange.label = call.label;
  exchange.bytes = bytes;
  exchange.fingerprint = fingerprint_of(exchange.op, call.label, bytes, detail);
  return exchange;
}

Exchange ExchangeCommunicator::exchange_of(const Call& call) const {
  Exchange exchange;
  const auto start = [&](std::int64_t bytes, int detail) {
    exchange = begin(call, bytes, detail);
    stage(exchange, *this, call);
  };
  switch (call.op) {
    case Op::kAllGather:
      start(bytes_of(call.input), 0);
      plan_gather(exchange, *this);
      break;
    case Op::kAllToAll:
      start(bytes_of(call.input) / size(), 0);
      plan_all_to_all(exchange, *this);
      break;
    case Op::kAllToAllUneven:
      start(0, static_cast<int>(call.input.scalar_type()));  // the ranks' sizes differ
      plan_uneven(exchange, *this, call);
      break;
    case Op::kReduceScatter:
    case Op::kRingReduceScatter:
      start(bytes_of(call.output), reduction_detail(call));
      plan_reduce_scatter(exchange, *this, call);
      break;
    case Op::kAllReduce:
      start(bytes_of(call.input), reduction_detail(call));
      (exchange.bytes <= kSmallAllReduceBytes ? plan_small_all_reduce : plan_large_all_reduce)(exchange,
                                                                                               *this, call);
      break;
    case Op::kReduce:
      start(bytes_of(call.input), reduction_detail(call, call.peer));
      plan_reduce(exchange, *this, call);
      break;
    case Op::kBroadcast:
      start(bytes_of(call.input), call.peer);
      plan_broadcast(exchange, *this, call);
      break;
    case Op::kSend:
    case Op::kRecv:
      start(bytes_of(call.op == Op::kSend ? call.input : call.output), 0);
      plan_message(exchange, call);
      break;
    case Op::kBarrier:
      start(1, 0);
      plan_barrier(exchange, *this);
      break;
    case Op::kAllGatherInPlace:
    case Op::kAllToAllInPlace:
      BMT_CHECK(StateError, false, name_of(call.op), ": this transport cannot be used in place");
  }
  return exchange;
}

WorkPtr ExchangeCommunicator::carry_out(Exchange exchange) {
  const auto& own = exchange.own;
  // Before it is submitted: then any thread that waits may carry it on, and share the slice with others.
  if (own.to != own.from && own.bytes > 0) {
    std::memcpy(own.to, own.from, static_cast<std::size_t>(own.bytes));
    count_copied(own.bytes);
  }
  return submit(std::move(exchange));
}

std::int64_t ExchangeCommunicator::wire_bytes(const Call& call) const {
  if (call.op != Op::kAllReduce) {
    return Transport::wire_bytes(call);
  }
  const std::int64_t bytes = bytes_of(call.input), others = size() - 1;
  const std::int64_t own = slice_of(call.input.numel(), size(), rank()).numel *
                           static_cast<std::int64_t>(call.input.element_size());
  return bytes <= kSmallAllReduceBytes ? bytes * others : bytes - own + own * others;
}

}  // namespace bmtrain
