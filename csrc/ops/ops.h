// What the implementations of operators for all devices have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/dtype.h"

namespace bmtrain::ops {

/// The core's name of a tensor's dtype. TypeError, naming `what`, for anything but fp32, fp16 and bf16.
[[nodiscard]] DType narrow_dtype_of(const at::Tensor& tensor, const char* what);

}  // namespace bmtrain::ops
