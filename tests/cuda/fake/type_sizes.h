// Bytes of an element, which stand-ins of NCCL have to know.
#pragma once

#include <cstddef>

#include "comm/nccl/nccl_api.h"

inline std::size_t size_of(bmtrain::nccl::Type type) {
  using bmtrain::nccl::Type;
  switch (type) {
    case Type::kInt8:
    case Type::kUint8:
      return 1;
    case Type::kFloat16:
    case Type::kBfloat16:
      return 2;
    case Type::kInt32:
    case Type::kUint32:
    case Type::kFloat32:
      return 4;
    default:
      return 8;
  }
}
