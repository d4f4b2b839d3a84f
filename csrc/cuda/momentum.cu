// SGD and Lion over flat ranges.
#include "cuda/momentum.h"
#include "cuda/momentum_math.h"
#include "cuda/step.h"

namespace bmtrain::cuda {
namespace {

using Batch = StepBatch<cpu::MomentumSlice>;

template <typename Grad, typename Rounded>
__device__ void update(const cpu::MomentumSlice& slice, std::int64_t i, const StepValues& values) {
  const std::int64_t left = slice.n - i;
  const bool has_momentum = slice.momentum != nullptr;
  Grad* const grad = const_cast<Grad*>(static_cast<const Grad*>(slice.grad)) + i;
  if (!values.skips) {
    float g[kPerThread], w[kPerThread], b[kPerThread] = {};
    load(grad, g, left);
    load(slice.weight + i, w, left);
    if (has_momentum) load(slice.momentum + i, b, left);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const MomentumElement element =
          momentum_element(slice.factors, has_momentum, g[k] * values.scale, {w[k], b[k]});
      w[k] = element.weight;
      b[k] = element.momentum;
    }
    store(slice.weight + i, w, left);
    if (has_momentum) store(slice.momentum + i, b, left);
    if constexpr (sizeof(Rounded) == 2) store(static_cast<Rounded*>(slice.rounded) + i, w, left);
  }
  if (values.zeroes) {
    const float zeros[kPerThread] = {};
    store(grad, zeros, left);
  }
}

template <typename Grad>
__device__ void update_from(const cpu::MomentumSlice& slice, std::int64_t i, const StepValues& values) {
  if (slice.rounded == nullptr) return update<Grad, float>(slice, i, values);
  if (slice.rounded_dtype == DType::kBFloat16) return update<Grad, Bf16>(slice, i, values);
  return update<Grad, Half>(slice, i, values);
}

__global__ void __launch_bounds__(kThreads) momentum_kernel(const __grid_constant__ Batch batch) {
  for_each_tile(batch, [&](const cpu::MomentumSlice& slice, std::int64_t i, const StepValues& values) {
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

cudaError_t momentum(const cpu::MomentumSlice* slices, std::int64_t num_slices, const StepControl& control,
                     cudaStream_t stream) {
  return for_each_batch(slices, num_slices, control, [stream](const Batch& batch, unsigned grid) {
    momentum_kernel<<<grid, kThreads, 0, stream>>>(batch);
  });
}

}  // namespace bmtrain::cuda
