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

// What sums and products are made in: those of signed integers wrap around instead of being undefined, and
// those of bools are "any" and "all".
template <typename A>
using Wide = std::conditional_t<std::is_integral_v<A>, std::uint64_t, A>;

template <typename T, typename Combine>
void reduce_all(void* output, const std::vector<const void*>& inputs, std::int64_t numel, bool averages,
                const Combine& combine) {
  using A = at::opmath_type<T>;  // fp32 for 16-bit types
  const auto count = static_cast<A>(inputs.size());
  A acc[kChunk];
  for (std::int64_t begin = 0; begin < numel; begin += kChunk) {
    const std::int64_t length = std::min(kChunk, numel - begin);
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      const T* next = static_cast<const T*>(inputs[r]) + begin;
      for (std::int64_t i = 0; i < length; ++i) {
        const auto value = static_cast<A>(next[i]);
        acc[i] = r == 0 ? value : combine(acc[i], value);
      }
    }
    for (std::int64_t i = 0; i < length; ++i) {
      if constexpr (std::is_floating_point_v<A>) {
        if (averages) acc[i] /= count;
      }
      static_cast<T*>(output)[begin + i] = static_cast<T>(acc[i]);
    }
  }
}

template <typename T>
void reduce_typed(void* output, const std::vector<const void*>& inputs, std::int64_t numel, ReduceOp op) {
  using A = at::opmath_type<T>;
  const auto with = [&](const auto& combine) {
    reduce_all<T>(output, inputs, numel, op == ReduceOp::kAvg, combine);
  };
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return with([](A a, A b) { return static_cast<A>(Wide<A>(a) + Wide<A>(b)); });
    case ReduceOp::kProd:
      return with([](A a, A b) { return static_cast<A>(Wide<A>(a) * Wide<A>(b)); });
    // The second test lets a NaN in; once there is one no value is greater or less than it.
    case ReduceOp::kMax:
      return with([](A a, A b) { return b > a || b != b ? b : a; });
    case ReduceOp::kMin:
      return with([](A a, A b) { return b < a || b != b ? b : a; });
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
