// What the kernels of gemm/backward/gradients.cuh share: the flat index of positions, and the powers of two
// that scale f32 elements into the range of f16.
#pragma once

#include "device/barrier.cuh"
#include "device/reduce.cuh"
#include "device/ring.cuh"
#include "device/types.cuh"
#include "gemm/backward/parameters.cuh"
#include "gemm/flat_index.cuh"
#include "gemm/product/wgmma.cuh"

namespace onepass {

namespace gradients {

// How far tap `t` lies from a position in the flat index, forwards or backwards.
template <class N, int Sign = 1>
__device__ __forceinline__ int tap_shift(int t) {
  const int m2 = t % N::kernel2;
  const int m1 = t / N::kernel2 % N::kernel1;
  const int m0 = t / (N::kernel2 * N::kernel1);
  return Sign * ((m0 * N::dilation0 - N::padding0) * N::plane + (m1 * N::dilation1 - N::padding1) * N::pitch +
                 m2 * N::dilation2 - N::padding2);
}

// The power of two that takes `largest` (its bits) to [2^to, 2^(to + 1)).
__device__ __forceinline__ float scale_to(uint32 largest, int to) {
  if (largest == 0) return 1.0f;
  int exponent = to - (static_cast<int>(largest >> 23) - 127);
  exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
  return __uint_as_float(static_cast<uint32>(127 + exponent) << 23);
}

// The scale of the first packing pass, from the largest magnitude among the probed elements. It leaves room
// for magnitudes 128 times larger, and 22 bits below the largest before f16 drops some.
__device__ __forceinline__ float probed_scale(uint32 largest) { return scale_to(largest, 8); }

// The scale of a packed tensor. `words`: the bits of the largest finite magnitude of the probed elements,
// then of all elements.
struct Scale {
  float value;
  bool is_corrected;  // the probed scale did not fit: the tensor is packed again

  explicit __device__ __forceinline__ Scale(const uint32* words) {
    value = probed_scale(__ldcg(words));
    const uint32 largest = __ldcg(words + 1);
    const float scaled = __uint_as_float(largest) * value;
    is_corrected = largest != 0 && !(scaled < 65504.0f && scaled >= 0x1p-2f);
    if (is_corrected) value = scale_to(largest, 14);
  }
};

// Raises `largest` to the magnitude of x, as bits, if that is finite.
__device__ __forceinline__ void keep_largest(uint32& largest, float x) {
  const uint32 bits = __float_as_uint(x) & 0x7fffffffu;
  largest = bits < 0x7f800000u && bits > largest ? bits : largest;
}

}  // namespace gradients

}  // namespace onepass
