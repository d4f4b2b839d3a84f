// Adam over flat ranges.
#include "cuda/adam.h"
#include "cuda/adam_math.h"
#include "cuda/step.h"

namespace bmtrain::cuda {
namespace {

struct Adam {
  using Slice = cpu::AdamSlice;
  static constexpr int kMoments = 2;

  static BMT_HOST_DEVICE float* moment(const Slice& slice, int m) {
    return m == 0 ? slice.exp_avg : slice.exp_avg_sq;
  }

  static __device__ void update(const Slice& slice, float g, float& w, float (&moments)[kMoments]) {
    const AdamElement element = adam_element(slice.factors, g, {w, moments[0], moments[1]});
    w = element.weight;
    moments[0] = element.exp_avg;
    moments[1] = element.exp_avg_sq;
  }
};

}  // namespace

cudaError_t adam(const cpu::AdamSlice* slices, std::int64_t num_slices, const StepControl& control,
                 cudaStream_t stream) {
  return step<Adam>(slices, num_slices, control, stream);
}

}  // namespace bmtrain::cuda
