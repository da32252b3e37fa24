// The outputs of a tile, from products to memory: stored as they are computed, or put together as rows first.
//
// `Values` says what becomes of a value behind the before-chain (HoldByRecomputing, HoldInOutput):
//   before                          operands of the before-chain
//   begin<way, rz, ry>(sums)        sees an item's sums before the chain
//   finish(half, x, is_own)         the value to store. `is_own` marks values that are the tile's: once each.
//                                   Values of a neighbouring tile, or beyond the output, are computed too.
//   sample(p, n), index(channel, z, y, x), row_stride, channel_stride: where values go
//   store_piece(packed, to, index, aligned), store(to, vector): how they are stored
#pragma once

#include "thin/mma/products.cuh"
#include "thin/mma/send.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Outputs {
  const Warp warp;
  const Weights weights{warp};
  const Products products{warp};
  const Send send{warp};

  // body(half, class of x, span, values before the norm of two cells) for an item's sums of a class of z and
  // y.
  template <Way way, int rz, int ry, class Values, class Body>
  __device__ __forceinline__ void for_each_value(Sums& sum, const Fragments& w, const Columns& c,
                                                 const Held<rz>& held, Values& values, Body&& body) const {
    products.template convolve<rz, ry>(sum, w, c, held);
    values.template begin<way, rz, ry>(sum);
    Products::for_each_pair(sum, [&](auto half, auto rx, auto span, float* pair) {
      Chains::template before<way, Chains::swish_terms(rz, ry, rx)>(pair[0], pair[1],
                                                                    values.before.row[half]);
      body(half, rx, span, pair);
    });
  }

  // Stores an item's outputs as they are computed. `to`: channel 16 m in the tile's first row and column.
  // `piece` neighbours of a lane are one vector of memory where `aligned`.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void store(const Tile& tile, const Fragments& w, const Held<rz>& held,
                                        Values& values, int y, int column, char* to, int count,
                                        bool aligned) const {
    const Columns c = products.columns_of(w, y, column);
    char* lane_to = to + (warp.quad * Values::channel_stride + y * classes_y * Values::row_stride +
                          (column * spans_x * 8 + 2 * warp.in_quad) * classes_x) *
                             Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      products.template convolve<rz, ry>(sum, w, c, held);
      values.template begin<way, rz, ry>(sum);
      for_constant<spans * halves>([&](auto k_) {
        constexpr int span = decltype(k_)::value / halves;
        constexpr int half = decltype(k_)::value % halves;
        constexpr int neighbours = 2 * classes_x;
        float value[neighbours];
        const bool exists = Products::has_row(tile, y + span / spans_x, ry);
        for_constant<classes_x>([&](auto rx) {
          float* pair = sum[rx][span] + half * 2;
          Chains::template before<way, Chains::swish_terms(rz, ry, rx)>(pair[0], pair[1],
                                                                        values.before.row[half]);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            value[i * classes_x + rx] = values.finish(
                half, pair[i], exists && !Products::ends(products.cell_of(tile, column, span), i, rx));
        });
        const bool in_range = (channels % 16 == 0 || half * 8 + warp.quad < count) && exists;
        char* place = lane_to + (half * 8 * Values::channel_stride +
                                 (span / spans_x * classes_y + ry) * Values::row_stride +
                                 span % spans_x * 8 * classes_x) *
                                    Output::bytes;
        constexpr int piece = Numbers::piece > 0 ? Numbers::piece : 1;
#pragma unroll
        for (int k = 0; k < neighbours; k += piece) {
          float own[piece];
#pragma unroll
          for (int i = 0; i < piece; ++i) own[i] = value[k + i];
          Packed<Output, piece> packed;
          packed.pack(own);
          if (in_range && !Products::ends(products.cell_of(tile, column, span), k / classes_x, k % classes_x))
            Values::store_piece(packed, place, k, aligned);
        }
      });
    });
  }

  // The same where channels lie after space. A lane's two channels of a position are neighbours, and eight
  // lanes have whole sectors.
  template <Way way, int rz, bool aligned, class Values>
  __device__ __forceinline__ void store_interleaved(const Tile& tile, const Fragments& w,
                                                    const Held<rz>& held, Values& values, int y, int column,
                                                    char* to, int count) const {
    const Columns c = products.columns_of(w, y, column);
    char* lane_to =
        to + ((y * classes_y * out_x + (column * spans_x * 8 + 2 * warp.in_quad) * classes_x) * channels +
              row_channel(0, warp.quad)) *
                 Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      for_each_value<way, rz, ry>(sum, w, c, held, values, [&](auto half, auto rx, auto span, float* pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          pair[i] = values.finish(half, pair[i],
                                  Products::has_row(tile, y + span / spans_x, ry) &&
                                      !Products::ends(products.cell_of(tile, column, span), i, rx));
          Chains::compute_here(pair[i]);
        }
      });
      for_constant<spans * 2 * classes_x>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        constexpr int rx = k % classes_x;
        constexpr int i = k / classes_x % 2;
        constexpr int span = k / classes_x / 2;
        constexpr int piece = Numbers::piece > 0 ? Numbers::piece : 1;  // of the halves
        const bool has_position = Products::has_row(tile, y + span / spans_x, ry) &&
                                  !Products::ends(products.cell_of(tile, column, span), i, rx);
        char* place = lane_to + ((span / spans_x * classes_y + ry) * out_x +
                                 (span % spans_x * 8 + i) * classes_x + rx) *
                                    channels * Output::bytes;
#pragma unroll
        for (int half = 0; half < halves; half += piece) {
          float own[piece];
#pragma unroll
          for (int j = 0; j < piece; ++j) own[j] = sum[rx][span][(half + j) * 2 + i];
          Packed<Output, piece> packed;
          packed.pack(own);
          if (!has_position || (channels % 16 != 0 && row_channel(half, warp.quad) >= count)) continue;
          if constexpr (piece == 2 && aligned) {
            if constexpr (Output::bytes == 4) {
              Values::store(place, uint2{packed.word[0], packed.word[1]});
            } else {
              Values::store(place, packed.word[0]);
            }
            continue;
          }
          packed.store(place, row_channel(half, 0), aligned);
        }
      });
    });
  }

  // Puts an item's outputs of one class of z into the warp's stage, from row `row` of cells on. `start` is
  // the phase of the lane's channel in the stage's first row. It is the same 8 channels further: a vector has
  // 4 or 8 elements.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void put(const Tile& tile, const Fragments& w, const Held<rz>& held,
                                      Values& values, int y, int column, int row, int start) const {
    const Columns c = products.columns_of(w, y, column);
    const bool is_own = !overlaps || whole_rows || column < columns;
    unsigned char* lane_stage =
        warp.area.stage +
        (warp.quad * channel_pitch + (column * spans_x * 8 + 2 * warp.in_quad) * classes_x) * Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      unsigned char* to[spans_y];
#pragma unroll
      for (int i = 0; i < spans_y; ++i) {
        const int chunk = (row + i) * classes_y + ry;
        to[i] = lane_stage + (width + (whole_rows ? start + chunk * out_x
                                                  : (start + chunk * out_x) % width + chunk * chunk_pitch)) *
                                 Output::bytes;
      }
      Sums sum;
      for_each_value<way, rz, ry>(sum, w, c, held, values, [&](auto half, auto rx, auto span, float* pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool ends_before = Products::ends(products.cell_of(tile, column, span), i, rx);
          float value = values.finish(
              half, pair[i], is_own && Products::has_row(tile, y + span / spans_x, ry) && !ends_before);
          Chains::compute_here(value);
          // A row of cells that lies partly beyond the output is the last of its chunk. Elements behind the
          // end of a chunk and channels beyond the last are not sent.
          const bool in_range = staged_channels % 8 == 0 || half * 8 + warp.quad < staged_channels;
          if (in_range && !ends_before)
            store_one<Output>(to[span / spans_x],
                              half * 8 * channel_pitch + (span % spans_x * 8 + i) * classes_x + rx, value);
        }
      });
    });
  }

  // Items that cover a sector.
  static constexpr int more_columns = (sector + 8 * spans_x * classes_x - 1) / (8 * spans_x * classes_x);

  // The first outputs of the row of cells after the tile, for the sector in which its last row ends.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void put_next(const Fragments& w, const Held<rz>& held, Values& values, int rows,
                                           int start) const {
    unsigned char* to =
        warp.area.stage +
        (warp.quad * channel_pitch + width + start + rows * classes_y * out_x) * Output::bytes;
#pragma unroll 1
    for (int column = 0; column < more_columns; ++column) {
      Sums sum;
      products.template convolve<rz, 0>(sum, w, products.columns_of(w, tile_y, column), held);
      for_constant<spans_x * classes_x * halves>([&](auto k_) {
        constexpr int half = decltype(k_)::value % halves;
        constexpr int rx = decltype(k_)::value / halves % classes_x;
        constexpr int span = decltype(k_)::value / halves / classes_x;
        float* pair = sum[rx][span] + half * 2;
        Chains::template before<way, Chains::swish_terms(rz, 0, rx)>(pair[0], pair[1],
                                                                     values.before.row[half]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float value = values.finish(half, pair[i], false);
          Chains::compute_here(value);
          const bool in_range = staged_channels % 8 == 0 || half * 8 + warp.quad < staged_channels;
          const int x = ((column * spans_x + span) * 8 + 2 * warp.in_quad + i) * classes_x + rx;
          if (in_range && x < sector - 1) store_one<Output>(to, half * 8 * channel_pitch + x, value);
        }
      });
    }
  }

  // One class of z, channels 16 m and on.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void write_plane(const Tile& tile, const Fragments& w, Values& values,
                                              int m) const {
    const int z = tile.z * classes_z + rz;
    char* to = Values::sample(warp.p, tile.n) +
               Values::index(m * 16, z, tile.y * classes_y, tile.x * classes_x) * Output::bytes;
    const int count = row_tiles == 1 || channels - m * 16 < 16 ? channels - m * 16 : 16;
    const int all_rows = Products::rows_of(tile);
    const Held<rz> held = weights.template hold_weights<rz>(w);
    if constexpr (is_direct) {
      const bool aligned =
          reinterpret_cast<uint64>(Values::sample(warp.p, tile.n)) % (Numbers::piece * Output::bytes) == 0;
      const int items = Products::items_of(all_rows);
      if constexpr (!interleaved) {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store<way, rz>(tile, w, held, values, i / columns * spans_y, i % columns, to, count, aligned);
      } else if (aligned) {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store_interleaved<way, rz, true>(tile, w, held, values, i / columns * spans_y, i % columns, to,
                                           count);
      } else {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store_interleaved<way, rz, false>(tile, w, held, values, i / columns * spans_y, i % columns, to,
                                            count);
      }
      return;
    }
    // Consecutive rows share a sector where a row has at least a sector of elements.
    constexpr bool carries = whole_rows && out_x >= sector;
    const bool is_last = whole_rows ? tile.y + tile_y >= cells_y : tile.x + tile_x >= cells_x;
    const bool is_first = whole_rows ? tile.y == 0 : tile.x == 0;
    const typename Send::Side head = overlaps && !is_first ? Send::others : Send::own;
    const typename Send::Side tail = overlaps && !is_last ? Send::shared : Send::own;
    const int all_columns = columns + (overlaps && !whole_rows && !is_last ? more_columns : 0);
#pragma unroll 1
    for (int y = 0; y < all_rows; y += stage_y) {
      const int start = Send::phase(to, warp.quad);
      const int rows = all_rows - y < stage_y ? all_rows - y : stage_y;
#pragma unroll 1
      for (int row = 0, column = 0; row < rows;) {
        put<way, rz>(tile, w, held, values, y + row, column, row, start);
        if (++column == all_columns) column = 0, row += spans_y;
      }
      const bool ends_tile = y + stage_y >= all_rows;
      if constexpr (overlaps && whole_rows) {
        if (ends_tile && !is_last) put_next<way, rz>(w, held, values, rows, start);
      }
      __syncwarp();
      const int out_row = (tile.y + y) * classes_y;
      const int out_rows = out_y - out_row < rows * classes_y ? out_y - out_row : rows * classes_y;
      if constexpr (whole_rows) {
        send.template send<Values>(warp.area.stage, to, count, out_rows * out_x,
                                   carries && y > 0 ? Send::shared
                                   : y > 0          ? Send::own
                                                    : head,
                                   ends_tile ? tail
                                   : carries ? Send::others
                                             : Send::own);
      } else {
        const int left = out_x - tile.x * classes_x;
#pragma unroll 1
        for (int i = 0; i < out_rows; ++i)
          send.template send<Values>(warp.area.stage + i * chunk_pitch * Output::bytes,
                                     to + i * out_x * Output::bytes, count,
                                     left < chunk_elements ? left : chunk_elements, head, tail);
      }
      __syncwarp();
      to += stage_y * classes_y * out_x * Output::bytes;
    }
  }

  // All classes of z.
  template <Way way, class Values>
  __device__ __forceinline__ void write(const Tile& tile, const Fragments& w, Values& values, int m) const {
    for_constant<classes_z>([&](auto rz) {
      if (Products::has_plane(tile, rz)) write_plane<way, decltype(rz)::value>(tile, w, values, m);
    });
  }
};

}  // namespace onepass
