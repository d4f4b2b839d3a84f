// Adam over flat ranges: a block takes a tile of a range, a thread eight neighbours of it.
#include "cuda/adam.h"
#include "cuda/adam_math.h"
#include "cuda/step.h"

namespace bmtrain::cuda {
namespace {

using Batch = StepBatch<cpu::AdamSlice>;

template <typename Grad, typename Rounded>
__device__ void update(const cpu::AdamSlice& slice, std::int64_t i, const StepValues& values) {
  const std::int64_t left = slice.n - i;
  Grad* const grad = const_cast<Grad*>(static_cast<const Grad*>(slice.grad)) + i;
  if (!values.skips) {
    float g[kPerThread], w[kPerThread], m[kPerThread], v[kPerThread];
    load(grad, g, left);
    load(slice.weight + i, w, left);
    load(slice.exp_avg + i, m, left);
    load(slice.exp_avg_sq + i, v, left);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const AdamElement element = adam_element(slice.factors, g[k] * values.scale, {w[k], m[k], v[k]});
      w[k] = element.weight;
      m[k] = element.exp_avg;
      v[k] = element.exp_avg_sq;
    }
    store(slice.weight + i, w, left);
    store(slice.exp_avg + i, m, left);
    store(slice.exp_avg_sq + i, v, left);
    if constexpr (sizeof(Rounded) == 2) store(static_cast<Rounded*>(slice.rounded) + i, w, left);
  }
  if (values.zeroes) {
    const float zeros[kPerThread] = {};
    store(grad, zeros, left);
  }
}

template <typename Grad>
__device__ void update_from(const cpu::AdamSlice& slice, std::int64_t i, const StepValues& values) {
  if (slice.rounded == nullptr) return update<Grad, float>(slice, i, values);
  if (slice.rounded_dtype == DType::kBFloat16) return update<Grad, Bf16>(slice, i, values);
  return update<Grad, Half>(slice, i, values);
}

__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ Batch batch) {
  for_each_tile(batch, [&](const cpu::AdamSlice& slice, std::int64_t i, const StepValues& values) {
    switch (slice.grad_dtype) {
      case DType::kFloat32:
        update_from<float>(slice, i, values);
        break;
      case DType::kBFloat16:
        update_from<Bf16>(slice, i, values);
        break;
      default:
        update_from<Half>(slice, i, values);
    }
  });
}

}  // namespace

cudaError_t adam(const cpu::AdamSlice* slices, std::int64_t num_slices, const StepControl& control,
                 cudaStream_t stream) {
  return for_each_batch(slices, num_slices, control, [stream](const Batch& batch, unsigned grid) {
    adam_kernel<<<grid, kThreads, 0, stream>>>(batch);
  });
}

}  // namespace bmtrain::cuda
