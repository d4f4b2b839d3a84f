// A device and an NCCL library for tests, in one shared library that needs neither a GPU nor NCCL.
//
// Streams are queues of steps; a step runs when its condition holds. An operation of NCCL runs when every
// rank of its communicator has issued the one with the same number: then data moves between the ranks, which
// are threads or objects of one process. Tests make a function return a result, an operation never complete,
// or a communicator report an error later, by the functions at the end.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/nccl/nccl_api.h"
#include "common/device_runtime.h"
#include "fake_cliques.h"
#include "fake_device.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 22809
#endif

extern "C" {

Result ncclGetVersion(int* version) {
  *version = FAKE_VERSION;
  return called("GetVersion");
}

Result ncclGetUniqueId(UniqueId* id) {
  static int last = 0;
  const std::lock_guard lock(mutex);
  std::memset(id->bytes, 0, sizeof(id->bytes));
  const std::string text = "fake " + std::to_string(++last);
  std::copy(text.begin(), text.end(), id->bytes);
  return called("GetUniqueId");
}

#if FAKE_VERSION >= 21900
Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, Config* config) {
  const std::lock_guard lock(mutex);
  const Result result = called("CommInitRankConfig");
  if (result != Result::kSuccess) return result;
  if (config->magic != 0xcafebeef || config->blocking != 0) return Result::kInvalidArgument;
  auto& clique = cliques[id.bytes];
  if (clique == nullptr) clique = std::make_shared<Clique>(Clique{size, {}, {}});
  return open(clique, rank, comm);
}

Result ncclCommSplit(Comm comm, int color, int key, Comm* result, Config* /*config*/) {
  const std::lock_guard lock(mutex);
  const Result wanted = called("CommSplit");
  if (wanted != Result::kSuccess) return wanted;
  const std::string name = std::to_string(comm->num_splits++) + "/" + std::to_string(color);
  auto& part = comm->clique->parts[name];
  if (part == nullptr) part = std::make_shared<Clique>(Clique{0, {}, {}});
  part->size += 1;  // tests split on all ranks before they use the parts
  *result = nullptr;
  comm->part_to = is_in_progress ? result : nullptr;
  return open(part, key, is_in_progress ? &comm->part : result);
}
#endif

Result ncclCommFinalize(Comm /*comm*/) {
  const std::lock_guard lock(mutex);
  return is_in_progress || is_stuck ? Result::kInProgress : called("CommFinalize");
}

Result ncclCommDestroy(Comm comm) {
  const std::lock_guard lock(mutex);
  const Result result = called("CommDestroy");
  if (result == Result::kSuccess) {
    num_destroyed += 1;
    std::erase(all_comms, comm);
    delete comm;
  }
  return result;
}

Result ncclCommAbort(Comm comm) {
  const std::lock_guard lock(mutex);
  num_aborted += 1;
  std::erase(grouped, comm);
  std::erase(all_comms, comm);  // and its registrations with it
  *comm->is_aborted = true;     // kernels end, and do nothing more
  if (comm->part_to != nullptr) *comm->part_to = comm->part;
  delete comm;
  return called("CommAbort");
}

Result ncclCommGetAsyncError(Comm /*comm*/, Result* error) {
  const std::lock_guard lock(mutex);
  *error = async_error != Result::kSuccess ? async_error
           : is_in_progress                ? Result::kInProgress
                                           : Result::kSuccess;
  return called("CommGetAsyncError");
}

const char* ncclGetErrorString(Result result) {
  return result == Result::kRemoteError ? "remote process exited or there was a network error" : "fake error";
}

const char* ncclGetLastError(Comm /*comm*/) { return ""; }

Result ncclGroupStart() {
  mutex.lock();  // until the end: groups of other threads come before or after
  const Result result = called("GroupStart");
  if (result == Result::kSuccess) {
    ++depth;
  } else {
    mutex.unlock();
  }
  return result;
}

Result ncclGroupEnd() {
  const Result result = called("GroupEnd");
  if (--depth == 0) {
    for (Comm comm : std::exchange(grouped, {})) {
      if (result == Result::kSuccess) launch(comm);
    }
  }
  mutex.unlock();
  return result == Result::kSuccess && is_in_progress ? Result::kInProgress : result;
}

Result ncclAllGather(const void* from, void* to, std::size_t count, Type type, Comm comm,
                     bmtrain::nccl::Stream stream) {
  return issue({"AllGather", static_cast<const char*>(from), static_cast<char*>(to), count, type}, comm,
               stream);
}

Result ncclReduceScatter(const void* from, void* to, std::size_t count, Type type, Op op, Comm comm,
                         bmtrain::nccl::Stream stream) {
  return issue({"ReduceScatter", static_cast<const char*>(from), static_cast<char*>(to), count, type, op},
               comm, stream);
}

Result ncclAllReduce(const void* from, void* to, std::size_t count, Type type, Op op, Comm comm,
                     bmtrain::nccl::Stream stream) {
  return issue({"AllReduce", static_cast<const char*>(from), static_cast<char*>(to), count, type, op}, comm,
               stream);
}

Result ncclReduce(const void* from, void* to, std::size_t count, Type type, Op op, int root, Comm comm,
                  bmtrain::nccl::Stream stream) {
  return issue({"Reduce", static_cast<const char*>(from), static_cast<char*>(to), count, type, op, root},
               comm, stream);
}

Result ncclBroadcast(const void* from, void* to, std::size_t count, Type type, int root, Comm comm,
                     bmtrain::nccl::Stream stream) {
  return issue(
      {"Broadcast", static_cast<const char*>(from), static_cast<char*>(to), count, type, Op::kSum, root},
      comm, stream);
}

Result ncclSend(const void* from, std::size_t count, Type type, int peer, Comm comm,
                bmtrain::nccl::Stream stream) {
  return issue({"Send", static_cast<const char*>(from), nullptr, count, type, Op::kSum, peer}, comm, stream);
}

Result ncclRecv(void* to, std::size_t count, Type type, int peer, Comm comm, bmtrain::nccl::Stream stream) {
  return issue({"Recv", nullptr, static_cast<char*>(to), count, type, Op::kSum, peer}, comm, stream);
}

// ---- for tests
// -----------------------------------------------------------------------------------------------------

bmtrain::DeviceRuntime* bmtrain_device_runtime() {
  static Runtime runtime;
  return &runtime;
}

void fake_fail(const char* name, int result, int calls_before) {
  const std::lock_guard lock(mutex);
  faults[name] = {static_cast<Result>(result), calls_before};
}
/// The device fails once, after so many marks in its streams.
void fake_fail_record(int records_before) {
  const std::lock_guard lock(mutex);
  records_before_failure = records_before;
}
void fake_async_error(int result) {
  const std::lock_guard lock(mutex);
  async_error = static_cast<Result>(result);
}
void fake_stuck(int operations, int calls) {
  const std::lock_guard lock(mutex);
  is_stuck = operations != 0;
  is_in_progress = calls != 0;
}
void fake_mirror(int on) {
  const std::lock_guard lock(mutex);
  is_mirrored = on != 0;
}
void fake_lazy(int on) {
  const std::lock_guard lock(mutex);
  is_lazy = on != 0;
}
void fake_note(const char* line) {
  const std::lock_guard lock(mutex);
  note(line);
}
/// How often somebody asked whether an event had happened.
int fake_asked() {
  const std::lock_guard lock(mutex);
  return num_asked;
}
/// How often somebody did and held the interpreter's lock.
int fake_asked_with_lock() {
  const std::lock_guard lock(mutex);
  return num_asked_with_lock;
}
// The journal since the last call.
const char* fake_journal() {
  static std::string shown;
  const std::lock_guard lock(mutex);
  shown = std::exchange(journal, {});
  return shown.c_str();
}
int fake_calls(const char* name) {
  const std::lock_guard lock(mutex);
  return num_calls[name];
}
int fake_open() {
  const std::lock_guard lock(mutex);
  return num_open - num_aborted - num_destroyed;
}
int fake_aborted() {
  const std::lock_guard lock(mutex);
  return num_aborted;
}
void fake_reset() {
  const std::lock_guard lock(mutex);
  faults.clear();
  num_calls.clear();
  cliques.clear();
  streams.clear();
  num_resets += 1;
  num_asked_with_lock = 0;
  records_before_failure = -1;
  async_error = Result::kSuccess;
  is_stuck = is_in_progress = is_mirrored = is_lazy = false;
  journal.clear();
  num_open = num_aborted = num_destroyed = 0;
}

}  // extern "C"
