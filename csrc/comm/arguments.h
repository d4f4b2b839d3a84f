// What every transport checks before data moves, and how it counts what it sends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace bmtrain {

/// One operation as errors name it: `all_gather on group "zero", rank 1`.
[[nodiscard]] std::string describe(const Communicator& comm, const char* op);

/// TypeError unless `tensor` is dense and contiguous, on the CPU or a CUDA device.
void check_tensor(const Communicator& comm, const char* op, const char* argument, const at::Tensor& tensor);

/// check_tensor on both; TypeError unless dtype and device agree; ValueError unless
/// large.numel() == size * small.numel().
void check_sizes(const Communicator& comm, const char* op, const char* large_name, const at::Tensor& large,
                 const char* small_name, const at::Tensor& small);

/// What an all-to-all needs: check_tensor on both; TypeError unless dtype and device agree; ValueError unless
/// they have equal sizes that divide by the number of ranks, and are not the same memory.
void check_exchange(const Communicator& comm, const at::Tensor& output, const at::Tensor& input);

/// ValueError unless 0 <= rank < size. `argument` names it ("root", "peer").
void check_rank(const Communicator& comm, const char* op, const char* argument, int rank);

/// TypeError or ValueError unless ordered_reduce can combine values of the tensor's dtype.
void check_reducible(const Communicator& comm, const char* op, const at::Tensor& tensor, ReduceOp reduce_op);

/// A number that differs, most likely, where ranks call different operations: of other bytes, of another
/// block, or with another `detail` (a root, a reduction).
[[nodiscard]] std::uint64_t fingerprint(std::string_view op, std::string_view label, std::int64_t bytes,
                                        int detail);

/// Thread-safe counters behind Communicator::traffic.
class TrafficCounter {
 public:
  void add(const char* op, std::int64_t bytes);
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> snapshot() const;
  void reset();

 private:
  mutable std::mutex mutex_;  // protects counts_
  std::map<std::string, Traffic> counts_;
};

}  // namespace bmtrain
