// Communicator: one group of ranks that can exchange tensors.
//
// Every transport (a single process, shared memory, Gloo, NCCL) implements this interface; the sharded
// buffers, the Python collectives and the tests know nothing else. A communicator belongs to one purpose, so
// that collectives of different purposes overlap instead of queueing (see [Note: One communicator per
// purpose]).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bmtrain {

/// How the ranks' values are combined. 16-bit inputs accumulate in fp32, always in rank order.
enum class ReduceOp : std::uint8_t { kSum, kAvg, kMax, kMin, kProd };

/// An operation under way. wait() makes its result usable by the caller: on the CPU it blocks (the
/// caller must not hold the GIL), on CUDA it makes the current stream wait. It rethrows the error of a
/// failed operation and may be called any number of times. Tensors of the operation are kept alive by it.
class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;
  [[nodiscard]] virtual bool is_completed() = 0;
  /// Tells whether an operation that goes on after wait() is over; keeps no communicator alive.
  [[nodiscard]] virtual std::function<bool()> follow() { return {}; }
};
using WorkPtr = std::shared_ptr<Work>;

/// What this process has sent through one communicator so far. `messages` counts collectives as
/// the caller sees them; `bytes` counts payload bytes this rank put on the wire.
struct Traffic {
  std::int64_t messages = 0;
  std::int64_t bytes = 0;
};

/// What the ranks sent to this one, where it lies. Valid from the end of the operation until release().
class PeerSlices {
 public:
  virtual ~PeerSlices() = default;
  /// They were read: their owners may use the memory for something else. May be called twice.
  virtual void release() = 0;

  std::vector<const void*> by_rank;
};

/// The operations of a communicator.
enum class Op : std::uint8_t {
  kAllGather,
  kAllGatherInPlace,
  kAllToAll,
  kAllToAllInPlace,
  kAllToAllUneven,
  kReduceScatter,
  kRingReduceScatter,
  kAllReduce,
  kReduce,
  kBroadcast,
  kSend,
  kRecv,
  kBarrier,
};
/// The name in errors, records and traffic; a variant has the name of the plain operation.
[[nodiscard]] const char* name_of(Op op);

/// Elements of the slices of an all_to_all, by rank.
struct SliceCounts {
  std::vector<std::int64_t> output;  // that this rank receives from each
  std::vector<std::int64_t> input;   // that it sends to each
};

/// One operation as it was called. Where it works in place, both tensors are the same.
struct Call {
  Op op;
  at::Tensor output;  // what arrives; undefined where nothing does
  at::Tensor input;   // what is sent; likewise
  const std::string& label;
  ReduceOp reduce_op = ReduceOp::kSum;
  int peer = -1;                                  // the root, or the other rank of a message
  std::shared_ptr<PeerSlices>* slices = nullptr;  // result of kAllToAllInPlace
  const SliceCounts* counts = nullptr;            // of kAllToAllUneven

  [[nodiscard]] bool is_message() const { return op == Op::kSend || op == Op::kRecv; }
};

class Communicator {
 public:
  Communicator(int rank, int size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  /// "single", "shm", "gloo", "shm+gloo" or "nccl".
  [[nodiscard]] virtual std::string backend() const = 0;

  /// Starts any of the operations below: the one function that a transport implements for all of them.
  [[nodiscard]] virtual WorkPtr start(const Call& call) = 0;

  // Collectives. Tensors are contiguous, on the communicator's device; `label` names what the operation
  // serves (a block) in errors, records and the timeline. Sizes and dtypes are checked before data moves.

  /// output.numel() == size() * input.numel(); slice r of output is rank r's input. `input` may be
  /// this rank's slice of `output` itself (in place).
  [[nodiscard]] WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                                   const std::string& label) {
    return start({Op::kAllGather, output, input, label});
  }
  /// input.numel() == size() * output.numel(). Slice r of `output` is what rank r sent for this rank; no
  /// reduction: the caller sums (the sharded buffers do, into the gradient shard, in one pass).
  [[nodiscard]] WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                                   const std::string& label) {
    return start({Op::kAllToAll, output, input, label});
  }
  /// An all_to_all of slices of any size, also none, one after the other: this rank sends counts.input[r]
  /// elements to rank r, which has to expect as many from this one.
  [[nodiscard]] WorkPtr all_to_all_uneven(const at::Tensor& output, const at::Tensor& input,
                                          const SliceCounts& counts, const std::string& label) {
    return start({Op::kAllToAllUneven, output, input, label, ReduceOp::kSum, -1, nullptr, &counts});
  }
  /// input.numel() == size() * output.numel(); output is slice rank() of the reduction.
  [[nodiscard]] WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                       const std::string& label) {
    return start({Op::kReduceScatter, output, input, label, op});
  }
  /// As reduce_scatter by sum, with the fewest bytes between hosts: NCCL's own, which adds in the tensor's
  /// dtype and in an order of its own. Other transports make no difference.
  [[nodiscard]] WorkPtr ring_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                            const std::string& label) {
    return start({Op::kRingReduceScatter, output, input, label});
  }
  /// In place.
  [[nodiscard]] WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const std::string& label) {
    return start({Op::kAllReduce, tensor, tensor, label, op});
  }
  /// In place on `root`; unspecified contents elsewhere.
  [[nodiscard]] WorkPtr reduce(const at::Tensor& tensor, ReduceOp op, int root, const std::string& label) {
    return start({Op::kReduce, tensor, tensor, label, op, root});
  }
  /// In place.
  [[nodiscard]] WorkPtr broadcast(const at::Tensor& tensor, int root, const std::string& label) {
    return start({Op::kBroadcast, tensor, tensor, label, ReduceOp::kSum, root});
  }
  /// Blocks until every rank has arrived.
  void barrier(const std::string& label) { start({Op::kBarrier, {}, {}, label})->wait(); }

  // Point to point; messages between one pair arrive in the order they were sent.
  [[nodiscard]] WorkPtr send(const at::Tensor& tensor, int peer, const std::string& label) {
    return start({Op::kSend, {}, tensor, label, ReduceOp::kSum, peer});
  }
  [[nodiscard]] WorkPtr recv(const at::Tensor& tensor, int peer, const std::string& label) {
    return start({Op::kRecv, tensor, {}, label, ReduceOp::kSum, peer});
  }

  // Memory that ranks use in place instead of copying, where the transport knows such (ranks of one host).
  // The results, the counts and the bytes of traffic() are those of the plain operations.

  /// Whether the operations in place can be used.
  [[nodiscard]] virtual bool works_in_place() const { return false; }
  /// Memory for an all_gather's output, into which each rank copies its slice once for all; null if there is
  /// none. All ranks have to borrow alike, and to give back alike with respect to what they borrow later.
  [[nodiscard]] virtual c10::DataPtr borrow_output(std::int64_t /*nbytes*/) { return {}; }
  /// An all_gather whose output was borrowed. `input` may have another floating-point dtype: it is rounded on
  /// its way.
  [[nodiscard]] WorkPtr all_gather_in_place(const at::Tensor& output, const at::Tensor& input,
                                            const std::string& label) {
    return start({Op::kAllGatherInPlace, output, input, label});
  }
  /// Ends what borrow_output() began; freeing the memory without it makes that unusable for later gathers.
  virtual void give_back_output(const void* /*data*/, std::int64_t /*nbytes*/) {}
  /// Memory for the input of all_to_all_in_place(), or null. For 0 bytes: null, and what is idle is freed.
  [[nodiscard]] virtual c10::DataPtr borrow_input(std::int64_t /*nbytes*/) { return {}; }
  /// An all_to_all whose output stays where the ranks have it; input from elsewhere than borrow_input() is
  /// copied. `input` must not change until the other ranks have read it, which borrow_input() takes care of.
  [[nodiscard]] WorkPtr all_to_all_in_place(const at::Tensor& input, std::shared_ptr<PeerSlices>& slices,
                                            const std::string& label) {
    return start({Op::kAllToAllInPlace, {}, input, label, ReduceOp::kSum, -1, &slices});
  }
  /// Bytes that this process moved from memory to memory for its operations, since the last reset_traffic().
  [[nodiscard]] virtual std::int64_t bytes_copied() const { return 0; }
  /// Bytes of such memory that are there, used or not: this rank's own, and its share of what all ranks have
  /// together.
  [[nodiscard]] virtual std::int64_t bytes_in_place() const { return 0; }

  /// Lets go of what operations that have completed still hold, events among them. Never blocks for long.
  virtual void forget_completed() {}
  /// Waits until nothing is under way: operations, or, of a closed communicator, its end. False if that takes
  /// longer than so many seconds.
  [[nodiscard]] virtual bool settle(double /*seconds*/) { return true; }
  /// Why results that were waited for may be over data that never came; empty while all is well, and where
  /// Work::wait itself raises.
  [[nodiscard]] virtual std::string failure() const { return {}; }

  /// Makes every operation, pending or later, fail with `reason`; never blocks. After close() too.
  virtual void abort(const std::string& reason) = 0;
  /// Later operations raise StateError. Never blocks, may be called twice.
  virtual void close() = 0;
  [[nodiscard]] virtual bool closed() const = 0;

  /// Traffic per operation name ("all_gather", ...) since construction or the last reset.
  [[nodiscard]] virtual std::vector<std::pair<std::string, Traffic>> traffic() const = 0;
  virtual void reset_traffic() = 0;

 private:
  const int rank_;
  const int size_;
  const std::string name_;
};

/// What follows an all_to_all of gradients: destination = slices[0] + slices[1] + ... (+ destination if
/// `accumulate`, last), accumulated in fp32 for 16-bit dtypes and rounded once. All tensors are 1-D,
/// contiguous and of one size and device, the slices of one dtype.
void sum_slices(const at::Tensor& destination, const std::vector<at::Tensor>& slices, bool accumulate);

}  // namespace bmtrain
