#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>

#include "common/check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace bmtrain::cpu {
namespace {

// The levels of this kind of processor, each above the one before.
#if defined(__aarch64__)
constexpr IsaLevel kLevels[] = {IsaLevel::kBase, IsaLevel::kNeon};
constexpr const char* kNames = "base or neon";
#else
constexpr IsaLevel kLevels[] = {IsaLevel::kBase, IsaLevel::kAvx2, IsaLevel::kAvx512};
constexpr const char* kNames = "base, avx2 or avx512";
#endif

#if defined(__x86_64__)
struct CpuId {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuId cpu_id(unsigned leaf) {
  CpuId out;
  __get_cpuid_count(leaf, 0, &out.eax, &out.ebx, &out.ecx, &out.edx);  // leaves 0 where there is no such leaf
  return out;
}

// Which register states the operating system saves when it switches threads (XCR0).
std::uint64_t saved_register_states() {
  constexpr unsigned kOsxsave = 1u << 27;
  if ((cpu_id(1).ecx & kOsxsave) == 0) return 0;
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

IsaLevel detect() {
  constexpr std::uint64_t kYmm = 0x6;                                  // SSE and upper YMM halves
  constexpr std::uint64_t kZmm = 0xe6;                                 // and mask registers, ZMM
  constexpr unsigned kFmaF16c = (1u << 12) | (1u << 29) | (1u << 28);  // leaf 1 ecx: FMA, F16C, AVX
  constexpr unsigned kAvx2Bmi2 = (1u << 5) | (1u << 8);                // leaf 7 ebx
  constexpr unsigned kAvx512 =
      (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // leaf 7 ebx: F, DQ, BW, VL
  const std::uint64_t saved = saved_register_states();
  const unsigned leaf1 = cpu_id(1).ecx;
  const unsigned leaf7 = cpu_id(7).ebx;
  const bool avx2 =
      (saved & kYmm) == kYmm && (leaf1 & kFmaF16c) == kFmaF16c && (leaf7 & kAvx2Bmi2) == kAvx2Bmi2;
  if (!avx2) return IsaLevel::kBase;
  return (saved & kZmm) == kZmm && (leaf7 & kAvx512) == kAvx512 ? IsaLevel::kAvx512 : IsaLevel::kAvx2;
}
#elif defined(__aarch64__)
IsaLevel detect() { return IsaLevel::kNeon; }
#else
IsaLevel detect() { return IsaLevel::kBase; }
#endif

IsaLevel level_named(const std::string& name, const char* source) {
  for (const IsaLevel level : kLevels) {
    if (name != name_of(level)) continue;
    BMT_CHECK(ValueError, level <= highest_isa_level(), source, ": expected a level this machine has (up to ",
              name_of(highest_isa_level()), "), got ", name);
    return level;
  }
  throw ValueError(detail::join(source, ": expected ", kNames, ", got '", name, "'"));
}

IsaLevel level_at_start() {
  const char* name = std::getenv("BMTRAIN_CPU_ISA");
  return name == nullptr || *name == '\0' ? highest_isa_level() : level_named(name, "BMTRAIN_CPU_ISA");
}

// The one choice of the process. An exception leaves it unmade, so that every use reports the bad variable.
std::atomic<IsaLevel>& chosen_level() {
  static std::atomic<IsaLevel> level{level_at_start()};
  return level;
}

}  // namespace

const char* name_of(IsaLevel level) {
  static constexpr const char* kNamesOfLevels[] = {"base", "avx2", "avx512", "neon"};
  return kNamesOfLevels[static_cast<std::size_t>(level)];
}

IsaLevel highest_isa_level() {
  static const IsaLevel level = detect();
  return level;
}

IsaLevel isa_level() { return chosen_level().load(std::memory_order_relaxed); }

void force_isa_level(const std::string& name) {
  chosen_level().store(level_named(name, "level"), std::memory_order_relaxed);
}

const KernelTable& kernel_table() {
  switch (isa_level()) {
#if defined(__x86_64__)
    case IsaLevel::kAvx512:
      return avx512::kTable;
    case IsaLevel::kAvx2:
      return avx2::kTable;
#elif defined(__aarch64__)
    case IsaLevel::kNeon:
      return neon::kTable;
#endif
    default:
      return base::kTable;
  }
}

}  // namespace bmtrain::cpu
