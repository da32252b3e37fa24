// The window of x that a tile of the backward passes reads, in shared memory.
#pragma once

#include "thin/backward/tile.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Window {
  const Thread thread;

  // Updates the offsets of entries for a ring buffer that begins at plane `turn`.
  __device__ __forceinline__ void rotate(int turn) const {
    if constexpr (slides) {
      for (int i = threadIdx.x; i < Numbers::steps * 4; i += threads)
        thread.s.step_window[i] = Terms::window_of(thread.s.step_entry[i].x, thread.s.step_entry[i].y, turn);
      for (int i = threads - 1 - threadIdx.x; i < Numbers::jobs * 8; i += threads)
        thread.s.group_window[i] =
            Terms::window_of(thread.s.group_entry[i].x, thread.s.group_entry[i].y, turn);
    }
  }

  // Loads the window's last planes: all of them, or those that the tile before did not read. A warp has a row
  // of vectors at a time.
  template <int planes>
  __device__ __forceinline__ void load(const Tile& tile, float scale) const {
    constexpr int width = Numbers::window(2);
    constexpr int all_rows = Terms::vectors * planes * Numbers::window(1);
    const int turn = tile.turn();
    constexpr int rounds = (width + 31) / 32;
    int first[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) first[d] = tile.origin[d] * static_cast<int>(C::step(d)) + Numbers::low(d);
    const char* sample =
        static_cast<const char*>(thread.p.input) + tile.n * C::input_stride(0) * Input::bytes;
#pragma unroll 2
    for (int row = thread.warp; row < all_rows; row += warps) {
      const int i1 = first[1] + row % Numbers::window(1);
      int plane = Numbers::window(0) - planes + row / Numbers::window(1) % planes;
      const int i0 = first[0] + plane;
      const int of_vectors = row / (Numbers::window(1) * planes);
      const int c = of_vectors * vector;
      plane += turn;
      if (slides && plane >= Numbers::window(0)) plane -= Numbers::window(0);
      const int to_row =
          (of_vectors * Numbers::window(0) + plane) * Numbers::window(1) + row % Numbers::window(1);
      const bool inside = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                          static_cast<unsigned>(i1) < static_cast<unsigned>(C::input_size(1));
      const int offset = c * static_cast<int>(C::input_stride(1)) +
                         i0 * static_cast<int>(C::input_stride(2)) +
                         i1 * static_cast<int>(C::input_stride(3));
#pragma unroll
      for (int v = 0; v < rounds; ++v) {
        const int column = v * 32 + thread.lane;
        const int i2 = first[2] + column;
        // Known at compile time: no tile has an input in these columns.
        const bool is_empty =
            Numbers::tiles(2) == 1 && Numbers::low(2) + v * 32 >= static_cast<int>(C::input_size(2));
        const bool is_real =
            !is_empty && inside && static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2));
        float value[vector];
#pragma unroll
        for (int k = 0; k < vector; ++k) {
          value[k] = 0.0f;
          if (k < components && is_real && (C::in_channels % vector == 0 || c + k < C::in_channels)) {
            value[k] = load_one<Input>(sample, offset + k * static_cast<int>(C::input_stride(1)) +
                                                   i2 * static_cast<int>(C::input_stride(4)));
            if constexpr (C::rounds_to_tf32 && !halves) value[k] = round_to_tf32(value[k]);
          }
        }
        if constexpr (Terms::spare > 0) {
          if (c + vector > C::in_channels) {
            constexpr float share = 1.0f / static_cast<float>(Terms::spare);
            float mean = value[0] * share;
#pragma unroll
            for (int k = 1; k < Terms::spare; ++k) mean = fmaf(value[k], share, mean);
            value[Terms::spare] = halves ? mean : round_to_tf32(mean);
          }
        }
        Vector operands;
        if constexpr (halves) {
          operands.of[0] = pack_halves(value[0] * scale, value[1] * scale);
          operands.of[1] = pack_halves(value[2] * scale, value[3] * scale);
        } else {
#pragma unroll
          for (int k = 0; k < vector; ++k) operands.of[k] = value[k];
        }
        if (width % 32 == 0 || column < width)
          *reinterpret_cast<Vector*>(thread.s.passes.window + (to_row * width + column) * vector) = operands;
      }
    }
  }
};

}  // namespace onepass
