#include "comm/arguments.h"

#include "common/check.h"

namespace bmtrain {

WorkPtr Communicator::all_to_all_in_place(at::Tensor /*input*/, std::shared_ptr<PeerSlices>& /*slices*/,
                                          const std::string& /*label*/) {
  throw StateError(describe(*this, "all_to_all") + ": this transport cannot be used in place");
}

std::string describe(const Communicator& comm, const char* op) {
  return detail::join(op, " on group \"", comm.name(), "\", rank ", comm.rank(), " of ", comm.size());
}

void check_tensor(const Communicator& comm, const char* op, const char* argument, const at::Tensor& tensor) {
  BMT_CHECK(TypeError, tensor.defined(), describe(comm, op), ": ", argument, " must be a tensor, got None");
  BMT_CHECK(TypeError, tensor.layout() == at::kStrided, describe(comm, op), ": ", argument,
            " must be a dense tensor, got layout ", tensor.layout());
  BMT_CHECK(TypeError, !tensor.is_quantized(), describe(comm, op), ": ", argument,
            " must not be quantised (its scale would stay behind), got ", tensor.scalar_type());
  BMT_CHECK(TypeError, tensor.device().is_cpu() || tensor.device().is_cuda(), describe(comm, op), ": ",
            argument, " must be on the CPU or a CUDA device, got ", tensor.device());
  BMT_CHECK(TypeError, tensor.is_contiguous(), describe(comm, op), ": ", argument,
            " must be contiguous, got shape ", tensor.sizes(), " with strides ", tensor.strides());
}

void check_sizes(const Communicator& comm, const char* op, const char* large_name, const at::Tensor& large,
                 const char* small_name, const at::Tensor& small) {
  check_tensor(comm, op, large_name, large);
  check_tensor(comm, op, small_name, small);
  BMT_CHECK(TypeError, large.scalar_type() == small.scalar_type(), describe(comm, op), ": ", large_name,
            " and ", small_name, " must have the same dtype, got ", large.scalar_type(), " and ",
            small.scalar_type());
  BMT_CHECK(TypeError, large.device() == small.device(), describe(comm, op), ": ", large_name, " and ",
            small_name, " must be on the same device, got ", large.device(), " and ", small.device());
  BMT_CHECK(ValueError, large.numel() == comm.size() * small.numel(), describe(comm, op), ": ", large_name,
            " must have ", comm.size(), " * ", small.numel(), " = ", comm.size() * small.numel(),
            " elements (group size times ", small_name, "), got ", large.numel());
}

void check_exchange(const Communicator& comm, const at::Tensor& output, const at::Tensor& input) {
  check_tensor(comm, "all_to_all", "output", output);
  check_tensor(comm, "all_to_all", "input", input);
  BMT_CHECK(TypeError, output.scalar_type() == input.scalar_type() && output.device() == input.device(),
            describe(comm, "all_to_all"), ": output and input must have the same dtype and device, got ",
            output.scalar_type(), " on ", output.device(), " and ", input.scalar_type(), " on ",
            input.device());
  BMT_CHECK(ValueError, output.numel() == input.numel() && input.numel() % comm.size() == 0,
            describe(comm, "all_to_all"), ": output and input must have equal sizes divisible by ",
            comm.size(), ", got ", output.numel(), " and ", input.numel(), " elements");
  BMT_CHECK(ValueError, input.numel() == 0 || output.data_ptr() != input.data_ptr(),
            describe(comm, "all_to_all"), ": output must not be input");
}

void check_rank(const Communicator& comm, const char* op, const char* argument, int rank) {
  BMT_CHECK(ValueError, 0 <= rank && rank < comm.size(), describe(comm, op), ": ", argument,
            " must be a rank of the group, 0 to ", comm.size() - 1, ", got ", rank);
}

void check_reducible(const Communicator& comm, const char* op, const at::Tensor& tensor, ReduceOp reduce_op) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return;
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
      BMT_CHECK(ValueError, reduce_op != ReduceOp::kAvg, describe(comm, op),
                ": op \"avg\" needs a floating-point tensor, got ", tensor.scalar_type());
      return;
    default:
      BMT_CHECK(TypeError, false, describe(comm, op),
                ": expected a dtype of bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32 or "
                "float64 for a reduction, got ",
                tensor.scalar_type());
  }
}

std::uint64_t fingerprint(std::string_view op, std::string_view label, std::int64_t bytes, int detail) {
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

void TrafficCounter::add(const char* op, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Traffic& count = counts_[op];
  count.messages += 1;
  count.bytes += bytes;
}

std::vector<std::pair<std::string, Traffic>> TrafficCounter::snapshot() const {
  const std::lock_guard lock(mutex_);
  return {counts_.begin(), counts_.end()};
}

void TrafficCounter::reset() {
  const std::lock_guard lock(mutex_);
  counts_.clear();
}

}  // namespace bmtrain
