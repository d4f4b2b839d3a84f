// Runs every CPU kernel of one level, and the checksum of files, on fixed numbers and prints a digest of each
// result, so that levels and processors can be compared: see tests/unit/test_aarch64.py.
//
//     kernels_driver LEVEL
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "cpu/element.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "disk/checksum.h"

namespace {

using bmtrain::DType;
using bmtrain::size_of;
using namespace bmtrain::cpu;

constexpr std::array kTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr std::array<std::int64_t, 6> kSizes = {0, 1, 15, 16, 37, 1000};
constexpr std::int64_t kMost = 1000;
constexpr int kOffset = 1;  // elements: kernels take memory of any alignment

// A sum of one array, in another dtype.
void convert(const KernelTable& table, void* dst, DType to, const void* src, DType from, std::int64_t n) {
  table.ordered_sum(dst, &src, 1, 0, n, to, from, /*accumulate=*/false, 1);
}

// Elements of one type between guards, written by index.
class Array {
 public:
  Array(DType dtype, std::uint32_t seed) : dtype_(dtype), memory_((kMost + 1 + kOffset) * size_of(dtype)) {
    for (std::int64_t i = 0; i <= kMost; ++i) set(i, number(seed + static_cast<std::uint32_t>(i)));
  }

  // Every element as small as a square of one that is not: a second moment.
  Array& squared() {
    for (std::int64_t i = 0; i <= kMost; ++i) set(i, get(i) * get(i) * 0x1p-6f);
    return *this;
  }

  [[nodiscard]] void* data() { return memory_.data() + kOffset * size_of(dtype_); }
  [[nodiscard]] float* floats() { return static_cast<float*>(data()); }
  [[nodiscard]] DType dtype() const { return dtype_; }

  // The bits of each element, those of any NaN being the same: its sign and payload are the processor's.
  [[nodiscard]] std::uint32_t bits(std::int64_t i) {
    const float value = get(i);
    return value != value ? 0x7fc00000u : std::bit_cast<std::uint32_t>(value);
  }

 private:
  // Numbers of many magnitudes, with zeros, denormals, infinities and NaNs among them.
  static float number(std::uint32_t i) {
    constexpr std::array<float, 8> kSpecial = {0.0f,      -0.0f,   1e-40f,           6e-8f,
                                               -65520.0f, 3.4e38f, __builtin_inff(), __builtin_nanf("")};
    std::uint32_t hash = (i + 1) * 0x9e3779b1u;
    hash = (hash ^ (hash >> 15)) * 0x85ebca77u;
    hash ^= hash >> 13;
    if (hash % 61 == 0) return kSpecial[hash / 61 % kSpecial.size()];
    const std::uint32_t exponent = 127u - 20u + hash % 24u;
    return std::bit_cast<float>((hash & 0x807fffffu) | (exponent << 23));
  }

  [[nodiscard]] float get(std::int64_t i) {
    float out = 0;
    convert(kernel_table(), &out, DType::kFloat32, at(i), dtype_, 1);
    return out;
  }
  void set(std::int64_t i, float value) {
    convert(kernel_table(), at(i), dtype_, &value, DType::kFloat32, 1);
  }
  [[nodiscard]] void* at(std::int64_t i) { return static_cast<char*>(data()) + i * size_of(dtype_); }

  DType dtype_;
  std::vector<char> memory_;
};

// FNV-1a over numbers.
class Digest {
 public:
  void add(std::uint32_t bits) {
    for (int shift = 0; shift < 32; shift += 8) value_ = (value_ ^ (bits >> shift & 0xffu)) * 0x100000001b3u;
  }
  void add(double value) {
    const auto bits = value != value ? 0x7ff8000000000000u : std::bit_cast<std::uint64_t>(value);
    add(static_cast<std::uint32_t>(bits));
    add(static_cast<std::uint32_t>(bits >> 32));
  }
  // All elements, those that no kernel may touch included.
  void add(Array& array) {
    for (std::int64_t i = 0; i <= kMost; ++i) add(array.bits(i));
  }
  void print(const std::string& name) const {
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(value_));
  }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

std::string name_of_type(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kFloat16 ? "fp16" : "bf16";
}

void conversions_and_sums(const KernelTable& table) {
  for (const DType to : kTypes) {
    for (const DType from : kTypes) {
      Digest casts;
      Digest sums;
      for (const std::int64_t n : kSizes) {
        Array a(from, 1);
        Array b(from, 50'000);
        Array out(to, 100'000);
        convert(table, out.data(), to, a.data(), from, n);
        casts.add(out);
        const std::array<const void*, 2> sources = {a.data(), b.data()};
        for (const bool accumulate : {false, true}) {
          table.ordered_sum(out.data(), sources.data(), 2, 0, n, to, from, accumulate,
                            accumulate ? 1.0 : 0.3);
          sums.add(out);
        }
      }
      casts.print("cast." + name_of_type(from) + "." + name_of_type(to));
      sums.print("sum." + name_of_type(from) + "." + name_of_type(to));
    }
  }
}

void reductions(const KernelTable& table) {
  for (const DType dtype : kTypes) {
    Digest digest;
    for (const std::int64_t n : kSizes) {
      for (const std::uint32_t seed : {1u, 300u, 7'000u}) {
        Array x(dtype, seed);
        digest.add(table.squared_sum(x.data(), dtype, 0, n));
        const float largest = std::bit_cast<float>(table.max_magnitude(x.data(), dtype, 0, n));
        digest.add(static_cast<double>(largest));
      }
    }
    digest.print("reduce." + name_of_type(dtype));
  }
}

// A gradient type, and where the rounded weight goes: its type, or fp32 for nowhere.
template <typename Slice, typename Body>
void each_step(const char* name, const Body& body) {
  for (const DType grad_type : kTypes) {
    for (const DType rounded_type : kTypes) {
      Digest digest;
      for (const std::int64_t n : kSizes) {
        Array weight(DType::kFloat32, 1);
        Array grad(grad_type, 20'000);
        Array rounded(rounded_type, 40'000);
        Slice slice;
        slice.weight = weight.floats();
        slice.rounded = rounded_type == DType::kFloat32 ? nullptr : rounded.data();
        slice.rounded_dtype = rounded_type;
        slice.grad = grad.data();
        slice.grad_dtype = grad_type;
        slice.n = n;
        body(slice, digest);
        digest.add(weight);
        digest.add(rounded);
      }
      digest.print(std::string(name) + "." + name_of_type(grad_type) + "." + name_of_type(rounded_type));
    }
  }
}

Divisor divisor(float value) {
  const double reciprocal = 1.0 / static_cast<double>(value);
  const auto high = static_cast<float>(reciprocal);
  return {value, high, static_cast<float>(reciprocal - static_cast<double>(high))};
}

void adam_steps(const KernelTable& table) {
  AdamFactors usual;
  usual.grad_factor = 0.25f;
  usual.lerp_weight = 0.1f;
  usual.beta2 = 0.999f;
  usual.one_minus_beta2 = 0.001f;
  usual.bias_correction2_sqrt = divisor(0.0316f);
  usual.eps = 1e-8f;
  usual.negative_step_size = -3e-4f;
  usual.bias_correction1 = 0.1f;
  AdamFactors decoupled = usual;
  decoupled.decay_kind = WeightDecay::kDecoupled;
  decoupled.decay = 0.997f;
  AdamFactors rare = usual;
  rare.grad_divide = true;
  rare.grad_factor = 3.0f;
  rare.lerp_from_grad = true;
  rare.lerp_weight = -0.4f;
  rare.decay_kind = WeightDecay::kL2;
  rare.decay = rare.weight_decay = 0.01f;
  const std::array<std::pair<const char*, AdamFactors>, 3> steps = {
      {{"adam.usual", usual}, {"adam.decoupled", decoupled}, {"adam.rare", rare}}};
  for (const auto& [name, factors] : steps) {
    for (const DType moments : {DType::kFloat32, DType::kBFloat16}) {
      each_step<AdamSlice>((std::string(name) + "." + name_of_type(moments)).c_str(),
                           [&](AdamSlice& slice, Digest& digest) {
                             Array exp_avg(moments, 60'000);
                             Array exp_avg_sq(moments, 80'000);
                             exp_avg_sq.squared();
                             if (moments == DType::kFloat32) {
                               slice.exp_avg = exp_avg.floats();
                               slice.exp_avg_sq = exp_avg_sq.floats();
                             } else {
                               slice.bf16_exp_avg = exp_avg.data();
                               slice.bf16_exp_avg_sq = exp_avg_sq.data();
                             }
                             slice.factors = factors;
                             slice.factors.dither_seed = 12'345;
                             DeltaSums sums;
                             table.adam(slice, 0, slice.n, &sums);
                             digest.add(exp_avg);
                             digest.add(exp_avg_sq);
                             digest.add(sums.sum);
                             digest.add(sums.sum_of_squares);
                           });
    }
    each_step<AdamSlice>((std::string(name) + ".8-bit").c_str(), [&](AdamSlice& slice, Digest& digest) {
      const auto codes = static_cast<std::size_t>(slice.n);
      std::vector<std::uint8_t> exp_avg(static_cast<std::size_t>(coded_bytes(slice.n)));
      for (std::size_t i = 0; i < exp_avg.size(); ++i) {
        exp_avg[i] = static_cast<std::uint8_t>(i < codes ? i * 37 : 100 + i % 40);
      }
      std::vector<std::uint8_t> exp_avg_sq = exp_avg;
      slice.coded_exp_avg = {.codes = exp_avg.data(), .exponents = exp_avg.data() + codes};
      slice.coded_exp_avg_sq = {.codes = exp_avg_sq.data(), .exponents = exp_avg_sq.data() + codes};
      slice.factors = factors;
      for (const std::uint32_t seed : {12'345u, 67'890u}) {
        slice.factors.dither_seed = seed;
        table.adam(slice, 0, slice.n, nullptr);
      }
      for (const std::uint8_t byte : exp_avg) digest.add(static_cast<double>(byte));
      for (const std::uint8_t byte : exp_avg_sq) digest.add(static_cast<double>(byte));
    });
  }
}

void momentum_steps(const KernelTable& table) {
  MomentumFactors sgd;
  sgd.keep = 0.9f;
  sgd.take = 0.7f;
  sgd.nesterov = true;
  sgd.negative_lr = -0.01f;
  sgd.decay_kind = WeightDecay::kL2;
  sgd.decay = 0.01f;
  MomentumFactors lion = sgd;
  lion.rule = MomentumRule::kLion;
  lion.ahead_keep = 0.95f;
  lion.ahead_take = 0.05f;
  lion.decay_kind = WeightDecay::kDecoupled;
  lion.decay = 0.999f;
  const std::array<std::pair<const char*, MomentumFactors>, 2> rules = {{{"sgd", sgd}, {"lion", lion}}};
  for (const auto& [name, factors] : rules) {
    each_step<MomentumSlice>(name, [&](MomentumSlice& slice, Digest& digest) {
      Array momentum(DType::kFloat32, 60'000);
      slice.momentum = momentum.floats();
      slice.factors = factors;
      table.momentum(slice, 0, slice.n);
      digest.add(momentum);
    });
  }
}

void checksums() {
  std::vector<unsigned char> bytes(4096);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 7 + (i >> 8));
  std::printf("crc32 %08x\n", bmtrain::crc32_of(bytes.data(), static_cast<std::int64_t>(bytes.size())));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  force_isa_level(argv[1]);
  const KernelTable& table = kernel_table();
  conversions_and_sums(table);
  reductions(table);
  adam_steps(table);
  momentum_steps(table);
  checksums();
  return 0;
}
