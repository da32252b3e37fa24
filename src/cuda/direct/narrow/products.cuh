// Products of narrow.cuh: a thread's sums from the staged window and weights.
#pragma once

#include "direct/narrow/tile.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct NarrowTypes<C, Tail, N>::Products {
  const float* window;
  const float* weights;

  // Neighbours of shared memory, in vectors where they are aligned.
  template <int Count>
  static __device__ __forceinline__ void load_floats(const float* from, float (&to)[Count]) {
    constexpr int width = N::weight_t % 4 == 0 && Count % 4 == 0   ? 4
                          : N::weight_t % 2 == 0 && Count % 2 == 0 ? 2
                                                                   : 1;
    if constexpr (width == 4) {
#pragma unroll
      for (int i = 0; i < Count; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(from + i);
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
      }
    } else if constexpr (width == 2) {
#pragma unroll
      for (int i = 0; i < Count; i += 2) {
        const float2 v = *reinterpret_cast<const float2*>(from + i);
        to[i] = v.x, to[i + 1] = v.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) to[i] = from[i];
    }
  }

  // What a thread's cells read of one row of the window.
  struct Segment {
    float value[N::segment];

    explicit __device__ __forceinline__ Segment(const float* row) {
#pragma unroll
      for (int k = 0; k < N::segment; ++k) value[k] = row[skewed(N::lead + k, N::skew) * N::window_x];
    }
  };

  // The taps of a row of the filter at `w`, for the cells of row `q`.
  static __device__ __forceinline__ void add_row(const Segment& x, const float* w, int q, Sums& sums) {
    constexpr auto step = static_cast<int>(C::step(2));
#pragma unroll
    for (int s = 0; s < x_classes; ++s) {
#pragma unroll
      for (int m = 0; m < N::most_taps_x; ++m) {
        if (m >= static_cast<int>(C::count(2, s))) continue;
        float weight[N::outputs];
        load_floats(w + static_cast<int>(C::first(2, s) + m * C::tap_step(2)) * N::weight_t, weight);
        const auto offset = static_cast<int>(C::base(2, s) + m * C::delta(2)) - N::lowest_x;
#pragma unroll
        for (int i = 0; i < N::positions; ++i) {
#pragma unroll
          for (int o = 0; o < N::outputs; ++o) {
            float& sum = sums[o][q][i * x_classes + s];
            sum = fmaf(weight[o], x.value[i * step + offset], sum);
          }
        }
      }
    }
  }

  // The terms of one input channel: `x` is where the thread's first cell begins in its window.
  static __device__ __forceinline__ void add_channel(const Tile& tile, const float* x, const float* w,
                                                     Sums& sums) {
    constexpr auto delta0 = static_cast<int>(C::delta(0));
    constexpr auto delta1 = static_cast<int>(C::delta(1));
    const auto count0 = static_cast<int>(C::count(0, tile.r[0]));
    const auto count1 = static_cast<int>(C::count(1, tile.r[1]));
    const auto tap_y = static_cast<int>(C::tap_stride(1)) * N::weight_t;
#pragma unroll 1
    for (int m0 = 0; m0 < count0; ++m0) {
      const float* plane = x + (delta0 < 0 ? (count0 - 1 - m0) * -delta0 : m0 * delta0) * N::window_z;
      const float* filter = w + static_cast<int>(C::first(0, tile.r[0]) + m0 * C::tap_step(0)) *
                                    static_cast<int>(C::tap_stride(0)) * N::weight_t;
      if constexpr (N::rows > 1) {
        // All taps of y are of one class. A row of the window is read once for all rows of cells.
        constexpr auto taps = static_cast<int>(C::count(1, 0));
        constexpr auto step = static_cast<int>(C::step(1));
        constexpr int distance = delta1 < 0 ? -delta1 : delta1;
        constexpr int reach = (N::rows - 1) * step + (taps - 1) * distance + 1;
#pragma unroll
        for (int i = 0; i < reach; ++i) {
          const int at = delta1 < 0 ? reach - 1 - i : i;  // so that taps are added in their order
          const Segment row(plane + at * N::window_y);
#pragma unroll
          for (int q = 0; q < N::rows; ++q) {
            const int from = at - q * step;
            if (from < 0 || from % distance != 0 || from / distance >= taps) continue;
            const int m1 = delta1 < 0 ? taps - 1 - from / distance : from / distance;
            add_row(row, filter + static_cast<int>(C::first(1, 0) + m1 * C::tap_step(1)) * tap_y, q, sums);
          }
        }
      } else {
#pragma unroll 1
        for (int m1 = 0; m1 < count1; ++m1) {
          const Segment row(plane + (delta1 < 0 ? (count1 - 1 - m1) * -delta1 : m1 * delta1) * N::window_y);
          add_row(row, filter + static_cast<int>(C::first(1, tile.r[1]) + m1 * C::tap_step(1)) * tap_y, 0,
                  sums);
        }
      }
    }
  }

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
      for (int q = 0; q < N::rows; ++q) {
#pragma unroll
        for (int i = 0; i < cells; ++i) sums[o][q][i] = 0.0f;
      }
    }
  }

  // Long sums are made of parts, of `part_inputs` channels each.
  static __device__ __forceinline__ void fold(Sums& sums, Sums& part) {
#pragma unroll
    for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
      for (int q = 0; q < N::rows; ++q) {
#pragma unroll
        for (int i = 0; i < cells; ++i) sums[o][q][i] += part[o][q][i];
      }
    }
    clear(part);
  }

  __device__ __forceinline__ void add_chunk(const Tile& tile, const Slot& slot, int first_input, Sums& sums,
                                            Sums& part) const {
    const float* x = window + slot.group * N::window_g +
                     slot.at[0] * static_cast<int>(C::step(0)) * N::window_z +
                     slot.at[1] * static_cast<int>(C::step(1)) * N::window_y +
                     skewed(slot.at[2] * static_cast<int>(C::step(2)), N::skew) * N::window_x;
    const float* w = weights + slot.group * group_outputs + slot.output;
    const int left = C::in_channels - first_input;
    const int count = left < N::inputs ? left : N::inputs;
#pragma unroll 1
    for (int c = 0; c < count; ++c) {
      if constexpr (N::part_inputs > 0) {
        add_channel(tile, x + c * N::window_c, w + c * N::weight_c, part);
        if ((first_input + c + 1) % N::part_inputs == 0) fold(sums, part);
      } else {
        add_channel(tile, x + c * N::window_c, w + c * N::weight_c, sums);
      }
    }
  }
};

}  // namespace onepass
