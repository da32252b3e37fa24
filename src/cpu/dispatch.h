// Macros for files compiled once per SIMD target, and for the file that calls them.
//
//   ONEPASS_UNROLL for (...)                unrolls a loop over a local array, which then lives in registers
//   ONEPASS_DECLARE_FOR_TARGETS(void f();)  declares N_NEON::f and so on, for every compiled target
//   ONEPASS_FOR_TARGET(target, f())         calls N_NEON::f() where target == HWY_NEON, and so on
#pragma once

// Highway's emulation of vectors in plain C++, the baseline on x86. Kernels leave it out: it would take
// minutes to compile and be slower than the reference.
#define ONEPASS_TARGET_IS_EMULATED (HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR)

#if defined(__clang__)
#define ONEPASS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ONEPASS_UNROLL _Pragma("GCC unroll 32")
#endif

#if HWY_TARGETS & HWY_NEON
#define ONEPASS_DECLARE_NEON(declarations) \
  namespace N_NEON {                       \
  declarations                             \
  }
#define ONEPASS_CASE_NEON(call) \
  case HWY_NEON:                \
    N_NEON::call;               \
    break;
#else
#define ONEPASS_DECLARE_NEON(declarations)
#define ONEPASS_CASE_NEON(call)
#endif

#if defined(HWY_NEON_WITHOUT_AES)
#if HWY_TARGETS & HWY_NEON_WITHOUT_AES
#define ONEPASS_DECLARE_NEON_WITHOUT_AES(declarations) \
  namespace N_NEON_WITHOUT_AES {                       \
  declarations                                         \
  }
#define ONEPASS_CASE_NEON_WITHOUT_AES(call) \
  case HWY_NEON_WITHOUT_AES:                \
    N_NEON_WITHOUT_AES::call;               \
    break;
#endif
#endif
#if !defined(ONEPASS_CASE_NEON_WITHOUT_AES)
#define ONEPASS_DECLARE_NEON_WITHOUT_AES(declarations)
#define ONEPASS_CASE_NEON_WITHOUT_AES(call)
#endif

#if HWY_TARGETS & HWY_AVX3
#define ONEPASS_DECLARE_AVX3(declarations) \
  namespace N_AVX3 {                       \
  declarations                             \
  }
#define ONEPASS_CASE_AVX3(call) \
  case HWY_AVX3:                \
    N_AVX3::call;               \
    break;
#else
#define ONEPASS_DECLARE_AVX3(declarations)
#define ONEPASS_CASE_AVX3(call)
#endif

#if HWY_TARGETS & HWY_AVX2
#define ONEPASS_DECLARE_AVX2(declarations) \
  namespace N_AVX2 {                       \
  declarations                             \
  }
#define ONEPASS_CASE_AVX2(call) \
  case HWY_AVX2:                \
    N_AVX2::call;               \
    break;
#else
#define ONEPASS_DECLARE_AVX2(declarations)
#define ONEPASS_CASE_AVX2(call)
#endif

#define ONEPASS_DECLARE_FOR_TARGETS(declarations) \
  ONEPASS_DECLARE_NEON(declarations)              \
  ONEPASS_DECLARE_NEON_WITHOUT_AES(declarations)  \
  ONEPASS_DECLARE_AVX3(declarations)              \
  ONEPASS_DECLARE_AVX2(declarations)

#define ONEPASS_FOR_TARGET(target, call) \
  switch (target) {                      \
    ONEPASS_CASE_NEON(call)              \
    ONEPASS_CASE_NEON_WITHOUT_AES(call)  \
    ONEPASS_CASE_AVX3(call)              \
    ONEPASS_CASE_AVX2(call)              \
    default:                             \
      break;                             \
  }
