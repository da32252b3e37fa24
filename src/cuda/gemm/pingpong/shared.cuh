// gemm_pingpong.cuh: the shared memory of a block.
#pragma once

#include "gemm/pingpong/map.cuh"

namespace onepass {

namespace pingpong {
constexpr int converting_warps = 4;
}  // namespace pingpong

// A chain that is x s(x), s by tanh: twice that is x + x t, an instruction less. A norm does not notice, if
// its eps is multiplied by 4. `Bytes` are those of an output.
template <class Stage, int Bytes>
struct PingpongTwice {
  static constexpr bool exists = false;
};
template <int Bytes>
struct PingpongTwice<pointwise::swish_stage<16>, Bytes> {
  static constexpr bool exists = true;
  static __device__ __forceinline__ float value(float x) {
    return fmaf(x, pointwise::tanh_fast(0.5f * x), x);
  }
};
// Of f32 with the polynomial of pointwise::normal_cdf, whose error is 6e-6; of 16 bits, an eighth of whose
// rounding is no more, with a term less and 2.9e-5.
template <int Bytes>
struct PingpongTwice<pointwise::gelu_stage<16>, Bytes> {
  static constexpr bool exists = true;
  static __device__ __forceinline__ float value(float x) {
    const float u = x * x;
    float p;
    if constexpr (Bytes == 2) {
      p = 2.0e-06f;
      p = fmaf(p, u, -3.7545304e-04f);
      p = fmaf(p, u, 3.7077749e-02f);
      p = fmaf(p, u, 7.9745773e-01f);
    } else {
      p = 1.4185306e-06f;
      p = fmaf(p, u, -3.6600019e-05f);
      p = fmaf(p, u, -8.8219580e-05f);
      p = fmaf(p, u, 3.6392809e-02f);
      p = fmaf(p, u, 7.9786956e-01f);
    }
    return fmaf(x, pointwise::tanh_fast(x * p), x);
  }
};

// The compiler moves nothing past a look at the clock, if something comes of it: where values were made too
// early, registers would not suffice. `0`, which the compiler does not know to be that: a block has one
// thread in the second dimension.
namespace pingpong {
__device__ __forceinline__ uint32 opaque_zero() {
  uint32 now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  return now & threadIdx.y;
}
}  // namespace pingpong

// A thread of the warpgroups that multiply. It has two rows of a product, and of each every fourth pair of
// columns.
struct GemmPingpongThread {
  uint32 thread;
  int lane = static_cast<int>(thread % 32u);
  int warp = static_cast<int>(thread / 32u);
  int group = static_cast<int>(thread / 128u);

  __device__ __forceinline__ int row(int h) const {
    return static_cast<int>(thread % 128u / 32u * 16u + thread % 32u / 4u) + 8 * h;
  }
  // The first of the warp's rows.
  __device__ __forceinline__ int first_row() const { return static_cast<int>(thread % 128u / 32u * 16u); }
};

// The shared memory of a block.
template <class C, class Tail, class Numbers>
struct alignas(128) GemmPingpongShared {
  using Input = typename Tail::Input;
  using Output = typename Tail::Output;
  static constexpr int slabs = GemmSlabs<C, Tail, Numbers>::slabs_of_sample;
  // Of a warp's 16 rows, with the one before where that makes pairs.
  static constexpr int warp_slabs = (16 / GemmSlabs<C, Tail, Numbers>::group_rows + 1) & ~1;
  static constexpr int raw_bytes = Numbers::copy_y * 8 * Numbers::raw_pitch * Input::bytes;
  static constexpr int half_bytes = Numbers::window * 16;  // eight channels of a window
  static constexpr int weight_bytes = Numbers::taps * 64 * 32;
  // Values on their way to memory, of each warp: eight channels of a row of the box, as they lie in memory
  // modulo 16 bytes, or of 64 columns. Words of a channel, so that others begin in other banks.
  static constexpr int block_pitch = 16 * Output::bytes + 4;
  static constexpr int row_pitch = Numbers::row_pitch;
  // Of f32 they are staged where values waited, or leave from where they are.
  static constexpr bool direct = Output::bytes == 4;
  static constexpr int value_words = direct             ? 4
                                     : Numbers::by_rows ? (8 * row_pitch + 6) / 4 * 4
                                                        : 8 * block_pitch;
  static_assert(direct || !Numbers::by_rows || row_pitch >= Numbers::pitch / 2);

  alignas(128) unsigned char x[Numbers::chunks][2 * half_bytes];
  alignas(128) unsigned char weights[Numbers::chunks][weight_bytes];
  alignas(128) unsigned char raw[Numbers::raw_slots][(raw_bytes + 127) / 128 * 128];
  alignas(16) uint32 values[4 * Numbers::groups][value_words];
  alignas(
      16) uint32 waiting[4 * Numbers::groups][Numbers::waiting_words > 0 ? 32 * Numbers::waiting_words : 4];
  int2 rows[Numbers::groups * ((Numbers::columns + Numbers::pitch - 1) /
                               Numbers::pitch)];  // of the box: where in a channel, pairs of outputs
  alignas(8) int kept_offsets[Numbers::by_rows ? 2 : Numbers::groups * Numbers::columns];
  float2 held[2][Numbers::groups]
             [slabs];  // of slabs: what was taken off held values, what they were divided by
  alignas(
      16) uint64 asked[4 * Numbers::groups][warp_slabs];  // what is known of statistics, of each warp's slabs
  float2 elements[4 * Numbers::groups];  // 1 by those of a slab in a warp's columns; 1 if the box is whole
  // Bias, weight and bias of the norm, what sums are multiplied by: a load from memory would be waited for
  // each time.
  float4 channels[64];
  uint64 x_full[Numbers::bands];
  uint64 x_empty[Numbers::bands];
  uint64 weights_full;
  uint64 raw_full[Numbers::raw_slots];
  uint64 turn[Numbers::groups];

  // Where in a channel the tile's positions lie, or -1. Rows of the box need them until `rows` and masks have
  // been made of them: they lie in place of values till then.
  __device__ __forceinline__ int* offsets() {
    if constexpr (Numbers::by_rows) {
      static_assert((direct ? sizeof(waiting) : sizeof(values)) >=
                    sizeof(int) * Numbers::groups * Numbers::columns);
      return direct ? reinterpret_cast<int*>(waiting) : reinterpret_cast<int*>(values);
    } else {
      return kept_offsets;
    }
  }
};

}  // namespace onepass
