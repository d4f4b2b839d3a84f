#include "comm/nccl/nccl_communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "comm/host_tensor.h"
#include "comm/slice_sum.h"
#include "common/check.h"

namespace bmtrain {
namespace {

using nccl::Result;

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclLink> link, NcclOperationPtr operation)
      : link_(std::move(link)), operation_(std::move(operation)) {}
  void wait() override { link_->wait(*operation_); }
  [[nodiscard]] bool is_completed() override { return link_->is_complete(*operation_); }

 private:
  std::shared_ptr<NcclLink> link_;
  NcclOperationPtr operation_;
};

nccl::Op op_of(ReduceOp op, at::ScalarType dtype) {
  const bool logical = dtype == at::kBool;
  switch (op) {
    case ReduceOp::kSum:
      return logical ? nccl::Op::kMax : nccl::Op::kSum;
    case ReduceOp::kAvg:
      return nccl::Op::kAvg;
    case ReduceOp::kMax:
      return nccl::Op::kMax;
    case ReduceOp::kMin:
      return nccl::Op::kMin;
    case ReduceOp::kProd:
      break;
  }
  return logical ? nccl::Op::kMin : nccl::Op::kProd;
}

bool is_16_bit_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// The local half of a sum or average: `received` has one slice per rank.
void combine(const at::Tensor& output, const at::Tensor& received, ReduceOp op) {
  if (output.numel() == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> slices = received.view({-1, output.numel()}).unbind(0);
  if (op == ReduceOp::kSum) {
    sum_slices(output.view(-1), slices, /*accumulate=*/false);
    return;
  }
  at::Tensor sum = slices[0].to(at::kFloat);
  for (std::size_t r = 1; r < slices.size(); ++r) {
    sum.add_(slices[r]);
  }
  output.view(-1).copy_(sum.div_(static_cast<double>(slices.size())));
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclLibrary> library, const std::string& unique_id,
                                   int rank, int size, std::string name, c10::Device device,
                                   double timeout_seconds)
    : link_(NcclLink::connect({std::move(library), rank, size, std::move(name), device, timeout_seconds},
                              unique_id)) {}

std::shared_ptr<NcclCommunicator> NcclCommunicator::split(int color, int rank, int size, std::string name) {
  NcclLink::Options options = link_->options();
  options.rank = rank;
  options.size = size;
  options.name = std::move(name);
  return std::shared_ptr<NcclCommunicator>(
      new NcclCommunicator(link_->split(color, rank, std::move(options))));
}

void NcclCommunicator::check_place(const char* op, const at::Tensor& tensor) const {
  const c10::Device device = link_->options().device;
  BMT_CHECK(TypeError, tensor.device() == device, describe(*this, op), ": expected tensors on ", device,
            ", got one on ", tensor.device());
}

nccl::Type NcclCommunicator::type_of(const char* op, const at::Tensor& tensor) const {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return nccl::Type::kFloat16;
    case at::kBFloat16:
      return nccl::Type::kBfloat16;
    case at::kFloat:
      return nccl::Type::kFloat32;
    case at::kDouble:
      return nccl::Type::kFloat64;
    case at::kBool:
    case at::kByte:
      return nccl::Type::kUint8;
    case at::kChar:
      return nccl::Type::kInt8;
    case at::kInt:
      return nccl::Type::kInt32;
    case at::kLong:
      return nccl::Type::kInt64;
    default:
      BMT_CHECK(TypeError, false, describe(*this, op), ": NCCL does not reduce ", tensor.scalar_type(),
                "; expected bool, uint8, int8, int32, int64, float16, bfloat16, float32 or float64");
  }
  return nccl::Type::kUint8;
}

WorkPtr NcclCommunicator::start(const char* op, const std::string& label, std::int64_t wire_bytes,
                                std::vector<at::Tensor> tensors, std::vector<NcclLink::Issue> groups,
                                std::function<void()> after) {
  for (const at::Tensor& tensor : tensors) {
    check_place(op, tensor);
  }
  const auto bytes = bytes_of(tensors.front());
  auto operation = link_->submit(op, label, bytes, std::move(tensors), std::move(groups), std::move(after));
  traffic_.add(op, wire_bytes);
  return std::make_shared<NcclWork>(link_, std::move(operation));
}

WorkPtr NcclCommunicator::start(const char* op, const std::string& label, std::int64_t wire_bytes,
                                std::vector<at::Tensor> tensors, NcclLink::Issue issue) {
  return start(op, label, wire_bytes, std::move(tensors), std::vector{std::move(issue)}, {});
}

WorkPtr NcclCommunicator::all_gather(at::Tensor output, at::Tensor input, const std::string& label) {
  check_sizes(*this, "all_gather", "output", output, "input", input);
  const auto bytes = static_cast<std::size_t>(bytes_of(input));
  return start("all_gather", label, static_cast<std::int64_t>(bytes) * (size() - 1), {output, input},
               [call = link_->call().AllGather, from = data_of(input), to = data_of(output), bytes](
                   nccl::Comm comm, nccl::Stream stream) {
                 return call(from, to, bytes, nccl::Type::kUint8, comm, stream);
               });
}

// [Note: Groups of an exchange]
// Slice r of `input` goes to rank r, which puts it where its `output` has a slice for this rank. That is a
// message to and one from each rank, and NCCL takes 2,048 calls in a group. A group has the peers at certain
// distances, so that both sides of a message find it in the same group.
std::vector<NcclLink::Issue> NcclCommunicator::exchange(const at::Tensor& output,
                                                        const at::Tensor& input) const {
  const auto bytes = static_cast<std::size_t>(bytes_of(input) / size());
  std::vector<NcclLink::Issue> groups;
  for (int first = 0; first < size(); first += peers_per_group_) {
    groups.emplace_back([call = &link_->call(), from = data_of(input), to = data_of(output), bytes, first,
                         end = std::min(first + peers_per_group_, size()), rank = rank(),
                         size = size()](nccl::Comm comm, nccl::Stream stream) {
      const auto offset = [bytes](int r) { return static_cast<std::size_t>(r) * bytes; };
      Result result = Result::kSuccess;
      for (int distance = first; distance < end && !nccl::is_error(result); ++distance) {
        const int after = (rank + distance) % size, before = (rank + size - distance) % size;
        result = call->Send(from + offset(after), bytes, nccl::Type::kUint8, after, comm, stream);
        if (!nccl::is_error(result)) {
          result = call->Recv(to + offset(before), bytes, nccl::Type::kUint8, before, comm, stream);
        }
      }
      return result;
    });
  }
  return groups;
}

WorkPtr NcclCommunicator::all_to_all(at::Tensor output, at::Tensor input, const std::string& label) {
  check_exchange(*this, output, input);
  const auto bytes = bytes_of(input) / size();
  return start("all_to_all", label, bytes * (size() - 1), {output, input}, exchange(output, input), {});
}

WorkPtr NcclCommunicator::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                         const std::string& label) {
  check_sizes(*this, "reduce_scatter", "input", input, "output", output);
  check_reducible(*this, "reduce_scatter", input, op);
  const auto wire = bytes_of(output) * (size() - 1);
  if (is_16_bit_float(input) && (op == ReduceOp::kSum || op == ReduceOp::kAvg)) {
    const at::Tensor received = at::empty({input.numel()}, input.options());
    return start("reduce_scatter", label, wire, {output, input, received}, exchange(received, input),
                 [output = output.detach(), received, op] { combine(output, received, op); });
  }
  return start_reduce_scatter(output, input, op, label);
}

WorkPtr NcclCommunicator::ring_reduce_scatter(at::Tensor output, at::Tensor input, const std::string& label) {
  check_sizes(*this, "reduce_scatter", "input", input, "output", output);
  check_reducible(*this, "reduce_scatter", input, ReduceOp::kSum);
  return start_reduce_scatter(output, input, ReduceOp::kSum, label);
}

WorkPtr NcclCommunicator::start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                               const std::string& label) {
  const auto wire = bytes_of(output) * (size() - 1);
  return start("reduce_scatter", label, wire, {output, input},
               [call = link_->call().ReduceScatter, from = data_of(input), to = data_of(output),
                count = static_cast<std::size_t>(output.numel()), type = type_of("reduce_scatter", input),
                nccl_op = op_of(op, input.scalar_type())](nccl::Comm comm, nccl::Stream stream) {
                 return call(from, to, count, type, nccl_op, comm, stream);
               });
}

WorkPtr NcclCommunicator::all_reduce(at::Tensor tensor, ReduceOp op, const std::string& label) {
  check_tensor(*this, "all_reduce", "tensor", tensor);
  check_reducible(*this, "all_reduce", tensor, op);
  const auto wire = 2 * bytes_of(tensor) * (size() - 1) / size();
  return start("all_reduce", label, wire, {tensor},
               [call = link_->call().AllReduce, data = data_of(tensor),
                count = static_cast<std::size_t>(tensor.numel()), type = type_of("all_reduce", tensor),
                nccl_op = op_of(op, tensor.scalar_type())](nccl::Comm comm, nccl::Stream stream) {
                 return call(data, data, count, type, nccl_op, comm, stream);
               });
}

WorkPtr NcclCommunicator::reduce(at::Tensor tensor, ReduceOp op, int root, const std::string& label) {
  check_tensor(*this, "reduce", "tensor", tensor);
  check_reducible(*this, "reduce", tensor, op);
  check_rank(*this, "reduce", "root", root);
  const auto wire = rank() == root ? 0 : bytes_of(tensor);
  return start("reduce", label, wire, {tensor},
               [call = link_->call().Reduce, data = data_of(tensor),
                count = static_cast<std::size_t>(tensor.numel()), type = type_of("reduce", tensor),
                nccl_op = op_of(op, tensor.scalar_type()), root](nccl::Comm comm, nccl::Stream stream) {
                 return call(data, data, count, type, nccl_op, root, comm, stream);
               });
}

WorkPtr NcclCommunicator::broadcast(at::Tensor tensor, int root, const std::string& label) {
  check_tensor(*this, "broadcast", "tensor", tensor);
  check_rank(*this, "broadcast", "root", root);
  const auto bytes = static_cast<std::size_t>(bytes_of(tensor));
  const auto wire = rank() == root ? static_cast<std::int64_t>(bytes) * (size() - 1) : 0;
  return start("broadcast", label, wire, {tensor},
               [call = link_->call().Broadcast, data = data_of(tensor), bytes, root](nccl::Comm comm,
                                                                                     nccl::Stream stream) {
                 return call(data, data, bytes, nccl::Type::kUint8, root, comm, stream);
               });
}

WorkPtr NcclCommunicator::send(at::Tensor tensor, int peer, const std::string& label) {
  check_tensor(*this, "send", "tensor", tensor);
  check_rank(*this, "send", "peer", peer);
  BMT_CHECK(ValueError, peer != rank(), describe(*this, "send"), ": peer must be another rank");
  const auto bytes = static_cast<std::size_t>(bytes_of(tensor));
  return start(
      "send", label, static_cast<std::int64_t>(bytes), {tensor},
      [call = link_->call().Send, data = data_of(tensor), bytes, peer](nccl::Comm comm, nccl::Stream stream) {
        return call(data, bytes, nccl::Type::kUint8, peer, comm, stream);
      });
}

WorkPtr NcclCommunicator::recv(at::Tensor tensor, int peer, const std::string& label) {
  check_tensor(*this, "recv", "tensor", tensor);
  check_rank(*this, "recv", "peer", peer);
  BMT_CHECK(ValueError, peer != rank(), describe(*this, "recv"), ": peer must be another rank");
  const auto bytes = static_cast<std::size_t>(bytes_of(tensor));
  return start(
      "recv", label, 0, {tensor},
      [call = link_->call().Recv, data = data_of(tensor), bytes, peer](nccl::Comm comm, nccl::Stream stream) {
        return call(data, bytes, nccl::Type::kUint8, peer, comm, stream);
      });
}

void NcclCommunicator::barrier(const std::string& label) {
  const at::Tensor token =
      at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(link_->options().device));
  const NcclLink::Issue issue = [call = link_->call().AllReduce, data = data_of(token)](nccl::Comm comm,
                                                                                        nccl::Stream stream) {
    return call(data, data, 1, nccl::Type::kFloat32, nccl::Op::kSum, comm, stream);
  };
  const auto operation = link_->submit("barrier", label, 1, {token}, {issue});
  traffic_.add("barrier", size() - 1);
  link_->wait_on_host(*operation);
}

}  // namespace bmtrain
