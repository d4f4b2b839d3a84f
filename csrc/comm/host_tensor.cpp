#include "comm/host_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace bmtrain {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

at::Tensor scratch(std::int64_t bytes) { return at::empty({bytes}, at::TensorOptions().dtype(at::kByte)); }

at::Tensor staged(const at::Tensor& tensor) { return tensor.is_cuda() ? tensor.detach().cpu() : tensor; }

at::Tensor staged_empty(const at::Tensor& tensor) {
  return tensor.is_cuda() ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : tensor;
}

std::function<void()> publisher(const at::Tensor& host, const at::Tensor& destination) {
  if (!destination.is_cuda()) {
    return [] {};
  }
  return [host, destination] {
    const at::NoGradGuard no_grad;
    destination.detach().copy_(host);
  };
}

void copy_own(char* to, const char* from, std::int64_t bytes) {
  if (to != from && bytes > 0) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

Slice slice_of(std::int64_t numel, int size, int rank) {
  const std::int64_t partition = (numel + size - 1) / size;
  const std::int64_t begin = std::min(numel, rank * partition);
  return {begin, std::min(numel, begin + partition) - begin};
}

std::vector<const void*> in_rank_order(int rank, int size, const void* own, const at::Tensor& received,
                                       std::int64_t bytes) {
  std::vector<const void*> inputs;
  inputs.reserve(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) {
    inputs.push_back(r == rank ? own : data_of(received) + (r < rank ? r : r - 1) * bytes);
  }
  return inputs;
}

int detail_of(at::ScalarType dtype, ReduceOp op, int root) {
  return static_cast<int>(dtype) * 1000003 + static_cast<int>(op) * 10007 + root;
}

}  // namespace bmtrain
