// A block takes a row at a time; its threads take 16 bytes of the row at a time.
#include "cuda/cross_entropy.h"
#include "cuda/cross_entropy_math.h"
#include "cuda/launch.h"

namespace bmtrain::cuda {
namespace {

constexpr int kUnroll = 4;  // loads of a thread that are under way together

// Errors of the fast exponential are far below the rounding of 16-bit logits.
template <typename T>
constexpr bool kFast = sizeof(T) == 2;

template <typename T>
constexpr int kCount = 16 / static_cast<int>(sizeof(T));

// Calls visit_pack(first column, pack) for this thread's parts of a row, and visit_one(column) for those at
// its unaligned ends.
template <typename T, typename VisitOne, typename VisitPack>
__device__ void for_each_part(const T* row, std::int64_t width, VisitOne visit_one, VisitPack visit_pack) {
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
  std::int64_t head = misaligned == 0 ? 0 : kCount<T> - misaligned;
  head = head < width ? head : width;
  const std::int64_t num_packs = (width - head) / kCount<T>;
  const auto* const packs = reinterpret_cast<const Pack<T, kCount<T>>*>(row + head);
  for (std::int64_t c = threadIdx.x; c < head; c += kThreads) visit_one(c);
  std::int64_t p = threadIdx.x;
  for (; p + (kUnroll - 1) * kThreads < num_packs; p += kUnroll * kThreads) {
    Pack<T, kCount<T>> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = packs[p + u * kThreads];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) visit_pack(head + (p + u * kThreads) * kCount<T>, loaded[u]);
  }
  for (; p < num_packs; p += kThreads) visit_pack(head + p * kCount<T>, packs[p]);
  for (std::int64_t c = head + num_packs * kCount<T> + threadIdx.x; c < width; c += kThreads) visit_one(c);
}

template <typename T>
__device__ RowPart part_of(const Logits& logits, const T* row) {
  RowPart part;
  if (!logits.smooth) {
    const auto add_one = [&](std::int64_t c) {
      const float x[] = {to_float(row[c])};
      add_logits<kFast<T>>(part, x);
    };
    for_each_part(row, logits.width, add_one, [&](std::int64_t /*c*/, const Pack<T, kCount<T>>& pack) {
      float x[kCount<T>];
#pragma unroll
      for (int k = 0; k < kCount<T>; ++k) x[k] = to_float(pack.values[k]);
      add_logits<kFast<T>>(part, x);
    });
    return part;
  }
  const auto add = [&](std::int64_t c, T x) {
    add_logit(part, to_float(x), logits.weight == nullptr ? 1 : logits.weight[c]);
  };
  for_each_part(
      row, logits.width, [&](std::int64_t c) { add(c, row[c]); },
      [&](std::int64_t c, const Pack<T, kCount<T>>& pack) {
#pragma unroll
        for (int k = 0; k < kCount<T>; ++k) add(c + k, pack.values[k]);
      });
  return part;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sums_kernel(Logits logits, RowSums out) {
  for (std::int64_t r = blockIdx.x; r < logits.num_rows; r += gridDim.x) {
    const T* const row = static_cast<const T*>(logits.data) + r * logits.width;
    RowPart part =
        merge_block(part_of(logits, row), [](const RowPart& a, const RowPart& b) { return merged(a, b); });
    if (threadIdx.x == 0) {
      const bool is_empty = part.maximum == -INFINITY;  // every column is -inf
      if (is_empty && out.divided) part = rebased(part, 0);
      out.maximum[r] = part.maximum;
      out.exp_sum[r] = is_empty && !out.divided ? NAN : part.exp_sum;
      if (out.smooth != nullptr) out.smooth[r] = part.smooth;
      const std::int64_t target = logits.target[r];
      const bool is_here = target >= 0 && target < logits.width;
      out.target_logit[r] = is_here ? to_float(row[target]) : out.divided ? 0 : NAN;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) gradient_kernel(Logits logits, RowFactors rows, T* gradient) {
  for (std::int64_t r = blockIdx.x; r < logits.num_rows; r += gridDim.x) {
    const T* const row = static_cast<const T*>(logits.data) + r * logits.width;
    T* const to = gradient + r * logits.width;
    const RowGradient factors{rows.maximum[r], rows.log_sum[r], rows.scale[r], rows.hit[r], rows.spread[r]};
    const std::int64_t target = logits.target[r];
    const bool ignored = rows.ignored[r];
    const auto gradient_of = [&](std::int64_t c, T x) {
      if (ignored) return from_float<T>(0);
      const float weight = logits.weight == nullptr ? 1 : logits.weight[c];
      return from_float<T>(logit_gradient<kFast<T>>(factors, to_float(x), c == target, weight));
    };
    // The gradient lies in memory as the logits do, or (another allocation) a whole number of packs away.
    const bool alike =
        reinterpret_cast<std::uintptr_t>(row) % 16 == reinterpret_cast<std::uintptr_t>(to) % 16;
    const auto one = [&](std::int64_t c) { to[c] = gradient_of(c, row[c]); };
    if (!alike) {
      for (std::int64_t c = threadIdx.x; c < logits.width; c += kThreads) one(c);
      continue;
    }
    for_each_part(row, logits.width, one, [&](std::int64_t c, Pack<T, kCount<T>> pack) {
#pragma unroll
      for (int k = 0; k < kCount<T>; ++k) pack.values[k] = gradient_of(c + k, pack.values[k]);
      *reinterpret_cast<Pack<T, kCount<T>>*>(to + c) = pack;
    });
  }
}

template <typename T>
cudaError_t launch_gradient(const Logits& logits, const RowFactors& rows, void* gradient,
                            cudaStream_t stream) {
  gradient_kernel<<<grid_for(logits.num_rows), kThreads, 0, stream>>>(logits, rows,
                                                                      static_cast<T*>(gradient));
  return cudaGetLastError();
}

}  // namespace

cudaError_t cross_entropy_sums(const Logits& logits, const RowSums& out, cudaStream_t stream) {
  if (logits.num_rows == 0) return cudaSuccess;
  const unsigned grid = grid_for(logits.num_rows);
  switch (logits.dtype) {
    case DType::kFloat32:
      sums_kernel<float><<<grid, kThreads, 0, stream>>>(logits, out);
      break;
    case DType::kBFloat16:
      sums_kernel<Bf16><<<grid, kThreads, 0, stream>>>(logits, out);
      break;
    case DType::kFloat16:
      sums_kernel<Half><<<grid, kThreads, 0, stream>>>(logits, out);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t cross_entropy_gradient(const Logits& logits, const RowFactors& rows, void* gradient,
                                   cudaStream_t stream) {
  if (logits.num_rows == 0) return cudaSuccess;
  switch (logits.dtype) {
    case DType::kFloat32:
      return launch_gradient<float>(logits, rows, gradient, stream);
    case DType::kBFloat16:
      return launch_gradient<Bf16>(logits, rows, gradient, stream);
    case DType::kFloat16:
      return launch_gradient<Half>(logits, rows, gradient, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace bmtrain::cuda
