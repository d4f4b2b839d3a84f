#include "common/tensor_dtype.h"

#include "common/check.h"

namespace bmtrain {

DType dtype_of(at::ScalarType dtype, const char* what) {
  switch (dtype) {
    case at::ScalarType::Float:
      return DType::kFloat32;
    case at::ScalarType::Half:
      return DType::kFloat16;
    case at::ScalarType::BFloat16:
      return DType::kBFloat16;
    case at::ScalarType::Double:
      return DType::kFloat64;
    default:
      throw TypeError(
          detail::join(what, ": expected float32, float16, bfloat16 or float64, got ", c10::toString(dtype)));
  }
}

}  // namespace bmtrain
