// The NCCL library: found and opened at run time, never linked.
//
// [Note: NCCL without its header]
// Importing bmtrain needs neither a GPU nor NCCL, and building it needs no nccl.h: the few declarations below
// are NCCL's stable binary interface since 2.19, and functions are looked up by name in the library that is
// found. So one build works with every later NCCL, and tests put a library of their own in its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace bmtrain {

namespace nccl {

struct OpaqueComm;
using Comm = OpaqueComm*;
using Stream = void*;  // cudaStream_t

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,  // of a non-blocking communicator: ask CommGetAsyncError until it says otherwise
};

/// Of a call to a non-blocking communicator.
[[nodiscard]] constexpr bool is_error(Result result) {
  return result != Result::kSuccess && result != Result::kInProgress;
}

enum class Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum class Op : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

constexpr std::size_t kUniqueIdBytes = 128;
struct UniqueId {
  char bytes[kUniqueIdBytes];
};

/// ncclConfig_t as of 2.19; later libraries read as much of it as `size` says. The last field is what they
/// read where 2.19 has padding: `version` tells them to ignore it, and it is not left to chance.
struct Config {
  static constexpr int kUndefined = -2147483647 - 1;
  std::size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21900;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
};
static_assert(sizeof(Config) == 48);

/// The functions of the library that we call; names are NCCL's without "nccl".
struct Functions {
  Result (*GetVersion)(int* version);
  Result (*GetUniqueId)(UniqueId* id);
  Result (*CommInitRankConfig)(Comm* comm, int size, UniqueId id, int rank, Config* config);
  Result (*CommSplit)(Comm comm, int color, int key, Comm* result, Config* config);
  Result (*CommFinalize)(Comm comm);
  Result (*CommDestroy)(Comm comm);
  Result (*CommAbort)(Comm comm);
  Result (*CommGetAsyncError)(Comm comm, Result* error);
  const char* (*GetErrorString)(Result result);
  const char* (*GetLastError)(Comm comm);
  Result (*AllGather)(const void* from, void* to, std::size_t count, Type type, Comm comm, Stream stream);
  Result (*ReduceScatter)(const void* from, void* to, std::size_t count, Type type, Op op, Comm comm,
                          Stream stream);
  Result (*AllReduce)(const void* from, void* to, std::size_t count, Type type, Op op, Comm comm,
                      Stream stream);
  Result (*Reduce)(const void* from, void* to, std::size_t count, Type type, Op op, int root, Comm comm,
                   Stream stream);
  Result (*Broadcast)(const void* from, void* to, std::size_t count, Type type, int root, Comm comm,
                      Stream stream);
  Result (*Send)(const void* from, std::size_t count, Type type, int peer, Comm comm, Stream stream);
  Result (*Recv)(void* to, std::size_t count, Type type, int peer, Comm comm, Stream stream);
  Result (*GroupStart)();
  Result (*GroupEnd)();
};

}  // namespace nccl

/// What the library looks after, and has to end when another communicator of it has failed.
class NcclMember {
 public:
  virtual ~NcclMember() = default;
  virtual void abort(const std::string& reason) = 0;
  /// Looks for failures that came later; never blocks.
  virtual void poll() = 0;
  /// Closed or aborted: nothing is left to look after.
  [[nodiscard]] virtual bool is_over() const = 0;
};

class NcclLibrary {
 public:
  static constexpr int kOldestVersion = 21900;

  /// Opens the first of: the file named by BMTRAIN_NCCL_LIBRARY (alone, if it is set), the copy that this
  /// process has mapped already (torch's), `candidates` (where Python knows the wheel to be), and the soname.
  /// StateError, saying what was tried, if there is none, or if it is older than 2.19 or lacks a function.
  explicit NcclLibrary(const std::vector<std::string>& candidates);
  ~NcclLibrary();
  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  /// As 2.28.9 is written: 22809.
  [[nodiscard]] int version() const { return version_; }
  [[nodiscard]] const nccl::Functions& call() const { return call_; }
  /// The 128 bytes with which one rank lets the others find it. CommunicationError if NCCL cannot make them.
  [[nodiscard]] std::string make_unique_id() const;
  /// What NCCL says about a result, with the detail of the last error of this process.
  [[nodiscard]] std::string explain(nccl::Result result) const;

  // [Note: One failure ends all]
  // A rank whose communicator failed stops taking part in every collective, so the other ranks' operations on
  // other communicators can never complete; and kernels of a communicator that waits in vain keep the GPU
  // from work of others. So the first failure aborts every communicator of the process, and everybody raises.
  //
  // [Note: Who looks for failures]
  // The host waits for no operation, so nobody would see one that never completes, or an error that NCCL
  // reports later. While there are communicators, one thread polls them all. It holds no tensors of theirs
  // and takes no lock that a caller may keep for long.
  void add(std::weak_ptr<NcclMember> member);
  void abort_all(const std::string& reason);

 private:
  struct Members;

  void open(const std::vector<std::string>& candidates);
  void look_up();

  void* handle_ = nullptr;  // never closed: NCCL keeps threads
  std::string path_;
  int version_ = 0;
  nccl::Functions call_ = {};
  const std::shared_ptr<Members> members_;  // shared with the thread that polls
};

/// 22809 -> "2.28.9".
[[nodiscard]] std::string nccl_version_text(int version);

}  // namespace bmtrain
