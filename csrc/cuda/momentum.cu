// SGD and Lion over flat ranges.
#include "cuda/momentum.h"
#include "cuda/momentum_math.h"
#include "cuda/step.h"

namespace bmtrain::cuda {
namespace {

struct Momentum {
  using Slice = cpu::MomentumSlice;
  static constexpr int kMoments = 1;

  static BMT_HOST_DEVICE float* moment(const Slice& slice, int /*m*/) { return slice.momentum; }

  static __device__ void update(const Slice& slice, float g, float& w, float (&moments)[kMoments]) {
    const bool has_momentum = slice.momentum != nullptr;
    const MomentumElement element = momentum_element(slice.factors, has_momentum, g, {w, moments[0]});
    w = element.weight;
    moments[0] = element.momentum;
  }
};

}  // namespace

cudaError_t momentum(const cpu::MomentumSlice* slices, std::int64_t num_slices, cudaStream_t stream) {
  return step<Momentum>(slices, num_slices, stream);
}

}  // namespace bmtrain::cuda
