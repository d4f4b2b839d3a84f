#include "comm/ordered_reduce.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <type_traits>

#include "common/tensor_dtype.h"
#include "cpu/kernels.h"

namespace bmtrain {
namespace {

// Accumulators of one pass: small enough to stay in the first-level cache next to one input's slice.
constexpr std::int64_t kChunk = 1024;

// Signed integers go through their unsigned twin: sums and products wrap around instead of being undefined.
template <typename T>
T add(T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    return a || b;
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <typename T>
T multiply(T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    return a && b;
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::uint64_t;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  } else {
    return a * b;
  }
}

template <ReduceOp op, typename A>
A combine(A acc, A value) {
  if constexpr (op == ReduceOp::kSum || op == ReduceOp::kAvg) {
    return add(acc, value);
  } else if constexpr (op == ReduceOp::kProd) {
    return multiply(acc, value);
  } else if constexpr (op == ReduceOp::kMax) {
    // The second test lets a NaN in; once acc is NaN no value is greater than it.
    return (value > acc || value != value) ? value : acc;
  } else {
    return (value < acc || value != value) ? value : acc;
  }
}

template <typename T, ReduceOp op>
void reduce_all(T* output, const std::vector<const void*>& inputs, std::int64_t numel) {
  using A = at::opmath_type<T>;  // fp32 for 16-bit types
  const auto count = static_cast<A>(inputs.size());
  A acc[kChunk];
  for (std::int64_t begin = 0; begin < numel; begin += kChunk) {
    const std::int64_t length = std::min(kChunk, numel - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (std::int64_t i = 0; i < length; ++i) {
      acc[i] = static_cast<A>(first[i]);
    }
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      const T* next = static_cast<const T*>(inputs[r]) + begin;
      for (std::int64_t i = 0; i < length; ++i) {
        acc[i] = combine<op, A>(acc[i], static_cast<A>(next[i]));
      }
    }
    if constexpr (op == ReduceOp::kAvg && std::is_floating_point_v<A>) {
      for (std::int64_t i = 0; i < length; ++i) {
        acc[i] /= count;
      }
    }
    for (std::int64_t i = 0; i < length; ++i) {
      output[begin + i] = static_cast<T>(acc[i]);
    }
  }
}

template <typename T>
void reduce_typed(void* output, const std::vector<const void*>& inputs, std::int64_t numel, ReduceOp op) {
  T* out = static_cast<T*>(output);
  switch (op) {
    case ReduceOp::kSum:
      return reduce_all<T, ReduceOp::kSum>(out, inputs, numel);
    case ReduceOp::kAvg:
      return reduce_all<T, ReduceOp::kAvg>(out, inputs, numel);
    case ReduceOp::kMax:
      return reduce_all<T, ReduceOp::kMax>(out, inputs, numel);
    case ReduceOp::kMin:
      return reduce_all<T, ReduceOp::kMin>(out, inputs, numel);
    case ReduceOp::kProd:
      return reduce_all<T, ReduceOp::kProd>(out, inputs, numel);
  }
}

}  // namespace

void ordered_reduce(void* output, const std::vector<const void*>& inputs, std::int64_t numel,
                    at::ScalarType dtype, ReduceOp op) {
  if (op == ReduceOp::kSum && at::isFloatingType(dtype)) {
    // The reduction that training spends its time in has a vectorised kernel; the others are for small
    // tensors.
    cpu::ordered_sum(output, inputs.data(), static_cast<int>(inputs.size()), numel,
                     dtype_of(dtype, "ordered_reduce"), dtype_of(dtype, "ordered_reduce"), false, 1.0);
    return;
  }
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "ordered_reduce",
                             [&] { reduce_typed<scalar_t>(output, inputs, numel, op); });
}

}  // namespace bmtrain
