// Staging of narrow.cuh: the input's window and the weights of a tile, as f32 in shared memory.
#pragma once

#include "direct/narrow/tile.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct NarrowTypes<C, Tail, N>::Staging {
  const Parameters& p;

  // A row of the window, in memory and in shared memory.
  struct WindowRow {
    int64 index = 0;
    int place = 0;
    bool in_range = false;

    __device__ __forceinline__ WindowRow(const Tile& tile, const int (&origin)[3], int first_input, int row) {
      Parts parts{static_cast<unsigned>(row)};
      const auto go_along = [&](int d, int at, int pitch) {
        const int position = origin[d] + at;
        in_range &= static_cast<unsigned>(position) < static_cast<unsigned>(C::input_size(d));
        index += position * C::input_stride(d + 2);
        place += at * pitch;
      };
      in_range = true;
      index = tile.n * C::input_stride(0) +
              (static_cast<int64>(tile.group) * C::in_channels + first_input) * C::input_stride(1);
      if constexpr (N::input_interleaved) go_along(2, parts.take(N::window_size_x), N::window_x);
      go_along(1, parts.take(N::window_size_y), N::window_y);
      go_along(0, parts.take(N::window_size_z), N::window_z);
      if constexpr (!N::input_interleaved) {
        const int c = parts.take(N::inputs);
        const int g = parts.take(N::groups);
        in_range &= tile.group + g < C::groups && first_input + c < C::in_channels;
        index += (g * C::in_channels + c) * C::input_stride(1);
        place += g * N::window_g + c * N::window_c;
      }
    }
  };

  // A vector of every row: its elements' places and whether the input has them.
  struct WindowVector {
    int64 index;
    int first;
    bool in_range;

    __device__ __forceinline__ WindowVector(const Tile& tile, const int (&origin)[3], int first_input, int i)
        : first(i * N::input_vector) {
      if constexpr (N::input_interleaved) {
        const int g = first / N::inputs;
        const int c = first % N::inputs;
        in_range = tile.group + g < C::groups && first_input + c < C::in_channels;
        index = (g * C::in_channels + c) * C::input_stride(1);
      } else {
        const int x = origin[2] + first;
        in_range = static_cast<unsigned>(x) < static_cast<unsigned>(C::input_size(2));
        index = x * C::input_stride(4);
      }
    }

    __device__ __forceinline__ int place(int k) const {
      const int at = first + k;
      if constexpr (!N::input_interleaved) return skewed(at, N::skew);
      return N::groups == 1 ? at : at / N::inputs * N::window_g + at % N::inputs * N::window_c;
    }
  };

  template <bool Aligned>
  __device__ __forceinline__ void stage_window(const Tile& tile, int first_input, float* to) const {
    constexpr int vector = N::input_vector;
    constexpr int vectors = (N::input_interleaved ? N::groups * N::inputs : N::window_size_x) / vector;
    constexpr int count = N::window_size_z * N::window_size_y *
                          (N::input_interleaved ? N::window_size_x : N::groups * N::inputs);
    using Copy = Rows<vectors, N::stage_lanes>;
    const int origin[3] = {tile.origin(0), tile.origin(1), tile.origin(2)};
    if (Copy::first() >= Copy::at_once) return;
#pragma unroll 1
    for (int first = Copy::first(); first < count; first += Copy::at_once * Copy::together) {
      Packed<Input, vector> x[Copy::together][Copy::steps];
#pragma unroll
      for (int u = 0; u < Copy::together; ++u) {
        const int i = first + u * Copy::at_once;
        const WindowRow row(tile, origin, first_input, i);
#pragma unroll
        for (int k = 0; k < Copy::steps; ++k) {
#pragma unroll
          for (uint32& word : x[u][k].word) word = 0;
          const WindowVector own(tile, origin, first_input, Copy::vector(k));
          if (i < count && Copy::has(k) && row.in_range && own.in_range)
            x[u][k].load(p.input, row.index + own.index, Aligned);
        }
      }
#pragma unroll
      for (int u = 0; u < Copy::together; ++u) {
        const int i = first + u * Copy::at_once;
        if (i >= count) break;
        float* const row = to + WindowRow(tile, origin, first_input, i).place;
#pragma unroll
        for (int k = 0; k < Copy::steps; ++k) {
          if (Copy::has(k)) put(x[u][k], WindowVector(tile, origin, first_input, Copy::vector(k)), row);
        }
      }
    }
  }

  static __device__ __forceinline__ void put(const Packed<Input, N::input_vector>& x, const WindowVector& at,
                                             float* row) {
    constexpr int vector = N::input_vector;
    float value[vector];
    x.unpack(value);
#pragma unroll
    for (int k = 0; k < vector; ++k) {
      if constexpr (C::rounds_to_tf32) value[k] = round_operand<C>(value[k]);
    }
    if constexpr (N::stages_vectors) {
      static_assert(vector == 4);
      *reinterpret_cast<float4*>(row + at.place(0)) = make_float4(value[0], value[1], value[2], value[3]);
    } else {
#pragma unroll
      for (int k = 0; k < vector; ++k) row[at.place(k)] = value[k];
    }
  }

  __device__ __forceinline__ void stage_window(const Tile& tile, int first_input, float* to) const {
    if (N::input_vector > 1 && reinterpret_cast<uint64>(p.input) % 16 == 0) {
      stage_window<true>(tile, first_input, to);
    } else {
      stage_window<false>(tile, first_input, to);
    }
  }

  __device__ __forceinline__ float weight(int group, int output, int input, int tap) const {
    const int64 row = C::transposed
                          ? (static_cast<int64>(group) * C::in_channels + input) * C::channels + output
                          : (static_cast<int64>(group) * C::channels + output) * C::in_channels + input;
    const float value = load_one<typename C::Weight>(p.parameter[0], row * C::taps + tap);
    return C::rounds_to_tf32 ? round_operand<C>(value) : value;
  }

  // put(channel of the tile, input of the chunk, tap, value) for the weights of a tile, zeros for those that
  // the convolution does not have; lanes follow the weights' own order.
  template <class Put>
  __device__ __forceinline__ void for_each_weight(const Tile& tile, int first_input, const Put& put) const {
    constexpr int count = channels * N::inputs * C::taps;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
      Parts parts{static_cast<unsigned>(i)};
      const auto take = [&](int of) { return parts.take(of); };
      const int t = take(C::taps);
      const int first = take(C::transposed ? group_outputs : N::inputs);
      const int second = take(C::transposed ? N::inputs : group_outputs);
      const int c = C::transposed ? second : first;
      const int o = C::transposed ? first : second;
      const auto g = static_cast<int>(parts.rest);
      const int group = tile.group + g;
      const int output = tile.output + o;
      const int input = first_input + c;
      float value = 0.0f;
      if (group < C::groups && output < C::channels && input < C::in_channels)
        value = weight(group, output, input, t);
      put(g * group_outputs + o, c, t, value);
    }
  }

  // [input][tap][group and output of the tile]. False where one is not finite.
  __device__ __forceinline__ bool stage_weights(const Tile& tile, int first_input, float* to) const {
    bool are_finite = true;
    for_each_weight(tile, first_input, [&](int channel, int c, int t, float value) {
      are_finite &= fabsf(value) <= largest_float;
      to[c * N::weight_c + t * N::weight_t + channel] = value;
    });
    return are_finite;
  }
};

}  // namespace onepass
