// The moments of a tile's channels, by sums of distances from a pivot.
#pragma once

#include "thin/mma/products.cuh"

namespace onepass {

// Sums of distances from a pivot, which is the quad's first value of the channel.
template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Distances {
  float pivot[halves] = {};
  float sum[halves] = {};
  float square[halves] = {};

  __device__ __forceinline__ void add(int half, float distance) {
    sum[half] += distance;
    square[half] = fmaf(distance, distance, square[half]);
  }
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::TileMoments {
  const Warp warp;
  const Weights weights{warp};
  const Products products{warp};

  template <Way way>
  __device__ __forceinline__ void begin(Distances& own, const Fragments& w, const Columns& c,
                                        const Operands<Before>& operands) const {
    Sums sum;
    products.template convolve<0, 0>(sum, w, c);
    for_constant<halves>([&](auto half) {
      float* pair = sum[0][0] + half * 2;
      Chains::template before<way, Chains::swish_terms(0, 0, 0)>(pair[0], pair[1], operands.row[half]);
      own.pivot[half] = __shfl_sync(0xffffffffu, pair[0], warp.lane & ~3);
    });
  }

  // An item's outputs of one class of z.
  template <Way way, int rz>
  __device__ __forceinline__ void add(Distances& own, const Fragments& w, const Held<rz>& held,
                                      const Operands<Before>& operands, const Tile& tile, int y,
                                      int column) const {
    products.for_each_sum(w, held, tile, y, column,
                          [&](auto ry, auto half, auto rx, auto span, float* pair, bool exists) {
                            Chains::template before<way, Chains::swish_terms(rz, ry, rx)>(
                                pair[0], pair[1], operands.row[half], own.pivot[half]);
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                              Chains::compute_here(pair[i]);
                              if (!exists || Products::ends(products.cell_of(tile, column, span), i, rx))
                                continue;
                              own.add(half, pair[i]);
                            }
                          });
  }

  // How many outputs of a channel the lane has in a tile.
  __device__ __forceinline__ int count_of(const Tile& tile) const {
    int of_row = 0;
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
#pragma unroll
      for (int k = 0; k < spans_x * classes_x * 2; ++k)
        of_row +=
            !Products::ends(products.cell_of(tile, column, k / 2 / classes_x), k % 2, k / 2 % classes_x);
    }
    const int left_z = out_z - tile.z * classes_z, left_y = out_y - tile.y * classes_y;
    return (left_z < classes_z ? left_z : classes_z) *
           (left_y < tile_y * classes_y ? left_y : tile_y * classes_y) * of_row;
  }

  template <Way way>
  __device__ __forceinline__ void measure(const Tile& tile, Fragments& w) const {
    const int items = Products::items_of(Products::rows_of(tile));
    const float count = lanes_sum<4>(static_cast<float>(count_of(tile)));
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) weights.load_weights(w, m);
      Operands<Before> operands;
      operands.load(warp.p, tile.n, m, warp.quad);
      Distances own;
      begin<way>(own, w, products.columns_of(w, 0, 0), operands);
      for_constant<classes_z>([&](auto rz_) {
        constexpr int rz = decltype(rz_)::value;
        if (!Products::has_plane(tile, rz)) return;
        const Held<rz> held = weights.template hold_weights<rz>(w);
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
      if (warp.in_quad == 0) {
        float* to = warp.area.moments[m * 16 + row_channel(half, warp.quad)];
        to[0] = count;
        to[1] = fmaf(sum, per_element, own.pivot[half]);
        to[2] = fmaf(-sum, sum * per_element, square);
      }
    }
  }
};

}  // namespace onepass
