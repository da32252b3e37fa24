// Which of the compiled SIMD targets this CPU runs; after cpu/targets.h and hwy/highway.h.
//
// It replaces hwy::SupportedTargets, the one symbol for which libonepass and the wheel would need libhwy.so
// at run time. A test, tests/cpu_test.cc, compares the two.
#pragma once

#if HWY_ARCH_X86
#include <cpuid.h>
#endif

#include <cstdint>
#include <vector>

namespace onepass::cpu {

#if HWY_ARCH_X86
// What the compiler may use for the target (HWY_TARGET_STR of hwy/ops/set_macros-inl.h, the longest of all
// versions). The builtins ask the operating system too whether it saves the registers.
inline bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;  // Clang 14: no builtin
  return has_f16c && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") &&
         __builtin_cpu_supports("aes") && __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
}

inline bool has_avx3() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw");
}
#endif

// Highway's bits, best first.
inline std::vector<int64_t> supported_targets() {
#if HWY_ARCH_X86
  std::vector<int64_t> targets;
  if ((HWY_TARGETS & HWY_AVX3) != 0 && has_avx3()) targets.push_back(HWY_AVX3);
  if ((HWY_TARGETS & HWY_AVX2) != 0 && has_avx2()) targets.push_back(HWY_AVX2);
  return targets;
#else
  return {HWY_STATIC_TARGET};  // targets.h leaves the one NEON that is part of the build's baseline
#endif
}

}  // namespace onepass::cpu
