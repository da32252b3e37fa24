// Tiles whose elements are too large for sums on tensor cores, or not finite: every output by itself.
#pragma once

#include "thin/mma/chains.cuh"

namespace onepass {

// Such tiles are rare. Functions are static: the address of an object would make all its shared memory
// generic.
template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Careful {
  // An output after the before-chain, summed term by term over the taps that meet an input.
  static __device__ __noinline__ float value(const Parameters& p, int64 n, int channel, int z, int y, int x) {
    const int out[3] = {z, y, x};
    float sum = bias(p, channel);
#pragma unroll 1
    for (int input = 0; input < C::in_channels; ++input) {
      float part = 0.0f;
#pragma unroll 1
      for (int tap = 0; tap < C::taps; ++tap) {
        int at_tap = tap;
        int64 at = n * C::input_stride(0) + input * C::input_stride(1);
        bool meets = true;
#pragma unroll
        for (int d = 2; d >= 0; --d) {
          const int kernel = static_cast<int>(C::kernel(d));
          const int step = static_cast<int>(C::tap_step(d));
          const int r = out[d] % Terms::classes(d);
          const int m = (at_tap % kernel - static_cast<int>(C::first(d, r))) / step;
          meets &= at_tap % kernel == static_cast<int>(C::first(d, r)) + m * step && m >= 0 &&
                   m < Terms::count(d, r);
          const int position = out[d] / Terms::classes(d) * static_cast<int>(C::step(d)) +
                               static_cast<int>(C::base(d, r)) + m * static_cast<int>(C::delta(d));
          meets &= position >= 0 && position < C::input_size(d);
          at += position * C::input_stride(d + 2);
          at_tap /= kernel;
        }
        if (!meets) continue;
        float a = weight(p, channel, input, tap);
        float b = load_one<typename Tail::Input>(p.input, at);
        if constexpr (C::rounds_to_tf32) a = round_operand<C>(a), b = round_operand<C>(b);
        part = fmaf(a, b, part);
      }
      sum += part;
    }
    ChannelValues<Before, 1> before;
    before.load(p, n, channel);
    return Chains::template apply<Before>(sum, before);
  }

  // body(z, y, x) for the lane's outputs of a channel of the tile.
  template <class Body>
  static __device__ __forceinline__ void for_each_output(const Tile& tile, Body&& body) {
    const int first_y = tile.y * classes_y, first_x = tile.x * classes_x;
    const int rows = out_y - first_y < tile_y * classes_y ? out_y - first_y : tile_y * classes_y;
    const int row = out_x - first_x < tile_x * classes_x ? out_x - first_x : tile_x * classes_x;
    const int planes = out_z - tile.z * classes_z < classes_z ? out_z - tile.z * classes_z : classes_z;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < planes * rows * row; i += 32)
      body(tile.z * classes_z + i / (rows * row), first_y + i / row % rows, first_x + i % row);
  }

  // Leaves the moments of a channel, of which every lane has a part.
  static __device__ __forceinline__ void store_moments(WarpShared& area, int channel, Moments& own) {
    const float elements = lanes_sum<32>(own.count);
    float mean, m2;
    team_moments<32, threads>(own, elements, nullptr, mean, m2);
    if (threadIdx.x % 32 == 0) {
      area.moments[channel][0] = elements;
      area.moments[channel][1] = mean;
      area.moments[channel][2] = m2;
    }
  }

  static __device__ __noinline__ void measure(const Parameters& p, WarpShared& area, const Tile tile) {
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      Moments all;
      for_each_output(
          tile, [&](int z, int y, int x) { all.merge(1.0f, value(p, tile.n, channel, z, y, x), 0.0f); });
      store_moments(area, channel, all);
    }
  }

  // body(z, y, x) for the lane's outputs of a channel that the tile stores in `sample`. Where tiles overlap
  // these are whole sectors, as in Send. A run (all rows of a plane, or a row) then starts at the
  // first sector that begins in it. It ends where the next run starts. The first and the last run of a plane,
  // or row, have its ends.
  template <class Body>
  static __device__ __forceinline__ void for_each_stored(const char* sample, const Tile& tile, int channel,
                                                         Body&& body) {
    const int first_y = tile.y * classes_y, first_x = tile.x * classes_x;
    const int rows = out_y - first_y < tile_y * classes_y ? out_y - first_y : tile_y * classes_y;
    const int row = out_x - first_x < tile_x * classes_x ? out_x - first_x : tile_x * classes_x;
    const int planes = out_z - tile.z * classes_z < classes_z ? out_z - tile.z * classes_z : classes_z;
    const int length = whole_rows ? rows * out_x : row;
    const bool is_first = whole_rows ? first_y == 0 : first_x == 0;
    const bool is_last = whole_rows ? first_y + rows == out_y : first_x + row == out_x;
#pragma unroll 1
    for (int run = 0; run < planes * (whole_rows ? 1 : rows); ++run) {
      const int z = tile.z * classes_z + (whole_rows ? run : run / rows);
      const int y = first_y + (whole_rows ? 0 : run % rows);
      const int64 first = output_index(0, channel, z, y, first_x);
      // Elements up to the next sector.
      const auto left = [&](int64 index) {
        const uint64 at = reinterpret_cast<uint64>(sample) / Output::bytes + static_cast<uint64>(index);
        return static_cast<int>((sector - at % sector) % sector);
      };
      const int begin = overlaps && !is_first ? left(first) : 0;
      const int end = length + (overlaps && !is_last ? left(first + length) : 0);
#pragma unroll 1
      for (int i = begin + threadIdx.x % 32; i < end; i += 32)
        body(z, y + (first_x + i) / out_x, (first_x + i) % out_x);
    }
  }
};

}  // namespace onepass
