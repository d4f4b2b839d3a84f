// An NCCL between processes that each have a simulated device: what comm/nccl/nccl_api.h calls of it.
// Operations are work of the stream they are given; data goes through files in SIMULATED_NCCL_FOLDER
// (default: /dev/shm), which is the caller's to empty.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../fake/type_sizes.h"
#include "comm/nccl/nccl_api.h"

using bmtrain::nccl::Comm;
using bmtrain::nccl::Config;
using bmtrain::nccl::Op;
using bmtrain::nccl::Result;
using bmtrain::nccl::Stream;
using bmtrain::nccl::Type;
using bmtrain::nccl::UniqueId;

namespace {

/// One message at a time from one rank to another.
struct Slot {
  std::atomic<std::uint64_t> num_written, num_read;
  std::uint64_t bytes;
  char data[(std::size_t{8} << 20) - 24];
};

Slot* open_slot(const std::string& name) {
  const char* const folder = std::getenv("SIMULATED_NCCL_FOLDER");
  const std::string path = std::string(folder == nullptr ? "/dev/shm" : folder) + "/" + name;
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Slot)) != 0) std::abort();
  void* const memory = mmap(nullptr, sizeof(Slot), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<Slot*>(memory);
}

struct Message {
  char* at;
  std::size_t bytes;
  int peer;
  std::size_t moved = 0;
  bool is_first = true;  // a message of no bytes is sent too
  [[nodiscard]] bool is_done() const { return moved == bytes && !is_first; }
};

}  // namespace

namespace bmtrain::nccl {
struct OpaqueComm {
  int rank = 0, size = 0;
  std::string name;
  std::atomic<bool> is_aborted = false;
  std::atomic<Result> state = Result::kInProgress;
  int num_splits = 0;
  std::mutex mutex;  // protects `slots`
  std::map<std::pair<int, int>, Slot*> slots;

  Slot& slot(int from, int to) {
    const std::lock_guard lock(mutex);
    Slot*& found = slots[{from, to}];
    if (found == nullptr) found = open_slot(name + "." + std::to_string(from) + "." + std::to_string(to));
    return *found;
  }

  bool send(Message& message) {
    Slot& to = slot(rank, message.peer);
    if (message.is_done() || to.num_read != to.num_written) return false;
    to.bytes = std::min(message.bytes - message.moved, sizeof(to.data));
    std::memcpy(to.data, message.at + message.moved, to.bytes);
    message.moved += to.bytes;
    message.is_first = false;
    to.num_written += 1;
    return true;
  }

  bool receive(Message& message) {
    Slot& from = slot(message.peer, rank);
    if (message.is_done() || from.num_read == from.num_written) return false;
    if (from.bytes > message.bytes - message.moved) std::abort();  // a real one would write past the end
    std::memcpy(message.at + message.moved, from.data, from.bytes);
    message.moved += from.bytes;
    message.is_first = false;
    from.num_read += 1;
    return true;
  }

  /// All of them, in any order between peers and in the given one of each peer. False if it was aborted.
  bool exchange(std::vector<Message> sends, std::vector<Message> receives) {
    for (;;) {
      if (is_aborted) return false;  // nothing more of it: a peer would take it for the operation before
      bool has_moved = false, is_done = true;
      std::vector<bool> busy_to(static_cast<std::size_t>(size)), busy_from(busy_to);
      for (Message& message : sends) {
        const auto peer = static_cast<std::size_t>(message.peer);
        if (!busy_to[peer]) has_moved |= send(message);
        if (!message.is_done()) busy_to[peer] = true, is_done = false;
      }
      for (Message& message : receives) {
        const auto peer = static_cast<std::size_t>(message.peer);
        if (!busy_from[peer]) has_moved |= receive(message);
        if (!message.is_done()) busy_from[peer] = true, is_done = false;
      }
      if (is_done) return true;
      if (!has_moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  /// Everybody's `bytes` at `mine`, by rank.
  std::vector<char> gather(const void* mine, std::size_t bytes) {
    std::vector<char> all(bytes * static_cast<std::size_t>(size));
    std::vector<Message> sends, receives;
    for (int peer = 0; peer < size; ++peer) {
      sends.push_back({const_cast<char*>(static_cast<const char*>(mine)), bytes, peer});
      receives.push_back({all.data() + bytes * static_cast<std::size_t>(peer), bytes, peer});
    }
    exchange(std::move(sends), std::move(receives));
    return all;
  }
};
}  // namespace bmtrain::nccl

namespace {

thread_local std::string last_text;
thread_local int group_depth = 0;

struct Grouped {
  std::vector<Message> sends, receives;
};
thread_local std::map<std::pair<Comm, Stream>, Grouped> grouped;

Result refuse(const std::string& text) {
  last_text = "simulated NCCL: " + text;
  return Result::kInvalidArgument;
}

/// Gives `work` to the stream.
Result enqueue(Stream stream, std::function<void()> work) {
  auto* const owned = new std::function<void()>(std::move(work));
  const cudaError_t error = cudaLaunchHostFunc(
      static_cast<cudaStream_t>(stream),
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(argument));
        (*mine)();
      },
      owned);
  return error == cudaSuccess ? Result::kSuccess : Result::kUnhandledCudaError;
}

bool is_on_device(const void* address) {
  cudaPointerAttributes attributes;
  return cudaPointerGetAttributes(&attributes, address) == cudaSuccess &&
         attributes.type == cudaMemoryTypeDevice;
}

Result check(Comm comm, std::initializer_list<const void*> buffers, std::size_t count) {
  if (comm->is_aborted) return refuse("the communicator is aborted");
  if (comm->state != Result::kSuccess) return refuse("the communicator is not ready");
  for (const void* const buffer : buffers) {
    if (count > 0 && !is_on_device(buffer)) return refuse("a buffer is not on the device");
  }
  return Result::kSuccess;
}

struct Bf16 {
  std::uint16_t bits;
};
float as_number(_Float16 x) { return static_cast<float>(x); }
float as_number(Bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
template <typename T>
T as_number(T x) {
  return x;
}

template <typename T, typename Number>
T rounded(Number value) {
  if constexpr (std::is_same_v<T, Bf16>) {
    auto bits = std::bit_cast<std::uint32_t>(value);
    if (value == value) bits += 0x7fff + (bits >> 16 & 1);
    return {static_cast<std::uint16_t>(bits >> 16)};
  } else {
    return static_cast<T>(value);
  }
}

/// to = the reduction of `size` pieces of `count` elements, in the order of ranks, rounded after each.
template <typename T>
void reduce(T* to, const T* from, std::size_t count, int size, Op op) {
  for (std::size_t i = 0; i < count; ++i) {
    T total = from[i];
    for (int r = 1; r < size; ++r) {
      const auto a = as_number(total), b = as_number(from[static_cast<std::size_t>(r) * count + i]);
      total = rounded<T>(op == Op::kProd  ? a * b
                         : op == Op::kMax ? (b > a || b != b ? b : a)
                         : op == Op::kMin ? (b < a || b != b ? b : a)
                                          : a + b);
    }
    using Number = decltype(as_number(total));
    to[i] = op == Op::kAvg ? rounded<T>(as_number(total) / static_cast<Number>(size)) : total;
  }
}

void reduce(void* to, const void* from, std::size_t count, int size, Type type, Op op) {
  const auto with = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    reduce(typed, static_cast<const T*>(from), count, size, op);
  };
  switch (type) {
    case Type::kInt8:
      return with(static_cast<std::int8_t*>(to));
    case Type::kUint8:
      return with(static_cast<std::uint8_t*>(to));
    case Type::kInt32:
      return with(static_cast<std::int32_t*>(to));
    case Type::kUint32:
      return with(static_cast<std::uint32_t*>(to));
    case Type::kInt64:
      return with(static_cast<std::int64_t*>(to));
    case Type::kUint64:
      return with(static_cast<std::uint64_t*>(to));
    case Type::kFloat16:
      return with(static_cast<_Float16*>(to));
    case Type::kFloat32:
      return with(static_cast<float*>(to));
    case Type::kFloat64:
      return with(static_cast<double*>(to));
    case Type::kBfloat16:
      return with(static_cast<Bf16*>(to));
  }
}

/// Every rank gives `count` elements and, if it is among the receivers, gets the reduction.
Result reduce_to(const void* from, void* to, std::size_t count, Type type, Op op, Comm comm, Stream stream,
                 bool receives) {
  return enqueue(stream, [=] {
    const std::vector<char> all = comm->gather(from, count * size_of(type));
    if (receives && !comm->is_aborted) reduce(to, all.data(), count, comm->size, type, op);
  });
}

/// Runs `meet` aside; the communicator is ready when it has returned.
void connect(Comm comm, std::function<void()> meet) {
  std::thread([comm, meet = std::move(meet)] {
    meet();
    if (!comm->is_aborted) comm->state = Result::kSuccess;
  }).detach();
}

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) {
  *version = 22809;
  return Result::kSuccess;
}

Result ncclGetUniqueId(UniqueId* id) {
  static int count = 0;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::string text = "simulated-nccl-" + std::to_string(getpid()) + "-" + std::to_string(now) + "-" +
                           std::to_string(++count);
  std::copy(text.begin(), text.end(), id->bytes);
  return Result::kSuccess;
}

Result ncclCommInitRankConfig(Comm* result, int size, UniqueId id, int rank, Config* config) {
  if (config->blocking != 0) return refuse("blocking communicators are not simulated");
  const Comm comm = *result = new bmtrain::nccl::OpaqueComm();  // never freed: work may refer to it
  comm->rank = rank;
  comm->size = size;
  comm->name = id.bytes;
  connect(comm, [comm] { comm->gather("", 0); });
  return Result::kInProgress;
}

Result ncclCommSplit(Comm parent, int color, int key, Comm* result, Config* /*config*/) {
  const Comm comm = *result = new bmtrain::nccl::OpaqueComm();
  const int number = parent->num_splits++;
  connect(comm, [=] {
    const int mine[] = {color, key};
    const std::vector<char> bytes = parent->gather(mine, sizeof(mine));
    const auto* const all = reinterpret_cast<const int*>(bytes.data());
    for (int r = 0; r < parent->size; ++r) {
      if (all[2 * r] != color) continue;
      comm->size += 1;
      comm->rank += std::pair(all[2 * r + 1], r) < std::pair(key, parent->rank) ? 1 : 0;
    }
    comm->name = parent->name + "-" + std::to_string(number) + "-" + std::to_string(color);
    comm->gather("", 0);
  });
  return Result::kInProgress;
}

Result ncclCommFinalize(Comm /*comm*/) { return Result::kSuccess; }
Result ncclCommDestroy(Comm /*comm*/) { return Result::kSuccess; }
Result ncclCommAbort(Comm comm) {
  comm->is_aborted = true;
  return Result::kSuccess;
}
Result ncclCommGetAsyncError(Comm comm, Result* error) {
  *error = comm->state;
  return Result::kSuccess;
}
const char* ncclGetErrorString(Result result) {
  return result == Result::kInvalidArgument ? "invalid argument" : "error of the simulated NCCL";
}
const char* ncclGetLastError(Comm /*comm*/) { return last_text.c_str(); }

Result ncclAllGather(const void* from, void* to, std::size_t count, Type type, Comm comm, Stream stream) {
  const Result result = check(comm, {from, to}, count);
  if (result != Result::kSuccess) return result;
  return enqueue(stream, [=] {
    const std::vector<char> all = comm->gather(from, count * size_of(type));
    if (!comm->is_aborted) std::memcpy(to, all.data(), all.size());
  });
}

Result ncclAllReduce(const void* from, void* to, std::size_t count, Type type, Op op, Comm comm,
                     Stream stream) {
  const Result result = check(comm, {from, to}, count);
  return result != Result::kSuccess ? result : reduce_to(from, to, count, type, op, comm, stream, true);
}

Result ncclReduce(const void* from, void* to, std::size_t count, Type type, Op op, int root, Comm comm,
                  Stream stream) {
  const Result result = check(comm, {from}, count);
  if (result != Result::kSuccess) return result;
  return reduce_to(from, to, count, type, op, comm, stream, comm->rank == root);
}

Result ncclReduceScatter(const void* from, void* to, std::size_t count, Type type, Op op, Comm comm,
                         Stream stream) {
  const Result result = check(comm, {from, to}, count);
  if (result != Result::kSuccess) return result;
  return enqueue(stream, [=] {
    const std::size_t bytes = count * size_of(type);
    const std::vector<char> all = comm->gather(from, bytes * static_cast<std::size_t>(comm->size));
    if (comm->is_aborted) return;
    std::vector<char> mine;
    for (int r = 0; r < comm->size; ++r) {
      const auto whole = all.begin() + static_cast<std::ptrdiff_t>(bytes) * (r * comm->size + comm->rank);
      mine.insert(mine.end(), whole, whole + static_cast<std::ptrdiff_t>(bytes));
    }
    reduce(to, mine.data(), count, comm->size, type, op);
  });
}

Result ncclBroadcast(const void* from, void* to, std::size_t count, Type type, int root, Comm comm,
                     Stream stream) {
  const Result result = check(comm, {to}, count);
  if (result != Result::kSuccess) return result;
  return enqueue(stream, [=] {
    const std::size_t bytes = count * size_of(type);
    std::vector<Message> sends, receives;
    if (comm->rank == root) {
      for (int peer = 0; peer < comm->size; ++peer) {
        if (peer != root) sends.push_back({const_cast<char*>(static_cast<const char*>(from)), bytes, peer});
      }
      if (to != from) std::memmove(to, from, bytes);
    } else {
      receives.push_back({static_cast<char*>(to), bytes, root});
    }
    comm->exchange(std::move(sends), std::move(receives));
  });
}

Result ncclGroupStart() {
  group_depth += 1;
  return Result::kSuccess;
}

Result ncclGroupEnd() {
  if (--group_depth > 0) return Result::kSuccess;
  Result result = Result::kSuccess;
  for (auto& [place, messages] : std::exchange(grouped, {})) {
    const Result one = enqueue(place.second, [comm = place.first, messages = std::move(messages)] {
      comm->exchange(messages.sends, messages.receives);
    });
    if (result == Result::kSuccess) result = one;
  }
  return result;
}

Result ncclSend(const void* from, std::size_t count, Type type, int peer, Comm comm, Stream stream) {
  const Result result = check(comm, {from}, count);
  if (result != Result::kSuccess) return result;
  ncclGroupStart();
  grouped[{comm, stream}].sends.push_back(
      {const_cast<char*>(static_cast<const char*>(from)), count * size_of(type), peer});
  return ncclGroupEnd();
}

Result ncclRecv(void* to, std::size_t count, Type type, int peer, Comm comm, Stream stream) {
  const Result result = check(comm, {to}, count);
  if (result != Result::kSuccess) return result;
  ncclGroupStart();
  grouped[{comm, stream}].receives.push_back({static_cast<char*>(to), count * size_of(type), peer});
  return ncclGroupEnd();
}

}  // extern "C"
