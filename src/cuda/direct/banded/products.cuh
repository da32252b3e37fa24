// Products of banded.cuh: a warp's sums from the staged window and bands.
#pragma once

#include "direct/banded/bands.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct BandedTypes<C, Tail, N>::Products {
  uint32 window;  // an address of shared memory
  const uint32* bands;

  // The words of B of one row of the filter, for each channel and class.
  struct Band {
    uint32 word[N::outputs][x_classes][N::products_x][2];

    __device__ __forceinline__ void load(const uint32* row) {
#pragma unroll
      for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
        for (int s = 0; s < x_classes; ++s) {
#pragma unroll
          for (int k = 0; k < N::products_x; ++k) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
              word[o][s][k][h] = row[o * Bands::of_channel + s * 2 * Bands::words + 8 * k + 4 * h];
          }
        }
      }
    }
  };

  // The lane's share of 16 segments' runs, of one row of inputs.
  struct Runs {
    uint32 word[N::products_x][4];

    explicit __device__ __forceinline__ Runs(uint32 address) {
#pragma unroll
      for (int k = 0; k < N::products_x; ++k) mma::load_matrices(word[k], address + k * 32);
    }
  };

  static __device__ __forceinline__ void add_row(const Runs& x, const Band& band, int q, Sums& sums) {
#pragma unroll
    for (int k = 0; k < N::products_x; ++k) {
#pragma unroll
      for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
        for (int s = 0; s < x_classes; ++s) Product::run(sums.at[o][q][s], x.word[k], band.word[o][s][k]);
      }
    }
  }

  // The terms of one input channel and row of taps along z. `x`: the lane's row of A in the plane of inputs,
  // `band`: the lane's words of the first tap of y.
  static __device__ __forceinline__ void add_plane(const Tile& tile, uint32 x, const uint32* band,
                                                   Sums& sums) {
    constexpr auto delta = static_cast<int>(C::delta(1));
    constexpr int row_bytes = N::window_y * 2;
    constexpr int of_tap = x_classes * 2 * Bands::words;
    const auto tap = [](int m) { return static_cast<int>(m * C::tap_step(1)); };
    if constexpr (static_cast<int>(C::classes(1)) == 1) {
      // A row of inputs is loaded once for all taps of y.
      constexpr auto taps = static_cast<int>(C::count(1, 0));
      constexpr auto step = static_cast<int>(C::step(1));
      constexpr int distance = delta < 0 ? -delta : delta;
      constexpr int reach = (N::rows - 1) * step + (taps - 1) * distance + 1;
      Band own[taps];
#pragma unroll
      for (int m = 0; m < taps; ++m) own[m].load(band + (static_cast<int>(C::first(1, 0)) + tap(m)) * of_tap);
#pragma unroll
      for (int i = 0; i < reach; ++i) {
        const int at = delta < 0 ? reach - 1 - i : i;  // so that taps are added in their order
        bool is_read = false;
#pragma unroll
        for (int q = 0; q < N::rows; ++q) {
          const int from = at - q * step;
          is_read |= from >= 0 && from % distance == 0 && from / distance < taps;
        }
        if (!is_read) continue;
        const Runs runs(x + at * row_bytes);
#pragma unroll
        for (int q = 0; q < N::rows; ++q) {
          const int from = at - q * step;
          if (from < 0 || from % distance != 0 || from / distance >= taps) continue;
          add_row(runs, own[delta < 0 ? taps - 1 - from / distance : from / distance], q, sums);
        }
      }
    } else {
      static_assert(N::rows == 1);
      const auto taps = static_cast<int>(C::count(1, tile.r[1]));
#pragma unroll 1
      for (int m = 0; m < taps; ++m) {
        Band own;
        own.load(band + (static_cast<int>(C::first(1, tile.r[1])) + tap(m)) * of_tap);
        add_row(Runs(x + (delta < 0 ? (taps - 1 - m) * -delta : m * delta) * row_bytes), own, 0, sums);
      }
    }
  }

  // The terms of the inputs that are staged. Lanes have rows of A: lane % 16, from its chunk lane / 16.
  __device__ __forceinline__ void add_chunk(const Tile& tile, const Item& item, int first_input,
                                            Sums& sums) const {
    constexpr auto delta = static_cast<int>(C::delta(0));
    constexpr auto kernel_y = static_cast<int>(C::kernel(1));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Segment segment(item.first + lane % 16);
    const int place = item.group * N::window_g + segment.at[0] * static_cast<int>(C::step(0)) * N::window_z +
                      segment.at[1] * static_cast<int>(C::step(1)) * N::window_y +
                      segment.at[2] * static_cast<int>(C::step(2)) + lane / 16 * chunk;
    const uint32* const band =
        bands + (item.group * Narrow::group_outputs + item.output) * Bands::of_channel + Bands::lane_word();
    const auto taps = static_cast<int>(C::count(0, tile.r[0]));
    const int left = C::in_channels - first_input;
    const int count = left < N::inputs ? left : N::inputs;
#pragma unroll 1
    for (int c = 0; c < count; ++c) {
#pragma unroll 1
      for (int m = 0; m < taps; ++m) {
        const int plane = delta < 0 ? (taps - 1 - m) * -delta : m * delta;
        const auto tap = static_cast<int>(C::first(0, tile.r[0]) + m * C::tap_step(0));
        add_plane(tile, window + static_cast<uint32>(place + c * N::window_c + plane * N::window_z) * 2,
                  band + c * Bands::of_input + tap * kernel_y * x_classes * 2 * Bands::words, sums);
      }
    }
  }
};

}  // namespace onepass
