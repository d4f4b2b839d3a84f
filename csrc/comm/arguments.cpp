#include "comm/arguments.h"

#include <algorithm>
#include <iterator>

#include "common/check.h"

namespace bmtrain {
namespace {

// TypeError unless `tensor` is dense and contiguous, on the CPU or a CUDA device.
void check_tensor(const Communicator& comm, const char* op, const char* argument, const at::Tensor& tensor) {
  BMT_CHECK(TypeError, tensor.defined(), describe(comm, op), ": ", argument, " must be a tensor, got None");
  BMT_CHECK(TypeError, tensor.layout() == at::kStrided, describe(comm, op), ": ", argument,
            " must be a dense tensor, got layout ", tensor.layout());
  BMT_CHECK(TypeError, !tensor.is_quantized(), describe(comm, op), ": ", argument,
            " must not be quantised (its scale would stay behind), got ", tensor.scalar_type());
  BMT_CHECK(TypeError, tensor.device().is_cpu() || tensor.device().is_cuda(), describe(comm, op), ": ",
            argument, " must be on the CPU or a CUDA device, got ", tensor.device());
  BMT_CHECK(TypeError, tensor.unsafeGetTensorImpl()->storage_initialized(), describe(comm, op), ": ",
            argument, " must have memory, got one that stands for a tensor (of FakeTensorMode)");
  BMT_CHECK(TypeError, tensor.is_contiguous(), describe(comm, op), ": ", argument,
            " must be contiguous, got shape ", tensor.sizes(), " with strides ", tensor.strides());
}

// Of tensors of one device, and of one dtype unless one is `rounded` to the other's, of which one is as large
// as those of all ranks together.
void check_sizes(const Communicator& comm, const char* op, const char* large_name, const at::Tensor& large,
                 const char* small_name, const at::Tensor& small, bool rounded = false) {
  check_tensor(comm, op, large_name, large);
  check_tensor(comm, op, small_name, small);
  BMT_CHECK(TypeError, rounded || large.scalar_type() == small.scalar_type(), describe(comm, op), ": ",
            large_name, " and ", small_name, " must have the same dtype, got ", large.scalar_type(), " and ",
            small.scalar_type());
  BMT_CHECK(TypeError, large.device() == small.device(), describe(comm, op), ": ", large_name, " and ",
            small_name, " must be on the same device, got ", large.device(), " and ", small.device());
  BMT_CHECK(ValueError, large.numel() == comm.size() * small.numel(), describe(comm, op), ": ", large_name,
            " must have ", comm.size(), " * ", small.numel(), " = ", comm.size() * small.numel(),
            " elements (group size times ", small_name, "), got ", large.numel());
}

void check_in_place(const Communicator& comm, const char* op, const at::Tensor& tensor) {
  BMT_CHECK(StateError, comm.works_in_place(), describe(comm, op),
            ": this transport cannot be used in place");
  BMT_CHECK(ValueError, tensor.is_cpu() && tensor.numel() % comm.size() == 0, describe(comm, op),
            ": expected a tensor in host memory that divides by ", comm.size(), " ranks");
}

// Of slices of any size: the numbers of their elements.
void check_uneven(const Communicator& comm, const Call& call) {
  const char* const op = name_of(call.op);
  const auto check_counts = [&](const char* name, const std::vector<std::int64_t>& counts,
                                const at::Tensor& tensor) {
    BMT_CHECK(ValueError, counts.size() == static_cast<std::size_t>(comm.size()), describe(comm, op), ": ",
              name, " must have a number for each of ", comm.size(), " ranks, got ", counts.size());
    std::int64_t total = 0;
    for (const std::int64_t count : counts) {
      BMT_CHECK(ValueError, 0 <= count && count <= tensor.numel() - total, describe(comm, op), ": ", name,
                " must be at least 0 and add up to ", tensor.numel(), " elements, got ", count, " after ",
                total);
      total += count;
    }
    BMT_CHECK(ValueError, total == tensor.numel(), describe(comm, op), ": ", name, " must add up to ",
              tensor.numel(), " elements, got ", total);
  };
  check_counts("output_counts", call.counts->output, call.output);
  check_counts("input_counts", call.counts->input, call.input);
  const auto own = static_cast<std::size_t>(comm.rank());
  BMT_CHECK(ValueError, call.counts->output[own] == call.counts->input[own], describe(comm, op),
            ": this rank sends itself ", call.counts->input[own], " elements and expects ",
            call.counts->output[own]);
}

// Of tensors of one dtype and device, cut into a slice for each rank.
void check_all_to_all(const Communicator& comm, const Call& call) {
  const char* const op = name_of(call.op);
  const at::Tensor &output = call.output, &input = call.input;
  check_tensor(comm, op, "output", output);
  check_tensor(comm, op, "input", input);
  BMT_CHECK(TypeError, output.scalar_type() == input.scalar_type() && output.device() == input.device(),
            describe(comm, op), ": output and input must have the same dtype and device, got ",
            output.scalar_type(), " on ", output.device(), " and ", input.scalar_type(), " on ",
            input.device());
  if (call.counts != nullptr) {
    check_uneven(comm, call);
  } else {
    BMT_CHECK(ValueError, output.numel() == input.numel() && input.numel() % comm.size() == 0,
              describe(comm, op), ": output and input must have equal sizes divisible by ", comm.size(),
              ", got ", output.numel(), " and ", input.numel(), " elements");
  }
  BMT_CHECK(ValueError, input.numel() == 0 || comm.size() == 1 || output.data_ptr() != input.data_ptr(),
            describe(comm, op), ": output must not be input");
}

// Whether ordered_reduce can combine values of the tensor's dtype.
void check_reducible(const Communicator& comm, const char* op, const at::Tensor& tensor, ReduceOp reduce_op) {
  static constexpr at::ScalarType kFloats[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  static constexpr at::ScalarType kIntegers[] = {at::kBool,  at::kByte, at::kChar,
                                                 at::kShort, at::kInt,  at::kLong};
  const auto is_one_of = [&](const auto& dtypes) {
    return std::ranges::find(dtypes, tensor.scalar_type()) != std::end(dtypes);
  };
  BMT_CHECK(TypeError, is_one_of(kFloats) || is_one_of(kIntegers), describe(comm, op),
            ": expected a dtype of bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32 or "
            "float64 for a reduction, got ",
            tensor.scalar_type());
  BMT_CHECK(ValueError, reduce_op != ReduceOp::kAvg || is_one_of(kFloats), describe(comm, op),
            ": op \"avg\" needs a floating-point tensor, got ", tensor.scalar_type());
}

void check_peer(const Communicator& comm, const char* op, const at::Tensor& tensor, int peer) {
  check_tensor(comm, op, "tensor", tensor);
  check_rank(comm, op, "peer", peer);
  BMT_CHECK(ValueError, comm.size() == 1 || peer != comm.rank(), describe(comm, op),
            ": peer must be another rank");
}

}  // namespace

std::string describe(const Communicator& comm, const char* op) {
  return detail::join(op, " on group \"", comm.name(), "\", rank ", comm.rank(), " of ", comm.size());
}

void check_rank(const Communicator& comm, const char* op, const char* argument, int rank) {
  BMT_CHECK(ValueError, 0 <= rank && rank < comm.size(), describe(comm, op), ": ", argument,
            " must be a rank of the group, 0 to ", comm.size() - 1, ", got ", rank);
}

void check_arguments(const Communicator& comm, const Call& call) {
  const char* const op = name_of(call.op);
  switch (call.op) {
    case Op::kAllGather:
      return check_sizes(comm, op, "output", call.output, "input", call.input);
    case Op::kAllToAll:
    case Op::kAllToAllUneven:
      return check_all_to_all(comm, call);
    case Op::kAllGatherInPlace:
      check_sizes(comm, op, "output", call.output, "input", call.input, /*rounded=*/true);
      return check_in_place(comm, op, call.output);
    case Op::kAllToAllInPlace:
      check_tensor(comm, op, "input", call.input);
      return check_in_place(comm, op, call.input);
    case Op::kReduceScatter:
    case Op::kRingReduceScatter:
      check_sizes(comm, op, "input", call.input, "output", call.output);
      return check_reducible(comm, op, call.input, call.reduce_op);
    case Op::kAllReduce:
      check_tensor(comm, op, "tensor", call.input);
      return check_reducible(comm, op, call.input, call.reduce_op);
    case Op::kReduce:
      check_tensor(comm, op, "tensor", call.input);
      check_reducible(comm, op, call.input, call.reduce_op);
      return check_rank(comm, op, "root", call.peer);
    case Op::kBroadcast:
      check_tensor(comm, op, "tensor", call.input);
      return check_rank(comm, op, "root", call.peer);
    case Op::kSend:
      return check_peer(comm, op, call.input, call.peer);
    case Op::kRecv:
      return check_peer(comm, op, call.output, call.peer);
    case Op::kBarrier:
      return;
  }
}

}  // namespace bmtrain
