// What the kernels of gemm_gradients.cuh share: rings of buffers, and the powers of two that f32 elements are
// multiplied by.
#pragma once

#include "device/barrier.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"

namespace onepass {

namespace gradients {

// A place in a ring and how often it came round.
template <int Stages>
struct Ring {
  int stage = 0;
  uint32 round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      round ^= 1u;
    }
  }
};

// The power of two that takes `largest` (its bits) to [2^to, 2^(to + 1)).
__device__ __forceinline__ float scale_to(uint32 largest, int to) {
  if (largest == 0) return 1.0f;
  int exponent = to - (static_cast<int>(largest >> 23) - 127);
  exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
  return __uint_as_float(static_cast<uint32>(127 + exponent) << 23);
}

// What a packed tensor was multiplied by. `words`: the bits of the largest finite magnitude of a part of the
// elements, then of all of them.
struct Scale {
  float value;
  bool is_second;

  explicit __device__ __forceinline__ Scale(const uint32* words) {
    // Room for larger ones than were seen, and 22 bits below the largest before f16 drops some.
    value = scale_to(__ldcg(words), 8);
    const uint32 largest = __ldcg(words + 1);
    const float scaled = __uint_as_float(largest) * value;
    is_second = largest != 0 && !(scaled < 65504.0f && scaled >= 0x1p-2f);
    if (is_second) value = scale_to(largest, 14);
  }
};

// The largest finite magnitude, as bits.
__device__ __forceinline__ void keep_largest(uint32& largest, float x) {
  const uint32 bits = __float_as_uint(x) & 0x7fffffffu;
  largest = bits < 0x7f800000u && bits > largest ? bits : largest;
}

}  // namespace gradients

}  // namespace onepass
