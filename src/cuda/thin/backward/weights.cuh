// Weights as fragments of the products, and offsets of entries: once for each block.
#pragma once

#include "device/barrier.cuh"
#include "thin/backward/backward.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Weights {
  const Thread thread;

  __device__ __forceinline__ float weight(int o, int index) const {
    if (o >= channels || index < 0) return 0.0f;
    float value = load_one<typename C::Weight>(thread.p.parameter[0], o * Terms::weight_stride + index);
    if constexpr (C::rounds_to_tf32) value = round_to_tf32(value);
    return value;
  }

  // The weight of a component of an entry, or what rounding drops (Terms::spare).
  __device__ __forceinline__ float entry_weight(int o, const typename Terms::Entry& entry,
                                                int component) const {
    if (component != Terms::spare || entry.channel + vector <= C::in_channels)
      return weight(o, Terms::weight_index(entry, component));
    if (o >= channels || entry.tap < 0) return 0.0f;
    float dropped = 0.0f;
    for (int i = 0; i < component; ++i) {
      const float exact = load_one<typename C::Weight>(
          thread.p.parameter[0], o * Terms::weight_stride + Terms::weight_index(entry, i));
      dropped += exact - round_to_tf32(exact);
    }
    return round_to_tf32(dropped);
  }

  __device__ __forceinline__ void put_weights(uint4 (&to)[32], uint4 (&low)[32], int at,
                                              const float (&w)[4]) const {
    const uint4 bits{__float_as_uint(w[0]), __float_as_uint(w[1]), __float_as_uint(w[2]),
                     __float_as_uint(w[3])};
    if constexpr (splits) {
      split_tf32(bits, to[at], low[at]);
    } else {
      to[at] = bits;
    }
  }

  // Scales of the weights: one for each channel in products with x, one for all in products with dh.
  __device__ void find_weight_scales() const {
    constexpr int taps = static_cast<int>(C::taps);
    if (threadIdx.x == 0) thread.s.most = 0;
    __syncthreads();
    for (int o = thread.warp; o < rows; o += warps) {
      uint32 most = 0;
      if (o < channels) {
        for (int i = thread.lane; i < static_cast<int>(C::in_channels) * taps; i += 32) {
          const uint32 own =
              finite_magnitude(weight(o, i / taps * static_cast<int>(Terms::channel_stride) + i % taps));
          most = most > own ? most : own;
        }
      }
      most = __reduce_max_sync(0xffffffffu, most);
      if (thread.lane == 0) {
        thread.s.weight_scale[o] = scale_for_halves(__uint_as_float(most));
        atomicMax(&thread.s.most, most);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) thread.s.back_scale = scale_for_halves(__uint_as_float(thread.s.most));
  }

  __device__ void prepare() const {
    if constexpr (halves) find_weight_scales();
    if (threadIdx.x == 0) {
      Terms::find_classes(thread.s.of_class);
#if __CUDA_ARCH__ >= 900
      for (uint64& barrier_of : thread.s.arrived) barrier::initialise(&barrier_of);
      for (uint64& barrier_of : thread.s.released) barrier::initialise(&barrier_of, threads);
#endif
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Numbers::steps * 4; i += threads) {
      const int own = Terms::class_of_step(thread.s.of_class, i / 4);
      const auto entry = Terms::entry(own, i - thread.s.of_class[own].step * 4, 0);
      thread.s.step_window[i] = Terms::window_of(entry.window, entry.plane, 0);
      if constexpr (slides) thread.s.step_entry[i] = int2{entry.window, entry.plane};
    }
    for (int i = threadIdx.x; i < Numbers::jobs * 8; i += threads) {
      const int own = Terms::class_of_job(thread.s.of_class, i / 8);
      const int group = (i / 8 - thread.s.of_class[own].job) % thread.s.of_class[own].groups;
      const auto entry = Terms::entry(own, group * 8 + i % 8, 0);
      thread.s.group_window[i] = Terms::window_of(entry.window, entry.plane, 0);
      if constexpr (slides) thread.s.group_entry[i] = int2{entry.window, entry.plane};
    }
    for (int i = threadIdx.x; i < Numbers::fragments * row_tiles * 32; i += threads) {
      const int fragment = i / (row_tiles * 32);
      const int o = i / 32 % row_tiles * 16 + i % 32 / 4;
      const int own = Terms::class_of_fragment(thread.s.of_class, fragment);
      const int within = fragment - thread.s.of_class[own].fragment;
      const int product = within % products;
      const int row_tap = within / products % thread.s.of_class[own].row_taps;
      const int step = within / products / thread.s.of_class[own].row_taps;
      const auto entry = Terms::entry(own, step * 4 + i % 4, row_tap);
      if constexpr (halves) {
        const float low = thread.s.weight_scale[o], high = thread.s.weight_scale[o + 8];
        const auto pair = [&](int row, float scale, int k) {
          return pack_halves(entry_weight(row, entry, k) * scale, entry_weight(row, entry, k + 1) * scale);
        };
        thread.s.weight[0][i / 32][i % 32] =
            uint4{pair(o, low, 0), pair(o + 8, high, 0), pair(o, low, 2), pair(o + 8, high, 2)};
        continue;
      }
      const int k = product * 2;
      const float w[4] = {entry_weight(o, entry, k), entry_weight(o + 8, entry, k),
                          entry_weight(o, entry, k + 1), entry_weight(o + 8, entry, k + 1)};
      put_weights(thread.s.weight[0][i / 32], thread.s.weight[parts - 1][i / 32], i % 32, w);
    }
    if constexpr (Numbers::wants_input) {
      for (int i = threadIdx.x; i < back_steps * column_tiles * 32; i += threads) {
        const int row = i / 32 % column_tiles * 16 + i % 32 / 4;
        const int step = i / (column_tiles * 32);
        if constexpr (halves) {
          // A lane has the channels of the four f16 that it loads from the ring buffer.
          const int o = step % row_tiles * 16 + i % 4 * 2;
          const int k0 = back_index(row, step / row_tiles);
          const int k1 = back_index(row + 8, step / row_tiles);
          const auto pair = [&](int channel, int k) {
            return pack_halves(weight(channel, k) * thread.s.back_scale,
                               weight(channel + 8, k) * thread.s.back_scale);
          };
          thread.s.back[0][i / 32][i % 32] =
              uint4{pair(o, k0), pair(o, k1), pair(o + 1, k0), pair(o + 1, k1)};
          continue;
        }
        // A lane has four neighbouring output channels, two for each of two steps.
        const int o = step / 2 % row_tiles * 16 + i % 4 * 4 + step % 2 * 2;
        const int outer = step / (2 * row_tiles);  // taps
        const int k0 = back_index(row, outer);
        const int k1 = back_index(row + 8, outer);
        const float w[4] = {weight(o, k0), weight(o, k1), weight(o + 1, k0), weight(o + 1, k1)};
        put_weights(thread.s.back[0][i / 32], thread.s.back[parts - 1][i / 32], i % 32, w);
      }
    }
    for (int o = threadIdx.x; o < rows; o += threads) {
      float value = 0.0f;
      if constexpr (C::has_bias)
        value = o < channels ? load_one<typename C::Bias>(thread.p.parameter[1], o) : 0.0f;
      thread.s.bias[o] = value;
    }
  }
  // The index of a weight of row (input channel, last tap) with these outer taps.
  static __device__ __forceinline__ int back_index(int row, int outer) {
    if (row >= column_rows) return -1;
    return row / column_taps * Terms::channel_stride + outer * column_taps + row % column_taps;
  }
};

}  // namespace onepass
