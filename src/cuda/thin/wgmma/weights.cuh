// A of thin/wgmma.cuh as the tensor cores read it: weights for every turn, scaled, split or dithered.
#pragma once

#include "thin/wgmma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class Product>
struct ThinWgmma<C, Tail, Numbers, Product>::Weights {
  const Block block;

  // --- Weights ---
  // They are staged in the ring where they fit: each is read several times.
  static constexpr int terms = C::in_channels * static_cast<int>(C::taps);
  static constexpr int weights = static_cast<int>(C::channels) * terms;
  static constexpr int raw_pitch = terms | 1;  // of a channel: neighbours lie in different banks
  static constexpr bool in_ring =
      4 * static_cast<int>(C::channels) * raw_pitch <= 16 * planes * input_parts * plane_units;

  static constexpr int preparing = all_prepare ? static_cast<int>(Numbers::threads) : consumers;
  static __device__ __forceinline__ void sync_preparing() { warpgroup::sync<preparing>(all_prepare ? 0 : 5); }

  __device__ __forceinline__ void bring_weights() const {
    if constexpr (in_ring) {
      auto* raw = reinterpret_cast<float*>(block.shared.x);
      constexpr int rounds = (weights + preparing - 1) / preparing;
      constexpr int at_once = rounds < 16 ? rounds : 8;  // on their way
#pragma unroll at_once
      for (int k = 0; k < rounds; ++k) {
        const int i = k * preparing + static_cast<int>(threadIdx.x);
        if (i < weights)
          raw[i / terms * raw_pitch + i % terms] = load_one<typename C::Weight>(block.p.parameter[0], i);
      }
    }
    for (int o = threadIdx.x; o < channel_tiles * channel_blocks * 16; o += preparing) {
      float bias = 0.0f;
      if constexpr (C::has_bias)
        bias = o < C::channels ? load_one<typename C::Bias>(block.p.parameter[1], o) : 0.0f;
      block.shared.bias[o] = bias;
    }
    sync_preparing();
  }
  __device__ __forceinline__ float weight(int o, int term) const {
    if constexpr (in_ring) return reinterpret_cast<const float*>(block.shared.x)[o * raw_pitch + term];
    return load_one<typename C::Weight>(block.p.parameter[0], o * terms + term);
  }

  // The term that is element `e` of core `core`: taps of the last dimension, of the middle one within, then
  // channels. Below zero where there is none.
  static __device__ __forceinline__ int term_of(int t0, int core, int e) {
    const int c = core / (groups1 * groups2) * core_channels + e % core_channels;
    const int t1 = core / groups2 % groups1 * core_rows + e / core_channels % core_rows;
    const int t2 = core % groups2 * core_columns + e / pitch;
    if (core >= cores || t1 >= taps1 || t2 >= taps2) return -1;
    const auto tap = static_cast<int>(t0 * C::tap_stride(0) + t1 * C::tap_stride(1) + t2 * C::tap_stride(2));
    return c * static_cast<int>(C::taps) + tap;
  }

  // Finds the power of two that scales the channel's largest weight to [2^13, 2^14). Flags channels without
  // one.
  __device__ __forceinline__ void find_scales() const {
    const int lane = threadIdx.x % 32;
    for (int o = threadIdx.x / 32; o < channel_tiles * channel_blocks * 16; o += preparing / 32) {
      uint32 largest = 0;
      if (o < C::channels) {
        for (int i = lane; i < terms; i += 32)
          largest = max(largest, __float_as_uint(weight(o, i)) & 0x7fffffffu);
      }
      largest = __reduce_max_sync(0xffffffffu, largest);
      const int exponent = static_cast<int>(largest >> 23) - 127;
      const bool is_finite = exponent < 128;
      const bool fits = largest == 0 || (exponent > -100 && is_finite);
      const bool redo = splits ? !fits : fills_up && !is_finite;
      if (guards && redo && lane == 0) atomicMax(&block.shared.redo, static_cast<uint32>(redo_all));
      const int power = splits && largest > 0 && fits ? 13 - exponent : 0;
      if (lane == 0) block.shared.unscale[o] = splits ? ldexpf(1.0f / thin_input_scale, -power) : 1.0f;
    }
  }

  // A: 8 x 8 matrices, rows of 16 bytes. Slot b takes tap (turn - b) % taps0. Where one A serves all turns,
  // row block i is tap (taps0 - 1 - i) % taps0 of its channels.
  static constexpr bool has_other_rows = paired ? taps0 == 3 || (taps0 == 2 && channel_blocks == 1)
                                                : (2 * taps0 - 1) * channel_blocks < weight_blocks;
  static constexpr int places = paired ? taps0 : 2;  // that eight terms of a tap have at most

  __device__ __forceinline__ void load_weights() const {
    bring_weights();
    if constexpr (has_other_rows) {
      auto* all = reinterpret_cast<uint4*>(block.shared.weight);
      for (int i = threadIdx.x; i < static_cast<int>(sizeof(block.shared.weight) / 16); i += preparing)
        all[i] = uint4{0, 0, 0, 0};
    }
    find_scales();
    sync_preparing();
    constexpr int all_channels = channel_blocks * 16;
    for (int i = threadIdx.x; i < channel_tiles * 2 * steps * taps0 * all_channels; i += preparing) {
      const int t0 = i / all_channels % taps0;
      const int core = i / (all_channels * taps0) % (2 * steps);
      const int tile = i / (all_channels * taps0) / (2 * steps);
      const int o = tile * all_channels + i % all_channels;
      const int eight = i % all_channels / 8;
      const float scale = splits ? 1.0f / (block.shared.unscale[o] * thin_input_scale) : 1.0f;
      float w[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int term = o < C::channels ? term_of(t0, core, e) : -1;
        w[e] = term >= 0 ? weight(o, term) * scale : 0.0f;
      }
      uint32 high[4], low[4];
      if constexpr (dithers) {
        dither(w, static_cast<uint32>(o * terms + term_of(t0, core, 0)), high, low);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) split_pair<C, Input>(w[2 * j], w[2 * j + 1], high[j], low[j]);
      }
#pragma unroll
      for (int place = 0; place < places; ++place) {
        int turn = 0;
        int row = i % 8;
        if constexpr (paired) {  // `place` is the slot
          turn = (t0 + place) % taps0;
          row += taps0 == 2 ? eight * 16 + place * 8 : (place / 2 * 2 + eight) * 16 + place % 2 * 8;
        } else {
          const int block = taps0 - 1 - t0 + place * taps0;
          if (block >= 2 * taps0 - 1) continue;
          row += block * all_channels + eight * 8;
        }
#pragma unroll
        for (int set = 0; set < weight_sets; ++set) {
          uint32 own[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            own[j] = dithers ? high[j] + (low[j] >> version_of(set, turn) & 0x10001u) : high[j];
          uint4(&of_step)[weight_parts][2][weight_units] = block.shared.weight[tile][set][turn][core / 2];
          of_step[0][core % 2][row] = uint4{own[0], own[1], own[2], own[3]};
          if constexpr (weight_parts == 2)
            of_step[weight_parts - 1][core % 2][row] = uint4{low[0], low[1], low[2], low[3]};
        }
      }
    }
  }

  // --- Dithered weights ---
  // f32 weights that are rounded to nearest halves are off by the same at every position, so that means are.
  // Here every turn of every set is another of `versions` roundings of each weight, to the half below or to
  // the next one, so that their average is the weight (within half a unit of the last place / versions).
  // Input planes take them by turns, each strip in another order, and every weight begins at another one:
  // what is left of rounding averages out over the positions of a sample as that of x does. Weights that are
  // halves stay what they are.
  static constexpr int versions = weight_sets * turns;
  static_assert(!dithers || versions <= 16);

  // Rows of a strip take all versions that differ by `weight_sets`; strips of a row take the others.
  __device__ __forceinline__ uint32 version_of(int set, int turn) const {
    return static_cast<uint32>(weight_sets * ((turn + set + first_plane()) % turns) + set);
  }

  // The halves below eight weights, and for each a bit for every version that is the half above. The error
  // that all versions share goes to the next weight of the channel: neighbouring taps meet similar values.
  // (s27, uniform values: means are off by up to 1.9e-5 instead of 3.9e-5.)
  static __device__ __forceinline__ void dither(float (&w)[8], uint32 first, uint32 (&below)[4],
                                                uint32 (&next)[4]) {
    constexpr uint32 step = 0x2000 / versions;  // of the 13 bits that halves lack
    uint32 bits[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32 all = __float_as_uint(w[e]);
      const uint32 count = ((all & 0x1fffu) + step / 2) / step;
      const uint32 phase = ((first + e) * 2654435769u >> 16) % versions;
      const uint32 some = (1u << count) - 1;
      bits[e] = (some << phase | some >> (versions - phase)) & ((1u << versions) - 1);
      if (e + core_channels < 8)
        w[e + core_channels] += w[e] - __uint_as_float((all & ~0x1fffu) + count * step);
      w[e] = __uint_as_float(all & ~0x1fffu);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      below[j] = f16::pack(w[2 * j], w[2 * j + 1]);
      next[j] = bits[2 * j] | bits[2 * j + 1] << 16;
    }
  }
};

}  // namespace onepass
