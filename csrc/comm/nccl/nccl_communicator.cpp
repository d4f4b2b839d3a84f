#include "comm/nccl/nccl_communicator.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "comm/arguments.h"
#include "comm/exchange.h"
#include "comm/host_tensor.h"
#include "common/check.h"

namespace bmtrain {
namespace {

using nccl::Result;

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclLink> link, NcclOperationPtr operation, bool is_barrier)
      : link_(std::move(link)), operation_(std::move(operation)), is_barrier_(is_barrier) {}
  void wait() override {
    if (is_barrier_) {
      link_->wait_on_host(*operation_);
    } else {
      link_->wait(*operation_);
    }
  }
  [[nodiscard]] bool is_completed() override { return link_->is_complete(*operation_); }
  [[nodiscard]] std::function<bool()> follow() override {
    return [weak = std::weak_ptr<NcclLink>(link_), operation = operation_] {
      const auto link = weak.lock();
      return link == nullptr || link->is_complete(*operation);
    };
  }

 private:
  const std::shared_ptr<NcclLink> link_;
  const NcclOperationPtr operation_;
  const bool is_barrier_;  // for which the host waits
};

nccl::Op op_of(ReduceOp op, at::ScalarType dtype) {
  using nccl::Op;
  static constexpr Op kOfNumbers[] = {Op::kSum, Op::kAvg, Op::kMax, Op::kMin, Op::kProd};
  static constexpr Op kOfBools[] = {Op::kMax, Op::kAvg, Op::kMax, Op::kMin, Op::kMin};  // "any" and "all"
  return (dtype == at::kBool ? kOfBools : kOfNumbers)[static_cast<std::size_t>(op)];
}

bool is_16_bit_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// The slices of a tensor, one after the other, by rank.
std::vector<Piece> pieces_of(const at::Tensor& tensor, const std::vector<std::int64_t>& counts) {
  std::vector<Piece> pieces;
  char* data = data_of(tensor);
  for (const std::int64_t count : counts) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(tensor.element_size());
    pieces.push_back({data, bytes, static_cast<int>(pieces.size())});
    data += bytes;
  }
  return pieces;
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
    : NcclCommunicator(NcclLink::connect(
          {std::move(library), rank, size, std::move(name), device, timeout_seconds}, unique_id)) {}

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclLink> link)
    : Transport(link->options().rank, link->options().size, link->options().name), link_(std::move(link)) {}

std::shared_ptr<NcclCommunicator> NcclCommunicator::split(int color, int rank, int size, std::string name) {
  NcclLink::Options options = link_->options();
  options.rank = rank;
  options.size = size;
  options.name = std::move(name);
  return std::shared_ptr<NcclCommunicator>(
      new NcclCommunicator(link_->split(color, rank, std::move(options))));
}

nccl::Type NcclCommunicator::type_of(const char* op, const at::Tensor& tensor) const {
  using nccl::Type;
  static constexpr std::pair<at::ScalarType, Type> kTypes[] = {
      {at::kHalf, Type::kFloat16},   {at::kBFloat16, Type::kBfloat16}, {at::kFloat, Type::kFloat32},
      {at::kDouble, Type::kFloat64}, {at::kBool, Type::kUint8},        {at::kByte, Type::kUint8},
      {at::kChar, Type::kInt8},      {at::kInt, Type::kInt32},         {at::kLong, Type::kInt64}};
  for (const auto& [dtype, type] : kTypes) {
    if (tensor.scalar_type() == dtype) {
      return type;
    }
  }
  throw TypeError(
      detail::join(describe(*this, op), ": NCCL does not reduce ", tensor.scalar_type(),
                   "; expected bool, uint8, int8, int32, int64, float16, bfloat16, float32 or float64"));
}

WorkPtr NcclCommunicator::submit(const Call& call, std::vector<at::Tensor> tensors,
                                 std::vector<NcclLink::Issue> groups, std::function<void()> after) {
  const char* const op = name_of(call.op);
  const c10::Device device = link_->options().device;
  for (const at::Tensor& tensor : tensors) {
    BMT_CHECK(TypeError, tensor.device() == device, describe(*this, op), ": expected tensors on ", device,
              ", got one on ", tensor.device());
  }
  const auto bytes = call.op == Op::kBarrier ? 1 : bytes_of(tensors.front());
  auto operation =
      link_->submit(op, call.label, bytes, std::move(tensors), std::move(groups), std::move(after));
  return std::make_shared<NcclWork>(link_, std::move(operation), call.op == Op::kBarrier);
}

WorkPtr NcclCommunicator::perform(const Call& call) {
  switch (call.op) {
    case Op::kAllToAll:
      return submit(call, {call.output, call.input}, exchange(call.output, call.input));
    case Op::kAllToAllUneven:
      return submit(call, {call.output, call.input}, exchange(call.output, call.input, call.counts));
    case Op::kReduceScatter:
      if (is_16_bit_float(call.input) &&
          (call.reduce_op == ReduceOp::kSum || call.reduce_op == ReduceOp::kAvg)) {
        return reduce_scatter_in_order(call);
      }
      return reduce_on_device(call);
    case Op::kRingReduceScatter:
    case Op::kAllReduce:
    case Op::kReduce:
      return reduce_on_device(call);
    case Op::kBarrier:
      return meet(call);
    default:
      return move(call);
  }
}

// [Note: Groups of an exchange]
// Slice r of `input` goes to rank r, which puts it where its `output` has a slice for this rank. That is a
// message to and one from each rank (none for slices of no bytes, of which both sides know), and NCCL takes
// 2,048 calls in a group. A group has the peers at certain distances, so that both sides of a message find it
// in the same group.
std::vector<NcclLink::Issue> NcclCommunicator::exchange(const at::Tensor& output, const at::Tensor& input,
                                                        const SliceCounts* counts) const {
  const auto even = std::vector<std::int64_t>(static_cast<std::size_t>(size()), input.numel() / size());
  const auto sent = pieces_of(input, counts == nullptr ? even : counts->input);
  const auto received = pieces_of(output, counts == nullptr ? even : counts->output);
  std::vector<NcclLink::Issue> groups;
  for (int first = 0; first < size(); first += peers_per_group_) {
    groups.emplace_back([call = &link_->call(), sent, received, first,
                         end = std::min(first + peers_per_group_, size()), rank = rank(),
                         size = size()](nccl::Comm comm, nccl::Stream stream) {
      Result result = Result::kSuccess;
      for (int distance = first; distance < end && !nccl::is_error(result); ++distance) {
        const int after = (rank + distance) % size, before = (rank + size - distance) % size;
        const Piece& to = sent[static_cast<std::size_t>(after)];
        const Piece& from = received[static_cast<std::size_t>(before)];
        if (to.bytes > 0) {
          result = call->Send(to.data, static_cast<std::size_t>(to.bytes), nccl::Type::kUint8, after, comm,
                              stream);
        }
        if (from.bytes > 0 && !nccl::is_error(result)) {
          result = call->Recv(from.data, static_cast<std::size_t>(from.bytes), nccl::Type::kUint8, before,
                              comm, stream);
        }
      }
      return result;
    });
  }
  return groups;
}

WorkPtr NcclCommunicator::reduce_scatter_in_order(const Call& call) {
  const at::Tensor received = at::empty({call.input.numel()}, call.input.options());
  return submit(
      call, {call.output, call.input, received}, exchange(received, call.input),
      [output = call.output.detach(), received, op = call.reduce_op] { combine(output, received, op); });
}

WorkPtr NcclCommunicator::reduce_on_device(const Call& call) {
  const nccl::Type type = type_of(name_of(call.op), call.input);
  const nccl::Op op = op_of(call.reduce_op, call.input.scalar_type());
  const auto issue = [&functions = link_->call(), kind = call.op, root = call.peer,
                      from = data_of(call.input), to = data_of(call.output),
                      count = static_cast<std::size_t>(call.output.numel()), type,
                      op](nccl::Comm comm, nccl::Stream stream) {
    switch (kind) {
      case Op::kAllReduce:
        return functions.AllReduce(from, to, count, type, op, comm, stream);
      case Op::kReduce:
        return functions.Reduce(from, to, count, type, op, root, comm, stream);
      default:
        return functions.ReduceScatter(from, to, count, type, op, comm, stream);
    }
  };
  return submit(call, {call.output, call.input}, {issue});
}

// Without arithmetic: of bytes, so of any dtype.
WorkPtr NcclCommunicator::move(const Call& call) {
  const at::Tensor& sent = call.input.defined() ? call.input : call.output;
  const at::Tensor& received = call.output.defined() ? call.output : call.input;
  const auto issue = [&functions = link_->call(), op = call.op, peer = call.peer, from = data_of(sent),
                      to = data_of(received), bytes = static_cast<std::size_t>(bytes_of(sent))](
                         nccl::Comm comm, nccl::Stream stream) {
    switch (op) {
      case Op::kSend:
        return functions.Send(from, bytes, nccl::Type::kUint8, peer, comm, stream);
      case Op::kRecv:
        return functions.Recv(to, bytes, nccl::Type::kUint8, peer, comm, stream);
      case Op::kBroadcast:
        return functions.Broadcast(from, to, bytes, nccl::Type::kUint8, peer, comm, stream);
      default:
        return functions.AllGather(from, to, bytes, nccl::Type::kUint8, comm, stream);
    }
  };
  return submit(call, {received, sent}, {issue});
}

WorkPtr NcclCommunicator::meet(const Call& call) {
  const at::Tensor token =
      at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(link_->options().device));
  const NcclLink::Issue issue = [&functions = link_->call(), data = data_of(token)](nccl::Comm comm,
                                                                                    nccl::Stream stream) {
    return functions.AllReduce(data, data, 1, nccl::Type::kFloat32, nccl::Op::kSum, comm, stream);
  };
  return submit(call, {token}, {issue});
}

}  // namespace bmtrain
