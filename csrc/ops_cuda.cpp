// The operators of ops.cpp over CUDA tensors: checks, then the kernels, on the current stream.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <vector>

#include "common/check.h"
#include "common/tensor_dtype.h"
#include "cuda/adam.h"
#include "cuda/reduce.h"
#include "optim/adam.h"

namespace bmtrain::ops {
namespace {

void check_memory(const at::Tensor& tensor, const at::Tensor& first, const char* what) {
  TORCH_CHECK_TYPE(tensor.is_cuda() && tensor.device() == first.device(), what,
                   ": expected tensors of one CUDA device, got ", tensor.device(), " and ", first.device());
  TORCH_CHECK_TYPE(tensor.is_contiguous(), what, ": expected a contiguous tensor, got strides ",
                   tensor.strides(), " for shape ", tensor.sizes());
}

DType narrow_dtype_of(const at::Tensor& tensor, const char* what) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, what,
                   ": expected float32, float16 or bfloat16, got ", dtype);
  return dtype_of(dtype, what);
}

void cast_cuda(at::Tensor out, const at::Tensor& source) {
  check_memory(out, out, "cast_: out");
  check_memory(source, out, "cast_: source");
  TORCH_CHECK_VALUE(out.numel() == source.numel(), "cast_: expected source with ", out.numel(),
                    " elements like out, got ", source.numel());
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(cuda::cast(out.mutable_data_ptr(), narrow_dtype_of(out, "cast_: out"),
                            source.const_data_ptr(), narrow_dtype_of(source, "cast_: source"), out.numel(),
                            c10::cuda::getCurrentCUDAStream()));
}

void ordered_sum_cuda(at::Tensor out, at::TensorList sources, bool accumulate, double factor) {
  check_memory(out, out, "ordered_sum_: out");
  std::vector<const void*> pointers;
  for (const at::Tensor& source : sources) {
    check_memory(source, out, "ordered_sum_: sources");
    TORCH_CHECK_VALUE(source.numel() == out.numel(), "ordered_sum_: expected sources with ", out.numel(),
                      " elements like out, got ", source.numel());
    TORCH_CHECK_TYPE(source.scalar_type() == out.scalar_type(), "ordered_sum_: expected sources of ",
                     out.scalar_type(), " like out, got ", source.scalar_type());
    pointers.push_back(source.const_data_ptr());
  }
  TORCH_CHECK_VALUE(pointers.size() <= std::size_t{cuda::kMostSources}, "ordered_sum_: expected at most ",
                    cuda::kMostSources, " sources on CUDA, got ", pointers.size());
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(cuda::ordered_sum(out.mutable_data_ptr(), pointers.data(), static_cast<int>(pointers.size()),
                                   out.numel(), dtype_of(out.scalar_type(), "ordered_sum_: out"), accumulate,
                                   factor, c10::cuda::getCurrentCUDAStream()));
}

// Stays on the device: the host does not wait.
at::Tensor squared_sum_cuda(at::TensorList tensors) {
  const at::Tensor& first = tensors[0];
  const c10::cuda::CUDAGuard guard(first.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto options = first.options().dtype(at::kDouble);
  const at::Tensor partial = at::zeros({cuda::kPartialSums}, options);
  for (const at::Tensor& tensor : tensors) {
    const DType dtype = narrow_dtype_of(tensor, "squared_sum");
    const at::Tensor memory = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    TORCH_CHECK_TYPE(memory.device() == first.device(), "squared_sum: expected tensors of one device, got ",
                     memory.device(), " and ", first.device());
    C10_CUDA_CHECK(cuda::squared_sum(partial.mutable_data_ptr<double>(), memory.const_data_ptr(),
                                     memory.numel(), dtype, stream));
  }
  at::Tensor total = at::empty({}, options);
  C10_CUDA_CHECK(
      cuda::finish_squared_sum(total.mutable_data_ptr<double>(), partial.const_data_ptr<double>(), stream));
  return total;
}

cpu::AdamSlice slice_of(const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& exp_avg,
                        const at::Tensor& exp_avg_sq) {
  for (const at::Tensor* tensor : {&weight, &grad, &exp_avg, &exp_avg_sq}) {
    check_memory(*tensor, weight, "adam_");
    TORCH_CHECK_VALUE(tensor->numel() == weight.numel(), "adam_: expected ", weight.numel(),
                      " elements like weights, got ", tensor->numel());
  }
  cpu::AdamSlice slice;
  slice.weight = weight.mutable_data_ptr<float>();
  slice.grad = grad.const_data_ptr();
  slice.grad_dtype = narrow_dtype_of(grad, "adam_: grads");
  slice.exp_avg = exp_avg.mutable_data_ptr<float>();
  slice.exp_avg_sq = exp_avg_sq.mutable_data_ptr<float>();
  slice.n = weight.numel();
  return slice;
}

std::tuple<double, double> adam_cuda(at::TensorList weights, at::TensorList rounded, at::TensorList grads,
                                     at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                                     at::IntArrayRef steps, double lr, double beta1, double beta2, double eps,
                                     double weight_decay, double scale, bool decoupled, bool maximize,
                                     std::int64_t hold_steps, bool torch_sqrt, bool with_delta) {
  TORCH_CHECK_VALUE(!with_delta, "adam_: sums of updates are for CPU tensors");
  TORCH_CHECK_VALUE(grads.size() == weights.size() && exp_avgs.size() == weights.size() &&
                        exp_avg_sqs.size() == weights.size() && steps.size() == weights.size() &&
                        (rounded.empty() || rounded.size() == weights.size()),
                    "adam_: expected lists of one length");
  (void)torch_sqrt;  // CUDA's square root is IEEE's, and so is torch's there
  const AdamOptions options{lr,    beta1,     beta2,    eps,        weight_decay,
                            scale, decoupled, maximize, hold_steps, false};
  std::vector<cpu::AdamSlice> slices;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(steps[i] >= 1, "adam_: steps: expected 1 or more, got ", steps[i]);
    cpu::AdamSlice slice = slice_of(weights[i], grads[i], exp_avgs[i], exp_avg_sqs[i]);
    slice.factors = adam_factors(options, steps[i]);
    if (!rounded.empty()) {
      check_memory(rounded[i], weights[i], "adam_: rounded");
      TORCH_CHECK_VALUE(rounded[i].numel() == slice.n, "adam_: rounded: expected ", slice.n,
                        " elements, got ", rounded[i].numel());
      slice.rounded = rounded[i].mutable_data_ptr();
      slice.rounded_dtype = narrow_dtype_of(rounded[i], "adam_: rounded");
      TORCH_CHECK_TYPE(slice.rounded_dtype != DType::kFloat32, "adam_: rounded: expected a 16-bit tensor");
    }
    slices.push_back(slice);
  }
  const c10::cuda::CUDAGuard guard(weights[0].device());
  C10_CUDA_CHECK(cuda::adam(slices.data(), static_cast<std::int64_t>(slices.size()), {},
                            c10::cuda::getCurrentCUDAStream()));
  return {0, 0};
}

}  // namespace
}  // namespace bmtrain::ops

TORCH_LIBRARY_IMPL(bmtrain, CUDA, m) {
  using namespace bmtrain::ops;  // NOLINT(google-build-using-namespace)
  m.impl("cast_", &cast_cuda);
  m.impl("ordered_sum_", &ordered_sum_cuda);
  m.impl("squared_sum", &squared_sum_cuda);
  m.impl("adam_", &adam_cuda);
}
