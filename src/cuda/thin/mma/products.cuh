// Products by mma.sync: columns of the window times weights, and the outputs that their sums belong to.
#pragma once

#include "thin/mma/window.cuh"

namespace onepass {

// Elements of the window for a group's terms, of the lane's cells.
template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Columns {
  static constexpr int box_z = Terms::reach(0) + 1, box_y = Terms::reach(1) + 1, box_x = Terms::reach(2) + 1;
  static constexpr bool preloads =
      classes_z * classes_y > 1 && Terms::taps_at_once == 1 && vectors* box_z* box_y* box_x* spans <= 32;
  const float* base[patterns];  // where the lane's terms of a group lie that begins with the window
  float value[preloads ? vectors * box_z * box_y * box_x : 1][spans];

  static __device__ __forceinline__ constexpr int place(const Term& t) {
    return ((t.channel / 4 * box_z + t.z) * box_y + t.y) * box_x + t.x;
  }
  static __device__ __forceinline__ constexpr int word_of(const Term& t, int span) {
    return Patterns::word(t) + span / spans_x * static_cast<int>(C::step(1)) * row_pitch +
           span % spans_x * 8 * static_cast<int>(C::step(2));
  }
  template <int rz, int ry, int rx, int group>
  __device__ __forceinline__ float at(int span) const {
    constexpr Term t = Terms::term(rz, ry, rx, group, 0);
    if constexpr (preloads) {
      return value[place(t)][span];
    } else {
      constexpr int pattern = Patterns::table.find(rz, ry, rx, group);
      return base[pattern][word_of(t, span)];
    }
  }
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Products {
  const Warp warp;
  const Weights weights{warp};

  __device__ __forceinline__ Columns columns_of(const Fragments& w, int y, int column) const {
    Columns c;
    const float* base = w.window + lead + y * static_cast<int>(C::step(1)) * row_pitch +
                        (column * spans_x * 8 + warp.quad) * static_cast<int>(C::step(2));
    for_constant<patterns>([&](auto i_) {
      constexpr int i = decltype(i_)::value;
      c.base[i] = base + (warp.in_quad == 0   ? 0
                          : warp.in_quad == 1 ? Patterns::table.distance[i][1]
                          : warp.in_quad == 2 ? Patterns::table.distance[i][2]
                                              : Patterns::table.distance[i][3]);
    });
    if constexpr (Columns::preloads) {
      for_constant<vectors * Columns::box_z * Columns::box_y * Columns::box_x>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        constexpr int vector = i / (Columns::box_x * Columns::box_y * Columns::box_z);
        constexpr int all = C::in_channels;
        // The last group of input channels may have fewer than four, at other distances.
        constexpr int pattern = vector == vectors - 1 && all % 4 != 0 ? patterns - 1 : 0;
#pragma unroll
        for (int span = 0; span < spans; ++span)
          c.value[i][span] = c.base[pattern][Columns::word_of(
              Term{true, i / (Columns::box_x * Columns::box_y) % Columns::box_z,
                   i / Columns::box_x % Columns::box_y, i % Columns::box_x, 0, vector * 4},
              span)];
      });
    }
    return c;
  }

  template <int rz, int ry, class HeldWeights = NotHeld>
  __device__ __forceinline__ void convolve(Sums& sum, const Fragments& w, const Columns& c,
                                           const HeldWeights& held = {}) const {
    for_constant<classes_x>([&](auto rx_) {
      constexpr int rx = decltype(rx_)::value;
      constexpr int first = Terms::products_before(rz, ry, rx);
      constexpr int groups = Terms::groups(rz, ry, rx);
      if constexpr (groups == 0) {
#pragma unroll
        for (int k = 0; k < spans * 4; ++k) sum[rx][k / 4][k % 4] = w.bias[k % 4];
      } else if constexpr (splits) {
        convolve_split<rz, ry, rx>(sum, w, c, held);
      } else {
        for_constant<(groups + 1) / 2>([&](auto i_) {
          constexpr int i = decltype(i_)::value;
          constexpr bool both = 2 * i + 1 < groups;
          uint32 b[spans][2];
#pragma unroll
          for (int span = 0; span < spans; ++span) {
            b[span][0] = __float_as_uint(c.template at<rz, ry, rx, 2 * i>(span));
            if constexpr (both) b[span][1] = __float_as_uint(c.template at<rz, ry, rx, 2 * i + 1>(span));
          }
          uint32 a[4];
          weights.template take_weights<false>(a, w, held, first + i);
#pragma unroll
          for (int span = 0; span < spans; ++span) {
            float(&d)[4] = sum[rx][span];
            if constexpr (both) {
              mma_k8(d, a, b[span][0], b[span][1], i == 0 ? w.bias : d);
            } else {
              mma_k4(d, a, b[span][0], i == 0 ? w.bias : d);
            }
          }
        });
      }
    });
  }

  // The same where x = x1 + x2 and w = w1 + w2. Small products are added before large ones where columns are
  // in registers, else in sums of their own. The tensor core truncates its sums: it adds at most 64 terms.
  template <int rz, int ry, int rx, class HeldWeights>
  __device__ __forceinline__ void convolve_split(Sums& sum, const Fragments& w, const Columns& c,
                                                 const HeldWeights& held) const {
    constexpr int first = Terms::products_before(rz, ry, rx);
    constexpr int groups = Terms::groups(rz, ry, rx);
    constexpr int count = (groups + 1) / 2;
    constexpr int at_once = 8;
    constexpr bool in_turn = Columns::preloads;
    const float zero[4] = {};
    for_constant<(count + at_once - 1) / at_once>([&](auto part_) {
      constexpr int part = decltype(part_)::value;
      constexpr int here = count - part * at_once < at_once ? count - part * at_once : at_once;
      float large[spans][4], small[spans][4];
      for_constant<(in_turn ? 2 : 1) * here>([&](auto j_) {
        constexpr int j = decltype(j_)::value % here;
        constexpr bool takes_small = decltype(j_)::value < here;
        constexpr bool takes_large = !in_turn || !takes_small;
        constexpr int i = part * at_once + j;
        constexpr bool both = 2 * i + 1 < groups;
        uint32 a[4], a_rest[4];
        weights.template take_weights<false>(a, w, held, first + i);
        if constexpr (takes_small) weights.template take_weights<true>(a_rest, w, held, first + i);
#pragma unroll
        for (int span = 0; span < spans; ++span) {
          uint32 b[2], b_rest[2];
          b[0] = Weights::operand(c.template at<rz, ry, rx, 2 * i>(span));
          b_rest[0] = Weights::rest(c.template at<rz, ry, rx, 2 * i>(span));
          if constexpr (both) {
            b[1] = Weights::operand(c.template at<rz, ry, rx, 2 * i + 1>(span));
            b_rest[1] = Weights::rest(c.template at<rz, ry, rx, 2 * i + 1>(span));
          }
          float(&d)[4] = large[span];
          float(&e)[4] = in_turn ? large[span] : small[span];
          const auto multiply = [&](float(&to)[4], const uint32(&weights)[4], const uint32(&x)[2],
                                    const float* from) {
            if constexpr (both) {
              mma_k8(to, weights, x[0], x[1], from);
            } else {
              mma_k4(to, weights, x[0], from);
            }
          };
          const float* start = part == 0 ? w.bias : zero;
          if constexpr (takes_small) {
            multiply(e, a, b_rest, j > 0 ? e : in_turn ? start : zero);
            multiply(e, a_rest, b, e);
          }
          if constexpr (takes_large) multiply(d, a, b, j > 0 || in_turn ? d : start);
        }
      });
#pragma unroll
      for (int k = 0; k < spans * 4; ++k) {
        const float both = in_turn ? large[k / 4][k % 4] : large[k / 4][k % 4] + small[k / 4][k % 4];
        float& to = sum[rx][k / 4][k % 4];
        to = part == 0 ? both : to + both;
      }
    });
  }

  // The first of the lane's two neighbouring cells in a span of an item.
  __device__ __forceinline__ int cell_of(const Tile& tile, int column, int span) const {
    return tile.x + (column * spans_x + span % spans_x) * 8 + 2 * warp.in_quad;
  }
  // Whether the lane's element (cell 2 in_quad + i of the last span, class rx) can lie beyond the row's end.
  static constexpr __device__ bool may_end(int i, int rx) {
    return ((Numbers::tiles_x * columns * spans_x - 1) * 8 + 6 + i) * classes_x + rx >= out_x;
  }
  static __device__ __forceinline__ bool ends(int cell, int i, int rx) {
    return may_end(i, rx) && (cell + i) * classes_x + rx >= out_x;
  }
  // Whether the output has a class of a plane, and of a row of cells.
  static __device__ __forceinline__ bool has_plane(const Tile& tile, int rz) {
    return out_z % classes_z == 0 || tile.z * classes_z + rz < out_z;
  }
  static __device__ __forceinline__ bool has_row(const Tile& tile, int y, int ry) {
    if (out_y % classes_y == 0 && cells_y % spans_y == 0) return true;
    return (ry == 0 && spans_y == 1) || (tile.y + y) * classes_y + ry < out_y;
  }
  static __device__ __forceinline__ int rows_of(const Tile& tile) {
    return cells_y - tile.y < tile_y ? cells_y - tile.y : tile_y;
  }
  static __device__ __forceinline__ int items_of(int rows) {
    return (rows + spans_y - 1) / spans_y * columns;
  }

  // body(half of the 16 channels, class of x, span, sums of two neighbouring cells) for all of a lane's sums.
  template <class Body>
  static __device__ __forceinline__ void for_each_pair(Sums& sum, Body&& body) {
    for_constant<spans * classes_x * halves>([&](auto k_) {
      constexpr int k = decltype(k_)::value;
      constexpr int half = k % halves;
      constexpr int rx = k / halves % classes_x;
      constexpr int span = k / halves / classes_x;
      body(Constant<half>{}, Constant<rx>{}, Constant<span>{}, sum[rx][span] + half * 2);
    });
  }

  // body(class of y, half, class of x, span, sums of two cells, whether their row exists) for all sums of an
  // item of one class of z.
  template <int rz, class Body>
  __device__ __forceinline__ void for_each_sum(const Fragments& w, const Held<rz>& held, const Tile& tile,
                                               int y, int column, Body&& body) const {
    const Columns c = columns_of(w, y, column);
    for_constant<classes_y>([&](auto ry) {
      bool exists[spans_y];
#pragma unroll
      for (int i = 0; i < spans_y; ++i) exists[i] = has_row(tile, y + i, ry);
      Sums sum;
      convolve<rz, decltype(ry)::value>(sum, w, c, held);
      for_each_pair(sum, [&](auto half, auto rx, auto span, float* pair) {
        body(ry, half, rx, span, pair, exists[span / spans_x]);
      });
    });
  }
};

}  // namespace onepass
