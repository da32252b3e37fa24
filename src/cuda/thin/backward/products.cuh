// Products on tensor cores for gradients of thin convolutions: operands are tf32, two tf32 each, or f16.
#pragma once

#include "device/mma.cuh"
#include "thin/thin.cuh"

namespace onepass {

// D += A B of tf32, 16 x 8 x 8.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const uint4& a, float b0, float b1) {
  mma::multiply<mma::Tf32>(d, a, __float_as_uint(b0), __float_as_uint(b1));
}

// Two f16 in a word, `first` in its low half.
__device__ __forceinline__ uint32 pack_halves(float first, float second) {
  uint32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
// The low 16 bits of two words in one, and their high 16 bits.
__device__ __forceinline__ uint32 low_halves(uint32 first, uint32 second) {
  return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32 high_halves(uint32 first, uint32 second) {
  return __byte_perm(first, second, 0x7632);
}

// The power of two that takes `most` to the upper end of f16; 1 if it is 0 or not finite. f16 begins to drop
// bits of values 2^28 times smaller.
__device__ __forceinline__ float scale_for_halves(float most) {
  if (!(most > 0.0f) || !(most < __uint_as_float(0x7f800000u))) return 1.0f;
  int exponent = 13 + 127 - static_cast<int>(__float_as_uint(most) >> 23);
  exponent = exponent < -120 ? -120 : exponent > 126 ? 126 : exponent;
  return __uint_as_float(static_cast<uint32>(exponent + 127) << 23);
}
// 1 / scale, of a power of two.
__device__ __forceinline__ float inverse_of_power(float scale) {
  return __uint_as_float(0x7f000000u - __float_as_uint(scale));
}
// The bits of |x|, or 0 if x is not finite: results that it reaches are not finite whatever the scale.
__device__ __forceinline__ uint32 finite_magnitude(float x) {
  const uint32 bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

// x = high + low, both tf32, with an error of at most 2^-22 |x|.
__device__ __forceinline__ void split_tf32(float x, float& high, float& low) {
  high = round_to_tf32(x);
  low = round_to_tf32(x - high);
}
__device__ __forceinline__ void split_tf32(const uint4& x, uint4& high, uint4& low) {
  float h[4], l[4];
  split_tf32(__uint_as_float(x.x), h[0], l[0]);
  split_tf32(__uint_as_float(x.y), h[1], l[1]);
  split_tf32(__uint_as_float(x.z), h[2], l[2]);
  split_tf32(__uint_as_float(x.w), h[3], l[3]);
  high = {__float_as_uint(h[0]), __float_as_uint(h[1]), __float_as_uint(h[2]), __float_as_uint(h[3])};
  low = {__float_as_uint(l[0]), __float_as_uint(l[1]), __float_as_uint(l[2]), __float_as_uint(l[3])};
}

// Sums of products. Those of split operands move to f32 sums of the CUDA cores after every 64 terms.
template <bool splits, int Count>
struct ProductSums {
  static constexpr int steps_in_core = 8;
  float total[Count][4] = {};
  float part[splits ? Count : 1][4] = {};
  int steps = 0;

  __device__ __forceinline__ void promote() {
    if constexpr (splits) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          total[i][r] += part[i][r];
          part[i][r] = 0.0f;
        }
      }
    }
  }
  // A step of 8 terms: `a` rounded, or split in two; b as it is in memory.
  __device__ __forceinline__ void add(const uint4 (&a)[splits ? 2 : 1], const float (&b)[Count][2]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if constexpr (splits) {
        float high[2], low[2];
        split_tf32(b[i][0], high[0], low[0]);
        split_tf32(b[i][1], high[1], low[1]);
        multiply_tf32(part[i], a[1], high[0], high[1]);
        multiply_tf32(part[i], a[0], low[0], low[1]);
        multiply_tf32(part[i], a[0], high[0], high[1]);
      } else {
        multiply_tf32(total[i], a[0], b[i][0], b[i][1]);
      }
    }
    if constexpr (splits) {
      if (++steps == steps_in_core) {
        promote();
        steps = 0;
      }
    }
  }
  __device__ __forceinline__ void finish() { promote(); }
};

}  // namespace onepass
