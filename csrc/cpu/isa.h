// Which instruction set the CPU kernels use, and the table of kernels each one provides.
//
// [Note: One body, several levels]
// A kernel is written once (adam.inl, momentum.inl, reduce.inl, ...) over a vector of 16 floats, and included
// once for each level: base.cpp (plain C++), avx2.cpp and avx512.cpp on x86, neon.cpp on Arm, each in a
// namespace of its own. All levels agree bit for bit, because
//   - every level works on groups of 16 elements in the same order, a last partial group included, and adds
//     up in 16 separate lanes whatever its registers hold;
//   - a fused multiply-add is one where the body says so (`fma`) and nowhere else: -ffp-contract=off;
//   - all other operations are IEEE 754's, and conversions to 16 bits round to nearest even, with denormals.
// The sign and the payload of a NaN are all that may differ.
// avx2.cpp and avx512.cpp raise the compiler's target only after all headers, and instantiate no function of
// the standard library afterwards: an inline function compiled there could be chosen by the linker for
// everybody, and crash on an older processor.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "cpu/kernels.h"

namespace bmtrain::cpu {

enum class IsaLevel : std::uint8_t {
  kBase,    // the compiler's default target
  kAvx2,    // AVX2, FMA, F16C, BMI2
  kAvx512,  // AVX-512 F, BW, VL, DQ
  kNeon,    // every 64-bit Arm processor
};

/// The names of BMTRAIN_CPU_ISA: "base", "avx2", "avx512", "neon".
[[nodiscard]] const char* name_of(IsaLevel level);

/// The highest level that this processor has and whose registers the operating system saves.
[[nodiscard]] IsaLevel highest_isa_level();

/// The level in use: the highest one, or what the environment variable BMTRAIN_CPU_ISA said when a kernel was
/// first used. ValueError for an unknown name or a level this machine does not have.
[[nodiscard]] IsaLevel isa_level();

/// Changes the level of the whole process; for tests that compare levels. ValueError as isa_level().
void force_isa_level(const std::string& name);

/// The kernels of one level. Each works serially on elements [offset, offset + n) of memory of any alignment.
struct KernelTable {
  void (*ordered_sum)(void* dst, const void* const* srcs, int num_srcs, std::int64_t offset, std::int64_t n,
                      DType dtype, DType src_dtype, bool accumulate, double factor);
  double (*squared_sum)(const void* x, DType dtype, std::int64_t offset, std::int64_t n);
  // The bits of the largest |x[i]| as fp32; those of a NaN are above those of infinity.
  std::uint32_t (*max_magnitude)(const void* x, DType dtype, std::int64_t offset, std::int64_t n);
  void (*adam)(const AdamSlice& slice, std::int64_t offset, std::int64_t n, DeltaSums* sums);
  void (*momentum)(const MomentumSlice& slice, std::int64_t offset, std::int64_t n);
  void (*adam_move)(const AdamSlice& slice, std::int64_t offset, std::int64_t n);
};

/// The table of isa_level().
[[nodiscard]] const KernelTable& kernel_table();

namespace base {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#elif defined(__aarch64__)
namespace neon {
extern const KernelTable kTable;
}
#endif

}  // namespace bmtrain::cpu
