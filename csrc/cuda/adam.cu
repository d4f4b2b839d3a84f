// Adam over flat ranges.
#include "cuda/adam.h"
#include "cuda/adam_math.h"
#include "cuda/adam_narrow.h"
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

enum class Width : std::uint8_t { kFp32, kBf16, kCoded };

Width width_of(const cpu::AdamSlice& slice) {
  if (slice.coded_exp_avg.codes != nullptr) return Width::kCoded;
  return slice.bf16_exp_avg != nullptr ? Width::kBf16 : Width::kFp32;
}

std::int64_t num_narrow_tiles(const cpu::AdamSlice& slice, const Alignment& /*alignment*/) {
  return (slice.n + kNarrowTile - 1) / kNarrowTile;
}

cudaError_t step_of_width(Width width, const cpu::AdamSlice* slices, std::int64_t num_slices,
                          cudaStream_t stream) {
  if (width == Width::kFp32) return step<Adam>(slices, num_slices, stream);
  const auto kernel = width == Width::kBf16 ? narrow_kernel<Bf16Moments> : narrow_kernel<CodedMoments>;
  return step<Adam>(slices, num_slices, stream, kernel, num_narrow_tiles);
}

}  // namespace

cudaError_t adam(const cpu::AdamSlice* slices, std::int64_t num_slices, cudaStream_t stream) {
  for (std::int64_t first = 0, last = 0; first < num_slices; first = last) {
    const Width width = width_of(slices[first]);
    while (last < num_slices && width_of(slices[last]) == width) ++last;
    const cudaError_t error = step_of_width(width, slices + first, last - first, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace bmtrain::cuda
