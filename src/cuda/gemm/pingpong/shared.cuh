// The shared memory of a block of the ping-pong kernel.
#pragma once

#include "gemm/pingpong/layout.cuh"

namespace onepass::pingpong {

template <class L>
struct alignas(128) Shared {
  static constexpr int groups = L::groups;
  static constexpr int warps = 4 * groups;
  // Slabs of a warp's 16 rows, rounded up to pairs.
  static constexpr int warp_slabs = (16 / L::group_rows + 1) & ~1;
  static constexpr int raw_bytes = L::Numbers::copy_y * 8 * L::Numbers::raw_pitch * L::Input::bytes;
  static constexpr int half_bytes = L::Numbers::window * 16;  // eight channels of a window
  static constexpr int weight_bytes = L::Numbers::taps * 64 * 32;
  // Outputs of 16 bits are staged here by each warp: eight channels of a row of the box, or of 64 columns.
  // Pitches are in words and put neighbouring channels in different banks. Outputs of f32 are staged in
  // `held_words`, or stored directly.
  static constexpr int block_pitch = 16 * L::Output::bytes + 4;
  static constexpr int row_pitch = L::Numbers::row_pitch;
  static constexpr int staged_words = L::is_f32                ? 4
                                      : L::Numbers::store_rows ? (8 * row_pitch + 6) / 4 * 4
                                                               : 8 * block_pitch;
  static_assert(L::is_f32 || !L::Numbers::store_rows || row_pitch >= L::Numbers::pitch / 2);

  alignas(128) unsigned char x[L::Numbers::chunks][2 * half_bytes];
  alignas(128) unsigned char weights[L::Numbers::chunks][weight_bytes];
  alignas(
      128) unsigned char raw[L::Numbers::raw_slots][(raw_bytes + 127) / 128 * 128];  // x as it is in memory
  alignas(16) uint32 staged[warps][staged_words];
  // The part of the held values that has no room in registers.
  alignas(16) uint32
      held_words[warps][L::Numbers::held_shared_words > 0 ? 32 * L::Numbers::held_shared_words : 4];
  // Rows of the box: offset of the row in a channel, pairs of outputs.
  int2 rows[groups * ((L::columns + L::Numbers::pitch - 1) / L::Numbers::pitch)];
  alignas(8) int column_offsets[L::Numbers::store_rows ? 2 : groups * L::columns];
  float2 held_scales[2][groups][L::slabs];           // of held values: the mean taken off, the unit
  alignas(16) uint64 statistics[warps][warp_slabs];  // prefetched statistics of each warp's slabs
  float2 elements[warps];  // 1 / elements of a slab in a warp's columns; 1 if the warp's box is whole
  // Bias, the norm's weight and bias, the scale of sums. A load from memory would stall each tile.
  float4 channels[64];
  uint64 x_full[L::Numbers::bands];
  uint64 x_empty[L::Numbers::bands];
  uint64 weights_full;
  uint64 raw_full[L::Numbers::raw_slots];
  uint64 turn[groups];
  alignas(8) uint32 exponent;  // HeldInt20::exponent

  // Offsets of the tile's positions in a channel, -1 where there is no output. Kernels that store rows need
  // them only until `rows` and the masks are made; until then they lie where outputs are staged.
  __device__ __forceinline__ int* offsets() {
    if constexpr (L::Numbers::store_rows) {
      static_assert((L::is_f32 ? sizeof(held_words) : sizeof(staged)) >= sizeof(int) * groups * L::columns);
      return L::is_f32 ? reinterpret_cast<int*>(held_words) : reinterpret_cast<int*>(staged);
    } else {
      return column_offsets;
    }
  }
};

}  // namespace onepass::pingpong
