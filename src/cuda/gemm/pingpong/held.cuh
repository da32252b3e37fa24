// How the ping-pong kernel holds a tile's values until the statistics of their slabs are known.
#pragma once

#include "gemm/pingpong/shared.cuh"

namespace onepass::pingpong {

// Pairs of f16, for outputs of 16 bits. Values are divided by the `unit` of their row: 1, or about a standard
// deviation.
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

// 20-bit integers, for outputs of f32. The unit is 2^-19 of the largest distance in the part. The error is
// half a unit, and as much again because `origin` is subtracted together with the norm. Eight values take
// five words: four of lower halves, and one whose byte k has the upper bits of values k and k + 4.
struct HeldInt20 {
  static constexpr float most = 524280.0f;  // the largest value, with room for a rounded division
  // The offset of the encoding: a float from 2^23 on has the integer in its lowest bits.
  static constexpr float origin = 8388608.0f + 524288.0f;
  static constexpr __device__ int words(int sums) { return sums / 8 * 5 + sums % 8 / 4 * 3; }
  // Values of group g: those from number 8 * g on.
  static constexpr __device__ int values_of(int sums, int g) { return sums - 8 * g < 8 ? 4 : 8; }
  static constexpr __device__ int groups(int sums) { return (sums + 7) / 8; }

  // The third byte of each of four words.
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
  // The exponent of 2^23. `unpack` takes it from a register that was loaded: an instruction that masks and
  // sets bits has one immediate. For a constant that it knows, the assembler makes a second instruction.
  static constexpr uint32 exponent = 0x4b000000u;
  // Value i of eight: the integer plus `origin`.
  static __device__ __forceinline__ float unpack(uint32 lower, uint32 above, uint32 exponent, int i) {
    constexpr uint32 third[4] = {0x0410, 0x0532, 0x0610, 0x0732};
    const uint32 bits = __byte_perm(lower, i < 4 ? above : above >> 4, third[i % 4]);
    return __uint_as_float((bits & 0x000fffffu) | exponent);
  }
};

// The held values of a thread: the first words in registers, the others in shared memory. With HeldF16, word
// 2 * j + h is pair j of row h.
template <class L>
struct Hold {
  using Format = conditional<L::is_f32, HeldInt20, HeldF16>;
  static constexpr int words = Format::words(L::sums);
  static constexpr int in_registers = words - L::Numbers::held_shared_words;
  static_assert(in_registers > 0);
  struct Words {
    uint32 value[words];
  };
  struct Registers {
    uint32 value[in_registers];
  };

  Shared<L>& s;
  const Thread& thread;

  // Encodes distances from the mean, divided by the `unit` of their row.
  static __device__ __forceinline__ void pack(const float (&d)[L::sums], const float (&unit)[2], Words& to) {
    Format::pack(d, unit, to.value);
  }
  // Replaces the values of the tile before, which have been stored.
  __device__ __forceinline__ void hold(const Words& next, Registers& held) const {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      if (i < in_registers) {
        held.value[i] = next.value[i];
      } else {
        s.held_words[thread.warp][32 * (i - in_registers) + thread.lane] = next.value[i];
      }
    }
  }
  __device__ __forceinline__ uint32 word(int i, const Registers& held) const {
    return i < in_registers ? held.value[i]
                            : s.held_words[thread.warp][32 * (i - in_registers) + thread.lane];
  }
};

}  // namespace onepass::pingpong
