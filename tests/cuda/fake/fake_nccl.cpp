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

#include "comm/nccl_api.h"
#include "common/device_runtime.h"
#include "type_sizes.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION 22809
#endif

using bmtrain::nccl::Config;
using bmtrain::nccl::Op;
using bmtrain::nccl::Result;
using bmtrain::nccl::Type;
using bmtrain::nccl::UniqueId;

namespace {

std::recursive_mutex mutex;  // protects everything in this file

// ---- the device
// ----------------------------------------------------------------------------------------------------

struct Step {
  std::function<bool()> is_ready;
  std::function<void()> run;
};
struct Stream {
  std::deque<Step> steps;
  std::int64_t num_done = 0, num_queued = 0;
};
std::map<std::int64_t, Stream> streams;  // 0: everybody's current stream
bool is_lazy =
    false;  // tensor operations of other streams run when somebody has to wait for them, not before
bool is_forced = false;

void advance() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [id, stream] : streams) {
      while (!stream.steps.empty() && stream.steps.front().is_ready()) {
        const Step step = std::move(stream.steps.front());
        stream.steps.pop_front();
        step.run();
        stream.num_done += 1;
        moved = true;
      }
    }
  }
}

std::string journal;  // what was asked of streams and events, and of NCCL, line by line

void note(const std::string& line) { journal += line + "\n"; }

void enqueue(std::int64_t id, Step step) {
  streams[id].steps.push_back(std::move(step));
  streams[id].num_queued += 1;
}

std::int64_t last_event = 0;
int num_resets = 0;  // what was marked before the last one has happened

class Event final : public bmtrain::DeviceEvent {
 public:
  void record(std::int64_t stream) override {
    const std::lock_guard lock(mutex);
    id_ = ++last_event;
    note("event " + std::to_string(id_) + " on " + std::to_string(stream));
    stream_ = stream;
    position_ = streams[stream].num_queued;
    reset_ = num_resets;
  }
  void block(std::int64_t stream) override {
    const std::lock_guard lock(mutex);
    // What is computed in the caller's stream is computed at once.
    const bool was_forced = std::exchange(is_forced, is_forced || stream == 0);
    note(std::to_string(stream) + " waits for event " + std::to_string(id_));
    enqueue(stream, {[id = stream_, position = position_, reset = reset_] {
                       return reset != num_resets || streams[id].num_done >= position;
                     },
                     [] {}});
    advance();
    is_forced = was_forced;
  }
  [[nodiscard]] bool is_complete() override {
    const std::lock_guard lock(mutex);
    const bool was_forced = std::exchange(is_forced, true);
    advance();
    is_forced = was_forced;
    return reset_ != num_resets || streams[stream_].num_done >= position_;
  }

 private:
  std::int64_t id_ = 0, stream_ = 0, position_ = 0;
  int reset_ = 0;
};

class Runtime final : public bmtrain::DeviceRuntime {
 public:
  [[nodiscard]] std::int64_t make_stream() override {
    const std::lock_guard lock(mutex);
    return ++last_;
  }
  [[nodiscard]] std::int64_t current_stream() override { return 0; }
  [[nodiscard]] void* native_handle(std::int64_t stream) override { return reinterpret_cast<void*>(stream); }
  [[nodiscard]] std::unique_ptr<bmtrain::DeviceEvent> make_event() override {
    return std::make_unique<Event>();
  }
  void synchronize() override {
    const std::lock_guard lock(mutex);
    note("synchronize");
    is_forced = true;
    advance();
    is_forced = false;
  }
  void run_on(std::int64_t stream, std::function<void()> work) override {
    const std::lock_guard lock(mutex);
    note("work on " + std::to_string(stream));
    enqueue(stream, {[] { return !is_lazy || is_forced; }, std::move(work)});
    advance();
  }

 private:
  std::int64_t last_ = 0;
};

// ---- what tests ask for
// --------------------------------------------------------------------------------------------

struct Fault {
  Result result = Result::kSuccess;
  int calls_before = 0;
};
std::map<std::string, Fault> faults;
std::map<std::string, int> num_calls;
Result async_error = Result::kSuccess;
bool is_stuck = false;                   // operations never complete
bool is_mirrored = false;                // the other ranks do, with the same data, what one rank does
bool is_in_progress = false;             // calls stay in progress
std::map<void*, std::size_t> allocated;  // by ncclMemAlloc
int num_misused = 0;  // freed while registered, deregistered twice, destroyed with registrations
int num_open = 0, num_aborted = 0, num_destroyed = 0;

Result called(const std::string& name) {
  num_calls[name] += 1;
  const auto found = faults.find(name);
  if (found == faults.end() || found->second.calls_before-- > 0) {
    return Result::kSuccess;
  }
  return found->second.result;
}

// ---- NCCL
// ----------------------------------------------------------------------------------------------------------

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

}  // namespace

namespace bmtrain::nccl {
struct OpaqueComm {
  std::shared_ptr<Clique> clique;
  int rank;
  std::int64_t num_issued = 0, num_splits = 0;
  std::vector<Call> group;
  Stream stream = nullptr;
  std::map<void*, void*> registered = {};  // memory by handle
  std::shared_ptr<bool> is_aborted = std::make_shared<bool>(false);
};
}  // namespace bmtrain::nccl
using bmtrain::nccl::Comm;

namespace {

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
  if (result != Result::kSuccess) {
    return result;
  }
  comm->stream = stream;
  comm->group.push_back(std::move(call));
  if (std::find(grouped.begin(), grouped.end(), comm) == grouped.end()) {
    grouped.push_back(comm);
  }
  return Result::kSuccess;
}

Result open(const std::shared_ptr<Clique>& clique, int rank, Comm* comm) {
  *comm = new bmtrain::nccl::OpaqueComm{clique, rank, 0, 0, {}, nullptr};
  all_comms.push_back(*comm);
  num_open += 1;
  return is_in_progress ? Result::kInProgress : Result::kSuccess;
}

}  // namespace

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
  return open(part, key, result);
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
    num_misused += comm->registered.empty() ? 0 : 1;
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

#ifndef FAKE_WITHOUT_MEMORY
Result ncclMemAlloc(void** memory, std::size_t size) {
  const std::lock_guard lock(mutex);
  const Result result = called("MemAlloc");
  if (result != Result::kSuccess) return result;
  *memory = std::malloc(size);
  allocated[*memory] = size;
  return Result::kSuccess;
}

Result ncclMemFree(void* memory) {
  const std::lock_guard lock(mutex);
  num_misused += allocated.erase(memory) == 1 ? 0 : 1;
  for (Comm comm : all_comms) {
    for (const auto& [handle, registered] : comm->registered) num_misused += registered == memory ? 1 : 0;
  }
  std::free(memory);
  return called("MemFree");
}

Result ncclCommRegister(Comm comm, void* memory, std::size_t size, void** handle) {
  const std::lock_guard lock(mutex);
  const Result result = called("CommRegister");
  if (result != Result::kSuccess) return result;
  static std::intptr_t last = 0;
  *handle = reinterpret_cast<void*>(++last);
  num_misused += allocated.count(memory) == 1 && allocated[memory] == size ? 0 : 1;
  comm->registered[*handle] = memory;
  return Result::kSuccess;
}

Result ncclCommDeregister(Comm comm, void* handle) {
  const std::lock_guard lock(mutex);
  num_misused += comm->registered.erase(handle) == 1 ? 0 : 1;
  return called("CommDeregister");
}
#endif

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
/// Pieces of memory of ncclMemAlloc, and registrations, that there are; and what was done wrong with them.
int fake_allocated() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(allocated.size());
}
int fake_registered() {
  const std::lock_guard lock(mutex);
  std::size_t count = 0;
  for (Comm comm : all_comms) count += comm->registered.size();
  return static_cast<int>(count);
}
int fake_misused() {
  const std::lock_guard lock(mutex);
  return num_misused;
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
  num_misused = 0;
  async_error = Result::kSuccess;
  is_stuck = is_in_progress = is_mirrored = is_lazy = false;
  journal.clear();
  num_open = num_aborted = num_destroyed = 0;
}

}  // extern "C"
