#include "common/scale.h"

#include <ATen/ops/scalar_tensor.h>

namespace bmtrain {

void scale_exactly(const at::Tensor& tensor, double factor) {
  if (factor == 1) {
    return;
  }
  // The factor has to be the second operand and a "wrapped number": mul_(Scalar) makes it the first, and
  // rounds it.
  const at::Tensor number = at::scalar_tensor(factor, at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  tensor.mul_(number);
}

}  // namespace bmtrain
