// Pass 1 of thin_mma.cuh: the moments of a tile's channels; outputs that need care, one by one.
#pragma once

#include "thin/mma/products.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinMmaMoments : ThinMmaProducts<C, Tail, Numbers> {
  using Base = ThinMmaProducts<C, Tail, Numbers>;
  using Base::area;
  using Base::Base;
  using Base::bias;
  using Base::cell_of;
  using Base::channels;
  using Base::classes_x;
  using Base::classes_y;
  using Base::classes_z;
  using Base::columns;
  using Base::columns_of;
  using Base::compute_here;
  using Base::ends;
  using Base::for_each_pair;
  using Base::halves;
  using Base::has_plane;
  using Base::has_row;
  using Base::in_quad;
  using Base::items_of;
  using Base::lane;
  using Base::load_weights;
  using Base::out_x;
  using Base::out_y;
  using Base::out_z;
  using Base::p;
  using Base::quad;
  using Base::row_channel;
  using Base::row_tiles;
  using Base::rows_of;
  using Base::spans_x;
  using Base::spans_y;
  using Base::swish_terms;
  using Base::threads;
  using Base::tile_x;
  using Base::tile_y;
  using Base::weight;
  using typename Base::Before;
  using typename Base::Columns;
  using typename Base::Parameters;
  using typename Base::Sums;
  using typename Base::Terms;
  using typename Base::Tile;
  using typename Base::WarpShared;
  using typename Base::Way;
  using typename Base::Weights;
  template <class Chain>
  using Operands = typename Base::template Operands<Chain>;
  template <int rz>
  using Held = typename Base::template Held<rz>;

  // --- Pass 1: sums of distances from a pivot, which is the quad's first value of the channel ---
  struct Distances {
    float pivot[halves] = {};
    float sum[halves] = {};
    float square[halves] = {};
  };

  template <Way way>
  __device__ __forceinline__ void begin(Distances& own, const Weights& w, const Columns& c,
                                        const Operands<Before>& operands) const {
    Sums sum;
    this->template convolve<0, 0>(sum, w, c);
    for_constant<halves>([&](auto half) {
      float* pair = sum[0][0] + half * 2;
      Base::template before<way, swish_terms(0, 0, 0)>(pair[0], pair[1], operands.row[half]);
      own.pivot[half] = __shfl_sync(0xffffffffu, pair[0], lane & ~3);
    });
  }

  // An item's outputs of one class of z.
  template <Way way, int rz>
  __device__ __forceinline__ void add(Distances& own, const Weights& w, const Held<rz>& held,
                                      const Operands<Before>& operands, const Tile& tile, int y,
                                      int column) const {
    const Columns c = columns_of(w, y, column);
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      bool exists[spans_y];
#pragma unroll
      for (int i = 0; i < spans_y; ++i) exists[i] = has_row(tile, y + i, ry);
      Sums sum;
      this->template convolve<rz, ry>(sum, w, c, held);
      for_each_pair(sum, [&](auto half, auto rx, auto span, float* pair) {
        Base::template before<way, swish_terms(rz, ry, rx)>(pair[0], pair[1], operands.row[half],
                                                            own.pivot[half]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          compute_here(pair[i]);
          if (!exists[span / spans_x] || ends(cell_of(tile, column, span), i, rx)) continue;
          own.sum[half] += pair[i];
          own.square[half] = fmaf(pair[i], pair[i], own.square[half]);
        }
      });
    });
  }

  // How many outputs of a channel the lane has in a tile.
  __device__ __forceinline__ int count_of(const Tile& tile) const {
    int of_row = 0;
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
#pragma unroll
      for (int k = 0; k < spans_x * classes_x * 2; ++k)
        of_row += !ends(cell_of(tile, column, k / 2 / classes_x), k % 2, k / 2 % classes_x);
    }
    const int left_z = out_z - tile.z * classes_z, left_y = out_y - tile.y * classes_y;
    return (left_z < classes_z ? left_z : classes_z) *
           (left_y < tile_y * classes_y ? left_y : tile_y * classes_y) * of_row;
  }

  template <Way way>
  __device__ __forceinline__ void measure(const Tile& tile, Weights& w) const {
    const int items = items_of(rows_of(tile));
    const float count = lanes_sum<4>(static_cast<float>(count_of(tile)));
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) load_weights(w, m);
      Operands<Before> operands;
      operands.load(p, tile.n, m, quad);
      Distances own;
      begin<way>(own, w, columns_of(w, 0, 0), operands);
      for_constant<classes_z>([&](auto rz_) {
        constexpr int rz = decltype(rz_)::value;
        if (!has_plane(tile, rz)) return;
        const Held<rz> held = this->template hold_weights<rz>(w);
#pragma unroll 1
        for (int item = 0; item < items; ++item)
          add<way, rz>(own, w, held, operands, tile, item / columns * spans_y, item % columns);
      });
      store_moments(own, m, count);
    }
  }

  __device__ __forceinline__ void store_moments(const Distances& own, int m, float count) const {
    const float per_element = 1.0f / count;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const float sum = lanes_sum<4>(own.sum[half]);
      const float square = lanes_sum<4>(own.square[half]);
      if (in_quad == 0) {
        float* to = area.moments[m * 16 + row_channel(half, quad)];
        to[0] = count;
        to[1] = fmaf(sum, per_element, own.pivot[half]);
        to[2] = fmaf(-sum, sum * per_element, square);
      }
    }
  }

  // --- Tiles that need care: every output for itself, summed term by term over the taps that meet an input.
  // Apart and small: they are rare. Static: an address of the agent would make all its shared memory generic.
  static __device__ __noinline__ float careful_value(const Parameters& p, int64 n, int channel, int z, int y,
                                                     int x) {
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
    return Base::template apply<Before>(sum, before);
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

  static __device__ __noinline__ void measure_carefully(const Parameters& p, WarpShared& area,
                                                        const Tile tile) {
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      Moments all;
      for_each_output(tile, [&](int z, int y, int x) {
        all.merge(1.0f, careful_value(p, tile.n, channel, z, y, x), 0.0f);
      });
      const float elements = lanes_sum<32>(all.count);
      float mean, m2;
      team_moments<32, threads>(all, elements, nullptr, mean, m2);
      if (threadIdx.x % 32 == 0) {
        area.moments[channel][0] = elements;
        area.moments[channel][1] = mean;
        area.moments[channel][2] = m2;
      }
    }
  }
};

}  // namespace onepass
