#include "comm/communicator.h"

#include "common/check.h"
#include "common/tensor_dtype.h"
#include "cpu/kernels.h"
#include "ops/ops_cuda.h"

namespace bmtrain {

void sum_slices(const at::Tensor& destination, const std::vector<at::Tensor>& slices, bool accumulate) {
  if (slices.empty()) {
    return;  // of a void operation
  }
  const bool is_one_dtype = slices.at(0).scalar_type() == destination.scalar_type();
  BMT_CHECK(
      TypeError,
      is_one_dtype || (destination.scalar_type() != at::kDouble && slices.at(0).scalar_type() != at::kDouble),
      "gradient: expected float64 slices for a float64 gradient and for no other, got ",
      slices.at(0).scalar_type(), " for ", destination.scalar_type());
  if (destination.is_cpu()) {
    std::vector<const void*> sources;
    sources.reserve(slices.size());
    for (const at::Tensor& slice : slices) {
      sources.push_back(slice.const_data_ptr());
    }
    cpu::ordered_sum(destination.mutable_data_ptr(), sources.data(), static_cast<int>(sources.size()),
                     destination.numel(), dtype_of(destination.scalar_type(), "gradient"),
                     dtype_of(slices.at(0).scalar_type(), "gradient"), accumulate, 1.0);
    return;
  }
  // Of any number of ranks: their slices lie in one buffer.
  if (destination.is_cuda() && is_one_dtype && ops::has_cuda_kernels != nullptr && ops::has_cuda_kernels()) {
    ops::ordered_sum_cuda(destination, slices, accumulate, 1.0);
    return;
  }
  // Without our kernels, or with another dtype on the wire.
  const auto wide = c10::elementSize(destination.scalar_type()) < 4 ? at::kFloat : destination.scalar_type();
  at::Tensor sum = slices[0].to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (std::size_t r = 1; r < slices.size(); ++r) {
    sum.add_(slices[r]);
  }
  if (accumulate) {
    sum.add_(destination);
  }
  destination.copy_(sum);
}

}  // namespace bmtrain
