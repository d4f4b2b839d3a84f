#include "optim/torch_sqrt.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace bmtrain {
namespace {

// Not above the size from which torch uses several threads for one tensor: the caller is one of many.
constexpr std::int64_t kTorchBlock = 2048;

void sqrt_by_torch(std::int64_t n, const float* x, float* out) {
  const at::NoGradGuard no_grad;
  for (std::int64_t i = 0; i < n; i += kTorchBlock) {
    const std::int64_t size = std::min(kTorchBlock, n - i);
    const at::Tensor input = at::from_blob(const_cast<float*>(x + i), {size}, at::kFloat);
    at::Tensor output = at::from_blob(out + i, {size}, at::kFloat);
    at::sqrt_out(output, input);
  }
}

// MKL's, called as torch calls it: high accuracy, denormals kept, errors ignored.
using MklSqrt = void (*)(std::int64_t n, const float* x, float* out, std::int64_t mode);

MklSqrt mkl_sqrt() {
  static const MklSqrt function =
      at::hasMKL() ? reinterpret_cast<MklSqrt>(dlsym(RTLD_DEFAULT, "vmsSqrt")) : MklSqrt{nullptr};
  return function;
}

// Keeps MKL from starting threads of its own in the calling thread, which is one of our pool's already.
class SingleThreadedMkl {
 public:
  SingleThreadedMkl() : before_(set_threads() != nullptr ? set_threads()(1) : 0) {}
  ~SingleThreadedMkl() {
    if (set_threads() != nullptr) set_threads()(before_);
  }
  SingleThreadedMkl(const SingleThreadedMkl&) = delete;
  SingleThreadedMkl& operator=(const SingleThreadedMkl&) = delete;

 private:
  using SetThreads = int (*)(int);
  static SetThreads set_threads() {
    static const auto function =
        reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"));
    return function;
  }
  int before_;
};

void sqrt_by_mkl(std::int64_t n, const float* x, float* out) {
  constexpr std::int64_t kHighAccuracy = 0x2;
  constexpr std::int64_t kKeepDenormals = 0x00140000;
  constexpr std::int64_t kIgnoreErrors = 0x100;
  const SingleThreadedMkl alone;
  mkl_sqrt()(n, x, out, kHighAccuracy | kKeepDenormals | kIgnoreErrors);
}

void sqrt_by_ieee(std::int64_t n, const float* x, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = std::sqrt(x[i]);
}

cpu::SqrtFunction choose_sqrt() {
  // Second moments of every size, exponents and mantissas mixed by a multiplicative hash.
  std::array<float, kTorchBlock> x{};
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto hash = static_cast<std::uint32_t>(i + 1) * 2654435761u;
    x[i] = std::bit_cast<float>(hash % 0x7f800000u);
  }
  std::array<float, kTorchBlock> expected{};
  std::array<float, kTorchBlock> got{};
  sqrt_by_torch(kTorchBlock, x.data(), expected.data());
  const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  const auto agrees = [&](cpu::SqrtFunction candidate) {
    candidate(kTorchBlock, x.data(), got.data());
    return std::ranges::equal(expected, got, {}, bits, bits);
  };
  if (mkl_sqrt() != nullptr && agrees(sqrt_by_mkl)) return sqrt_by_mkl;
  if (!at::hasMKL() && agrees(sqrt_by_ieee)) return nullptr;
  return sqrt_by_torch;
}

}  // namespace

cpu::SqrtFunction torch_sqrt() {
  static const cpu::SqrtFunction function = choose_sqrt();
  return function;
}

}  // namespace bmtrain
