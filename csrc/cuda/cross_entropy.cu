// A block takes a row (the card hands out blocks as they end, which balances best), a thread 16 bytes of it
// at a time.
#include "cuda/cross_entropy.h"
#include "cuda/cross_entropy_math.h"
#include "cuda/launch.h"
#include "cuda/pack.h"

namespace bmtrain::cuda {
namespace {

constexpr int kUnroll = 4;  // loads of a thread that are under way together

// Errors of the fast exponential are far below the rounding of 16-bit logits.
template <typename T>
constexpr bool kFast = sizeof(T) == 2;

template <typename T>
constexpr int kCount = 16 / static_cast<int>(sizeof(T));

template <typename T>
using RowPack = Pack<T, kCount<T>>;

// Elements before the first address that a pack can be at.
template <typename T>
__device__ std::int64_t head_of(const T* row, std::int64_t width) {
  const auto beyond = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
  const std::int64_t head = beyond == 0 ? 0 : kCount<T> - beyond;
  return head < width ? head : width;
}

// Calls visit_pack(first column, pack) for this thread's parts of a row, and visit_one(column) for those at
// its unaligned ends.
template <typename T, typename VisitOne, typename VisitPack>
__device__ void for_each_part(const T* row, std::int64_t width, const VisitOne& visit_one,
                              const VisitPack& visit_pack) {
  const std::int64_t head = head_of(row, width);
  const std::int64_t num_packs = (width - head) / kCount<T>;
  for (std::int64_t c = threadIdx.x; c < head; c += kThreads) visit_one(c);
  const auto column = [head](std::int64_t p) { return head + p * kCount<T>; };
  std::int64_t p = threadIdx.x;
  for (; p + (kUnroll - 1) * kThreads < num_packs; p += kUnroll * kThreads) {
    RowPack<T> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = load_pack<kCount<T>>(row + column(p + u * kThreads));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) visit_pack(column(p + u * kThreads), loaded[u]);
  }
  for (; p < num_packs; p += kThreads) visit_pack(column(p), load_pack<kCount<T>>(row + column(p)));
  for (std::int64_t c = column(num_packs) + threadIdx.x; c < width; c += kThreads) visit_one(c);
}

template <typename T>
__device__ RowPart part_of(const Logits& logits, const T* row) {
  RowPart part;
  if (!logits.smooth) {
    const auto add_one = [&](std::int64_t c) {
      const float x[] = {to_float(row[c])};
      add_logits<kFast<T>>(part, x);
    };
    for_each_part(row, logits.width, add_one, [&](std::int64_t /*c*/, const RowPack<T>& pack) {
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
      [&](std::int64_t c, const RowPack<T>& pack) {
#pragma unroll
        for (int k = 0; k < kCount<T>; ++k) add(c + k, pack.values[k]);
      });
  return part;
}

// The target's logit, or what stands for that of another rank or of none.
template <typename T>
__device__ float target_logit_of(const Logits& logits, const T* row, std::int64_t r, bool divided) {
  const std::int64_t target = logits.target[r];
  if (target >= 0 && target < logits.width) return to_float(row[target]);
  return divided ? 0 : NAN;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sums_kernel(Logits logits, RowSums out) {
  const std::int64_t r = blockIdx.x;
  const T* const row = static_cast<const T*>(logits.data) + r * logits.width;
  // First, so that nobody waits for it at the end.
  const float target_logit = threadIdx.x == 0 ? target_logit_of(logits, row, r, out.divided) : 0;
  RowPart part =
      merge_block(part_of(logits, row), [](const RowPart& a, const RowPart& b) { return merged(a, b); });
  if (threadIdx.x != 0) return;
  const bool is_empty = part.maximum == -INFINITY;  // every column is -inf
  if (is_empty && out.divided) part = rebased(part, 0);
  out.maximum[r] = part.maximum;
  out.exp_sum[r] = is_empty && !out.divided ? NAN : part.exp_sum;
  if (out.smooth != nullptr) out.smooth[r] = part.smooth;
  out.target_logit[r] = target_logit;
}

// The gradient of one row. `weight` counts where labels are smoothed: of the columns, or nullptr.
template <bool kSmooth, typename T>
__device__ void write_gradient(const T* row, T* to, std::int64_t width, std::int64_t target,
                               const RowGradient& factors, const float* weight) {
  const auto gradient_of = [&](std::int64_t c, T x) {
    const float gradient = logit_gradient<kFast<T>>(factors, to_float(x));
    if constexpr (!kSmooth) return gradient;
    return gradient - factors.spread * (weight == nullptr ? 1 : weight[c]);
  };
  const auto one = [&](std::int64_t c) {
    const float gradient = gradient_of(c, row[c]);
    to[c] = from_float<T>(c == target ? gradient - factors.hit : gradient);
  };
  // It lies in memory as the logits do, or (another allocation) a whole number of packs away.
  const bool is_alike =
      reinterpret_cast<std::uintptr_t>(row) % 16 == reinterpret_cast<std::uintptr_t>(to) % 16;
  if (!is_alike) {
    for (std::int64_t c = threadIdx.x; c < width; c += kThreads) one(c);
    return;
  }
  for_each_part(row, width, one, [&](std::int64_t c, const RowPack<T>& pack) {
    float gradient[kCount<T>];
#pragma unroll
    for (int k = 0; k < kCount<T>; ++k) gradient[k] = gradient_of(c + k, pack.values[k]);
    const std::int64_t hit = target - c;
    if (hit >= 0 && hit < kCount<T>) {  // one pack of a row: the others need not look at each column
#pragma unroll
      for (int k = 0; k < kCount<T>; ++k) gradient[k] = k == hit ? gradient[k] - factors.hit : gradient[k];
    }
    RowPack<T> rounded;
#pragma unroll
    for (int k = 0; k < kCount<T>; ++k) rounded.values[k] = from_float<T>(gradient[k]);
    store_pack(to + c, rounded);
  });
}

// Zeros, for which nothing is read.
template <typename T>
__device__ void write_zeros(T* to, std::int64_t width) {
  const std::int64_t head = head_of(to, width);
  const std::int64_t num_packs = (width - head) / kCount<T>;
  const T zero = from_float<T>(0);
  for (std::int64_t c = threadIdx.x; c < head; c += kThreads) to[c] = zero;
  for (std::int64_t p = threadIdx.x; p < num_packs; p += kThreads)
    store_pack(to + head + p * kCount<T>, RowPack<T>{});
  for (std::int64_t c = head + num_packs * kCount<T> + threadIdx.x; c < width; c += kThreads) to[c] = zero;
}

// Blocks of a multiprocessor that registers must be left for: as many as need no memory in their stead.
// Turing has 1,024 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <typename T>
constexpr int kBlocks = 4;
#else
template <typename T>
constexpr int kBlocks = sizeof(T) == 2 ? 5 : 4;
#endif

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    gradient_kernel(Logits logits, RowFactors rows, T* gradient) {
  const std::int64_t r = blockIdx.x;
  const T* const row = static_cast<const T*>(logits.data) + r * logits.width;
  T* const to = gradient + r * logits.width;
  if (rows.ignored[r]) return write_zeros(to, logits.width);
  const RowGradient factors{rows.maximum[r], rows.log_sum[r], rows.scale[r], rows.hit[r], rows.spread[r]};
  if (factors.spread == 0) {
    write_gradient<false>(row, to, logits.width, logits.target[r], factors, nullptr);
  } else {
    write_gradient<true>(row, to, logits.width, logits.target[r], factors, logits.weight);
  }
}

// A launch over all rows.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_rows(std::int64_t num_rows, cudaStream_t stream, void (*kernel)(Parameters...),
                        const Arguments&... arguments) {
  if (num_rows == 0) return cudaSuccess;
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  if (num_rows > kMostBlocks) return cudaErrorInvalidValue;
  return launch(stream, static_cast<unsigned>(num_rows), kernel, arguments...);
}

}  // namespace

cudaError_t cross_entropy_sums(const Logits& logits, const RowSums& out, cudaStream_t stream) {
  return with_element_type(logits.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return launch_rows(logits.num_rows, stream, sums_kernel<T>, logits, out);
  });
}

cudaError_t cross_entropy_gradient(const Logits& logits, const RowFactors& rows, void* gradient,
                                   cudaStream_t stream) {
  return with_element_type(logits.dtype, [&](auto type) {
    using T = typename decltype(type)::Type;
    return launch_rows(logits.num_rows, stream, gradient_kernel<T>, logits, rows, static_cast<T*>(gradient));
  });
}

}  // namespace bmtrain::cuda
