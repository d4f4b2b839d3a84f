// The operators of ops.cpp over CUDA tensors: checks, then the kernels, on the current stream. None of them
// makes the host wait.
#include "ops/ops_cuda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/tensor_dtype.h"
#include "common/typed.h"
#include "cuda/adam.h"
#include "cuda/cross_entropy.h"
#include "cuda/momentum.h"
#include "cuda/reduce.h"
#include "ops/ops.h"

namespace bmtrain::ops {
namespace {

// Whether registered; nobody registers while an operator runs.
bool is_registered = false;

// See [Note: A device behind an interface]: a core with kernels runs with a torch without CUDA too.
cudaStream_t current_stream() {
  const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);
  return static_cast<cudaStream_t>(device.getStreamNativeHandle(device.getStream(device.getDevice())));
}

void check(cudaError_t error) {
  BMT_CHECK(StateError, error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

void check_memory(const at::Tensor& tensor, const at::Tensor& first, const char* what) {
  BMT_CHECK(TypeError, tensor.is_cuda() && tensor.device() == first.device(), what,
            ": expected tensors of one CUDA device, got ", tensor.device(), " and ", first.device());
  BMT_CHECK(TypeError, tensor.is_contiguous(), what, ": expected a contiguous tensor, got strides ",
            tensor.strides(), " for shape ", tensor.sizes());
}

// Contiguous memory; neighbours of one dtype become one, so that a model's gradients are a launch per block.
struct Range {
  void* data;
  std::int64_t numel;
  DType dtype;
};

std::vector<Range> ranges_of(at::TensorList tensors, const char* what) {
  std::vector<Range> ranges;
  for (const at::Tensor& tensor : tensors) {
    check_memory(tensor, tensors[0], what);
    const Range next{tensor.data_ptr(), tensor.numel(), narrow_dtype_of(tensor, what)};
    const bool follows =
        !ranges.empty() && ranges.back().dtype == next.dtype &&
        static_cast<char*>(ranges.back().data) + ranges.back().numel * size_of(next.dtype) == next.data;
    if (follows) {
      ranges.back().numel += next.numel;
    } else if (next.numel > 0) {
      ranges.push_back(next);
    }
  }
  return ranges;
}

void scale_cuda(at::TensorList tensors, const at::Tensor& factor) {
  BMT_CHECK(ValueError, factor.numel() == 1, "scale_: factor: expected one number, got ", factor.numel());
  const c10::DeviceGuard guard(tensors[0].device());
  const at::Tensor by = factor.to(tensors[0].device(), at::kFloat);
  for (const Range& range : ranges_of(tensors, "scale_")) {
    check(cuda::scale(range.data, range.numel, range.dtype, by.const_data_ptr<float>(), current_stream()));
  }
}

at::Tensor squared_sum_cuda(at::TensorList tensors) {
  const c10::DeviceGuard guard(tensors[0].device());
  const cudaStream_t stream = current_stream();
  const auto options = tensors[0].options().dtype(at::kDouble);
  const at::Tensor partial = at::zeros({cuda::kPartialSums}, options);
  for (const Range& range : ranges_of(tensors, "squared_sum")) {
    check(
        cuda::squared_sum(partial.mutable_data_ptr<double>(), range.data, range.numel, range.dtype, stream));
  }
  at::Tensor total = at::empty({}, options);
  check(cuda::finish_squared_sum(total.mutable_data_ptr<double>(), partial.const_data_ptr<double>(), stream));
  return total;
}

// One number per row, fp32 (or of `dtype`), on the device of the logits.
template <typename T>
const T* column(const at::Tensor& tensor, const at::Tensor& logits, at::ScalarType dtype, const char* what) {
  check_memory(tensor, logits, what);
  BMT_CHECK(TypeError, tensor.scalar_type() == dtype, what, ": expected ", dtype, ", got ",
            tensor.scalar_type());
  BMT_CHECK(ValueError, tensor.numel() == logits.size(0), what, ": expected one number for each of ",
            logits.size(0), " rows, got ", tensor.numel());
  return tensor.const_data_ptr<T>();
}

cuda::Logits rows_of(const at::Tensor& logits, const at::Tensor& target,
                     const std::optional<at::Tensor>& weight, bool smooth) {
  check_memory(logits, logits, "cross_entropy: logits");
  BMT_CHECK(ValueError, logits.dim() == 2, "cross_entropy: logits: expected (rows, columns), got shape ",
            logits.sizes());
  const float* of_columns = nullptr;
  if (weight.has_value()) {
    check_memory(*weight, logits, "cross_entropy: weight");
    BMT_CHECK(TypeError, weight->scalar_type() == at::kFloat, "cross_entropy: weight: expected float32, got ",
              weight->scalar_type());
    BMT_CHECK(ValueError, weight->numel() == logits.size(1),
              "cross_entropy: weight: expected one for each of ", logits.size(1), " columns, got ",
              weight->numel());
    of_columns = weight->const_data_ptr<float>();
  }
  return {logits.const_data_ptr(),
          narrow_dtype_of(logits, "cross_entropy: logits"),
          logits.size(0),
          logits.size(1),
          column<std::int64_t>(target, logits, at::kLong, "cross_entropy: target"),
          of_columns,
          smooth};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cross_entropy_sums_cuda(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight, bool smooth,
    bool divided) {
  const cuda::Logits rows = rows_of(logits, target, weight, smooth);
  const c10::DeviceGuard guard(logits.device());
  const auto options = logits.options().dtype(at::kFloat);
  const auto make = [&](std::int64_t numel) { return at::empty({numel}, options); };
  at::Tensor maximum = make(rows.num_rows), exp_sum = make(rows.num_rows), target_logit = make(rows.num_rows);
  at::Tensor smoothed = make(smooth ? rows.num_rows : 0);
  const cuda::RowSums out{maximum.mutable_data_ptr<float>(), exp_sum.mutable_data_ptr<float>(),
                          target_logit.mutable_data_ptr<float>(),
                          smooth ? smoothed.mutable_data_ptr<float>() : nullptr, divided};
  check(cuda::cross_entropy_sums(rows, out, current_stream()));
  return {maximum, exp_sum, target_logit, smoothed};
}

void cross_entropy_gradient_cuda(at::Tensor out, const at::Tensor& logits, const at::Tensor& target,
                                 const std::optional<at::Tensor>& weight, const at::Tensor& maximum,
                                 const at::Tensor& log_sum, const at::Tensor& scale, const at::Tensor& hit,
                                 const at::Tensor& spread, const at::Tensor& ignored) {
  const cuda::Logits rows = rows_of(logits, target, weight, /*smooth=*/false);
  check_memory(out, logits, "cross_entropy: out");
  BMT_CHECK(ValueError, out.sizes() == logits.sizes() && out.scalar_type() == logits.scalar_type(),
            "cross_entropy: out: expected shape and dtype of logits, ", logits.sizes(), " of ",
            logits.scalar_type(), ", got ", out.sizes(), " of ", out.scalar_type());
  const auto number = [&](const at::Tensor& tensor, const char* what) {
    return column<float>(tensor, logits, at::kFloat, what);
  };
  const cuda::RowFactors factors{number(maximum, "cross_entropy: maximum"),
                                 number(log_sum, "cross_entropy: log_sum"),
                                 number(scale, "cross_entropy: scale"),
                                 number(hit, "cross_entropy: hit"),
                                 number(spread, "cross_entropy: spread"),
                                 column<bool>(ignored, logits, at::kBool, "cross_entropy: ignored")};
  const c10::DeviceGuard guard(logits.device());
  check(cuda::cross_entropy_gradient(rows, factors, out.mutable_data_ptr(), current_stream()));
}

}  // namespace

void ordered_sum_cuda(at::Tensor out, at::TensorList sources, bool accumulate, double factor) {
  check_memory(out, out, "ordered_sum_: out");
  std::vector<const void*> pointers;
  for (const at::Tensor& source : sources) {
    check_memory(source, out, "ordered_sum_: sources");
    BMT_CHECK(ValueError, source.numel() == out.numel(), "ordered_sum_: expected sources with ", out.numel(),
              " elements like out, got ", source.numel());
    BMT_CHECK(TypeError, source.scalar_type() == out.scalar_type(), "ordered_sum_: expected sources of ",
              out.scalar_type(), " like out, got ", source.scalar_type());
    pointers.push_back(source.const_data_ptr());
  }
  const auto count = static_cast<int>(pointers.size());
  BMT_CHECK(ValueError, count <= cuda::kMostSources || cuda::is_evenly_spaced(pointers.data(), count),
            "ordered_sum_: expected at most ", cuda::kMostSources,
            " sources on CUDA, or evenly spaced slices of one tensor, got ", count);
  const c10::DeviceGuard guard(out.device());
  check(cuda::ordered_sum(out.mutable_data_ptr(), pointers.data(), count, out.numel(),
                          dtype_of(out.scalar_type(), "ordered_sum_: out"), accumulate, factor,
                          current_stream()));
}

void step_on_cuda(const std::vector<cpu::AdamSlice>& slices, const c10::Device& device) {
  const c10::DeviceGuard guard(device);
  check(cuda::adam(slices.data(), static_cast<std::int64_t>(slices.size()), current_stream()));
}

void step_on_cuda(const std::vector<cpu::MomentumSlice>& slices, const c10::Device& device) {
  const c10::DeviceGuard guard(device);
  check(cuda::momentum(slices.data(), static_cast<std::int64_t>(slices.size()), current_stream()));
}

bool has_cuda_kernels() { return is_registered; }

void register_cuda_kernels() {
  if (is_registered) {
    return;
  }
  // For as long as the process lives, like what TORCH_LIBRARY_IMPL registers.
  static torch::Library library(torch::Library::IMPL, "bmtrain", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("ordered_sum_", &Typed<ordered_sum_cuda>::call);
  library.impl("scale_", &Typed<scale_cuda>::call);
  library.impl("squared_sum", &Typed<squared_sum_cuda>::call);
  library.impl("cross_entropy_sums", &Typed<cross_entropy_sums_cuda>::call);
  library.impl("cross_entropy_gradient_", &Typed<cross_entropy_gradient_cuda>::call);
  is_registered = true;
}

}  // namespace bmtrain::ops
