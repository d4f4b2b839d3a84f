// An NCCL for one GPU: the other ranks do, with the same data, what this one does. Operations are copies on
// the stream they are given, and every stream is delayed at random, so that what is not ordered by events
// goes wrong. What it takes in is the interface of NCCL as comm/nccl/nccl_api.h has it, less what tests do
// not need.
#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.h"
#include "type_sizes.h"

using bmtrain::nccl::Config;
using bmtrain::nccl::Op;
using bmtrain::nccl::Result;
using bmtrain::nccl::Stream;
using bmtrain::nccl::Type;
using bmtrain::nccl::UniqueId;

namespace bmtrain::nccl {
struct OpaqueComm {
  int rank, size;
};
}  // namespace bmtrain::nccl
using bmtrain::nccl::Comm;

namespace {

struct Message {
  const char* from;
  char* to;
  std::size_t bytes;
  int peer;
};

std::mt19937 generator;      // NOLINT: the same delays in every run
unsigned longest_delay = 0;  // in microseconds
std::vector<Message> sends, receives;
Stream stream_of_group = nullptr;

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream); }

void delay(Stream stream) {
  if (longest_delay == 0) return;
  const auto microseconds = static_cast<std::uintptr_t>(generator() % longest_delay);
  (void)cudaLaunchHostFunc(
      native(stream),
      [](void* time) { ::usleep(static_cast<useconds_t>(reinterpret_cast<std::uintptr_t>(time))); },
      reinterpret_cast<void*>(microseconds));
}

Result copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (to == from) return Result::kSuccess;
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, native(stream));
  return error == cudaSuccess ? Result::kSuccess : Result::kUnhandledCudaError;
}

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) {
  *version = 22809;
  return Result::kSuccess;
}
Result ncclGetUniqueId(UniqueId* id) {
  std::memset(id->bytes, 0, sizeof(id->bytes));
  return Result::kSuccess;
}
Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId /*id*/, int rank, Config* /*config*/) {
  *comm = new bmtrain::nccl::OpaqueComm{rank, size};
  return Result::kSuccess;
}
Result ncclCommSplit(Comm /*comm*/, int /*color*/, int /*key*/, Comm* /*result*/, Config* /*config*/) {
  return Result::kInvalidUsage;
}
Result ncclCommFinalize(Comm /*comm*/) { return Result::kSuccess; }
Result ncclCommDestroy(Comm comm) {
  delete comm;
  return Result::kSuccess;
}
Result ncclCommAbort(Comm comm) { return ncclCommDestroy(comm); }
Result ncclCommGetAsyncError(Comm /*comm*/, Result* error) {
  *error = Result::kSuccess;
  return Result::kSuccess;
}
const char* ncclGetErrorString(Result /*result*/) { return "error of the mirror"; }
const char* ncclGetLastError(Comm /*comm*/) { return ""; }

Result ncclAllGather(const void* from, void* to, std::size_t count, Type type, Comm comm, Stream stream) {
  const std::size_t bytes = count * size_of(type);
  delay(stream);
  Result result = Result::kSuccess;
  for (int r = 0; r < comm->size && result == Result::kSuccess; ++r) {
    result = copy(static_cast<char*>(to) + static_cast<std::size_t>(r) * bytes, from, bytes, stream);
  }
  delay(stream);
  return result;
}
// All ranks have the same values: their largest, or mean, is any of them.
Result ncclAllReduce(const void* from, void* to, std::size_t count, Type type, Op /*op*/, Comm /*comm*/,
                     Stream stream) {
  delay(stream);
  return copy(to, from, count * size_of(type), stream);
}
Result ncclReduceScatter(const void* from, void* to, std::size_t count, Type type, Op /*op*/, Comm comm,
                         Stream stream) {
  const std::size_t bytes = count * size_of(type);
  delay(stream);
  return copy(to, static_cast<const char*>(from) + static_cast<std::size_t>(comm->rank) * bytes, bytes,
              stream);
}
Result ncclReduce(const void* from, void* to, std::size_t count, Type type, Op /*op*/, int /*root*/,
                  Comm /*comm*/, Stream stream) {
  return copy(to, from, count * size_of(type), stream);
}
Result ncclBroadcast(const void* from, void* to, std::size_t count, Type type, int /*root*/, Comm /*comm*/,
                     Stream stream) {
  return copy(to, from, count * size_of(type), stream);
}
Result ncclSend(const void* from, std::size_t count, Type type, int peer, Comm /*comm*/, Stream stream) {
  sends.push_back({static_cast<const char*>(from), nullptr, count * size_of(type), peer});
  stream_of_group = stream;
  return Result::kSuccess;
}
Result ncclRecv(void* to, std::size_t count, Type type, int peer, Comm /*comm*/, Stream stream) {
  receives.push_back({nullptr, static_cast<char*>(to), count * size_of(type), peer});
  stream_of_group = stream;
  return Result::kSuccess;
}
Result ncclGroupStart() { return Result::kSuccess; }
// What a peer sends is what this rank sends to itself.
Result ncclGroupEnd() {
  Result result = Result::kSuccess;
  if (!receives.empty()) delay(stream_of_group);
  for (const Message& message : receives) {
    for (const Message& sent : sends) {
      if (sent.peer == 0 && result == Result::kSuccess) {
        result = copy(message.to, sent.from, message.bytes, stream_of_group);
        break;
      }
    }
  }
  sends.clear();
  receives.clear();
  return result;
}

/// From here on every operation waits up to so many microseconds, by the numbers of this seed.
void mirror_delays(unsigned microseconds, unsigned seed) {
  longest_delay = microseconds;
  generator.seed(seed);
}

}  // extern "C"
