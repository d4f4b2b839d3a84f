#include "comm/host_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

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
    return nullptr;
  }
  return [host, destination] {
    const at::NoGradGuard no_grad;
    destination.detach().copy_(host);
  };
}

}  // namespace bmtrain
