// gemm_pingpong.cuh: how values wait for their norm.
#pragma once

#include "gemm/pingpong/shared.cuh"

namespace onepass {

// The sum of a thread's pair j, row h and element e is number j * 4 + h * 2 + e.
namespace pingpong {

// Pairs of f16, for outputs of 16 bits. Values are divided by `unit` of their row: 1, or about a deviation.
struct HeldF16 {
  static constexpr __device__ int words(int sums) { return sums / 2; }

  template <int sums, int count>
  static __device__ __forceinline__ void pack(const float (&d)[sums], const float (&unit)[2],
                                              uint32 (&to)[count]) {
    static_assert(count == words(sums));
    if (__all_sync(0xffffffffu, unit[0] == 1.0f && unit[1] == 1.0f)) {
#pragma unroll
      for (int i = 0; i < count; ++i) to[i] = f16::pack(d[2 * i], d[2 * i + 1]);
    } else {
      const float per[2] = {pointwise::reciprocal_fast(unit[0]), pointwise::reciprocal_fast(unit[1])};
#pragma unroll
      for (int i = 0; i < count; ++i) to[i] = f16::pack(d[2 * i] * per[i % 2], d[2 * i + 1] * per[i % 2]);
    }
  }
};

// Integers of 20 bits, for outputs of f32, in 2^-19 of the largest distance in the part: they are off by half
// of that, and by as much again where `origin` is taken off together with the norm. Eight are four words of
// their lower halves and one of what is above, a byte of which has that of values k and k + 4.
struct HeldInt20 {
  static constexpr float most = 524280.0f;  // that a value is, with room for a rounded division
  // What an integer lies above: 0 for the lowest of them, as a float of 2^23 and more has it in its lowest
  // bits.
  static constexpr float origin = 8388608.0f + 524288.0f;
  static constexpr __device__ int words(int sums) { return sums / 8 * 5 + sums % 8 / 4 * 3; }
  // Of the eight from number 8 * g on.
  static constexpr __device__ int values_of(int sums, int g) { return sums - 8 * g < 8 ? 4 : 8; }
  static constexpr __device__ int groups(int sums) { return (sums + 7) / 8; }

  // The third bytes of four.
  static __device__ __forceinline__ uint32 third_bytes(const uint32* bits) {
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0062), __byte_perm(bits[2], bits[3], 0x6200), 0x7610);
  }
  template <int sums, int count>
  static __device__ __forceinline__ void pack(const float (&d)[sums], const float (&unit)[2],
                                              uint32 (&to)[count]) {
    static_assert(count == words(sums));
    const float per[2] = {pointwise::reciprocal_fast(unit[0]), pointwise::reciprocal_fast(unit[1])};
#pragma unroll
    for (int g = 0; g < groups(sums); ++g) {
      uint32 bits[8];
      const int values = values_of(sums, g);
#pragma unroll
      for (int i = 0; i < values; ++i) bits[i] = __float_as_uint(fmaf(d[8 * g + i], per[i / 2 % 2], origin));
#pragma unroll
      for (int i = 0; i < values / 2; ++i) to[5 * g + i] = __byte_perm(bits[2 * i], bits[2 * i + 1], 0x5410);
      const uint32 low = third_bytes(bits);
      const uint32 high = values > 4 ? third_bytes(bits + 4) << 4 : 0;
      to[5 * g + values / 2] = (low & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
    }
  }
  // The exponent of 2^23, in a register: as an immediate it would take the place of what bytes are chosen by.
  // The block has one thread in that dimension, which the assembler does not know.
  static __device__ __forceinline__ uint32 exponent() { return 0x4b000000u | threadIdx.y; }
  // Value i of eight: the integer, and `origin`.
  static __device__ __forceinline__ float unpack(uint32 lower, uint32 above, uint32 exponent, int i) {
    constexpr uint32 third[4] = {0x0410, 0x0532, 0x0610, 0x0732};
    const uint32 bits = __byte_perm(lower, i < 4 ? above : above >> 4, third[i % 4]);
    return __uint_as_float((bits & 0x000fffffu) | exponent);
  }
};

}  // namespace pingpong

}  // namespace onepass
