// The SIMD targets that are compiled. Every file that uses Highway includes this before hwy/foreach_target.h
// and hwy/highway.h. It stands in a paragraph of its own, because clang-format sorts the includes of one
// paragraph.
//
// Highway gives each target a bit, the better the target the lower, and leaves gaps for targets to come:
//   x86   0..7 better than AVX3, 8 AVX3 (AVX-512), 9 AVX2, 10..14 AVX and SSE
//   Arm   15..27 better than NEON (SVE, SVE2, NEON_BF16), 28 NEON, 29 NEON without AES
// The bits are written here as numbers: names differ between versions (1.0.3 has no SSE2, no AVX3_ZEN4), the
// ranges do not. Left are AVX-512, AVX2, one NEON, and x86's baseline EMU128, which kernels leave empty.
#pragma once

#if defined(HIGHWAY_HWY_DETECT_TARGETS_H_)
#error "include cpu/targets.h before any header of Highway"
#endif

#define HWY_DISABLED_TARGETS (0xFFLL | (0x1FLL << 10) | (0x1FFFLL << 15) | ONEPASS_SECOND_NEON)

// With GCC, Highway would replace EMU128 by SCALAR, which has one lane and half of the operations. The reason
// is bugs in products of 16-bit integers (google/highway issues 765 and 1683), which no kernel here has.
#define HWY_BROKEN_EMU128 0

#include <hwy/detect_targets.h>

// Since 1.0.4 there are two NEONs, which differ in AES alone. Nothing here uses it, so only the one of the
// build's baseline is compiled. Highway's macros expand where they are used, hence after this line.
#if !defined(HWY_NEON_WITHOUT_AES)
#define ONEPASS_SECOND_NEON 0
#elif defined(__ARM_FEATURE_AES)
#define ONEPASS_SECOND_NEON HWY_NEON_WITHOUT_AES
#else
#define ONEPASS_SECOND_NEON HWY_NEON
#endif
