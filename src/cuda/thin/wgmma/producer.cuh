// The producer warps of thin/wgmma.cuh: they load whole rows by vectors, or elements.
#pragma once

#include "thin/wgmma/elements.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class Product>
struct ThinWgmma<C, Tail, Numbers, Product>::Producer {
  const Block block;
  const Elements elements{block};

  // --- Producers of rows ---
  // Where lanes lie along memory and a tile has all of them, a thread loads a whole row by vectors. It makes
  // the units of all rows of the window from it: a quarter of the loads, and of the warps that wait for them.
  // A warp has one of `row_chunks` parts of a plane, of every `planes_apart`-th plane.
  static constexpr bool loads_rows = Numbers::loads_rows;
  static constexpr int plane_rows = C::in_channels * window_columns;
  static constexpr int row_chunks = plane_rows <= 32 ? 1 : plane_rows <= 64 ? 2 : 4;
  static constexpr int row_elements = static_cast<int>(C::input_size(1));
  static constexpr int row_vectors = loads_rows ? row_elements * static_cast<int>(Input::bytes) / 16 : 1;
  static_assert(!loads_rows || (samples == 1 && lane_rows <= tile_rows && C::input_stride(3) == 1 &&
                                plane_rows <= 128 && producers / 32 % row_chunks == 0));

  __device__ __forceinline__ bool rows_are_aligned() const {
    return loads_rows && reinterpret_cast<uint64>(block.p.input) % 16 == 0;
  }

  using RowWords = uint32[row_vectors * 4];
  static constexpr int planes_apart = producers / 32 / row_chunks;  // of a warp
  static constexpr int row_unit_planes = repeats * part_tiles * window_planes;
  // Two rows are in flight where registers allow and a warp has an even number of rows in a unit.
  static constexpr int rows_in_flight =
      8 * row_vectors <= Numbers::most_row_words && row_unit_planes % (2 * planes_apart) == 0 ? 2 : 1;
  // Whether the window of every plane lies in the input, for every tile.
  static constexpr bool has_all_planes =
      C::base(0, 0) >= 0 && C::base(2, 0) >= 0 && row_unit_planes % planes_apart == 0 &&
      (plane_parts - 1) * part_planes + window_planes - 1 + C::base(0, 0) < C::input_size(0) &&
      (column_tiles - 1) * tile_columns * step2 + C::base(2, 0) + window_columns - 1 < C::input_size(2);

  // Lanes 2 j and 2 j + 1 of row `row` of the window, as 16-bit elements.
  static __device__ __forceinline__ void pack_lanes(const RowWords& x, int row, int j, uint32& high,
                                                    uint32& low) {
    const int a = static_cast<int>(C::base(1, 0)) + row + 2 * j * shift;
    const int b = a + shift;
    const bool has_a = a >= 0 && a < row_elements;
    const bool has_b = b >= 0 && b < row_elements;
    if constexpr (splits) {
      split_pair<C, Input>(has_a ? __uint_as_float(x[has_a ? a : 0]) : 0.0f,
                           has_b ? __uint_as_float(x[has_b ? b : 0]) : 0.0f, high, low);
    } else {
      high = __byte_perm(has_a ? x[has_a ? a / 2 : 0] : 0, has_b ? x[has_b ? b / 2 : 0] : 0,
                         (a & 1 ? 0x32 : 0x10) | (b & 1 ? 0x7600 : 0x5400));
      low = 0;
    }
  }

  __device__ __forceinline__ void produce_rows() const {
    constexpr int unit_planes = row_unit_planes;
    const auto end = static_cast<int>((block.p.batch + samples - 1) / samples);
    const int warp = static_cast<int>(uniform((threadIdx.x - consumers) / 32));
    const int own = warp % row_chunks * 32 + static_cast<int>(threadIdx.x % 32);
    const int c = own / window_columns;
    const int column = own % window_columns;
    const bool is_one = own < plane_rows;
    // Neighbouring threads store different copies of a row at a time: to different banks.
    char* place[core_rows];
    uint32 copies = 0;
#pragma unroll
    for (int k = 0; k < core_rows; ++k) {
      const int i = (column + k) % core_rows;
      place[k] =
          reinterpret_cast<char*>(block.shared.x) + ((c / core_channels * starts - i * delta1) * row_units +
                                                     column * pitch + c % core_channels + i * core_channels) *
                                                        16;
#pragma unroll
      for (int row = 0; row < window_rows; ++row) {
        const int q = row - i * delta1;
        if (is_one && q >= 0 && q < starts) copies |= 1u << (row * core_rows + k);
      }
    }
    const int first_of_warp = warp / row_chunks;
    int ahead_unit = first_unit();
    int ahead_index = first_of_warp;  // planes of the unit
    RowWords x[rows_in_flight] = {};
    // The address of the next row, where a warp's rows of a unit are equally spaced and inside the input.
    constexpr bool in_line = has_all_planes && part_tiles * repeats == 1;
    constexpr auto bytes = static_cast<int64>(Input::bytes);
    const char* next = static_cast<const char*>(block.p.input);
    if constexpr (in_line) {
      next += bytes * (ahead_unit * C::input_stride(0) + c * C::input_stride(1) +
                       (first_plane() + ahead_index + C::base(0, 0)) * C::input_stride(2) +
                       (first_tile() * tile_columns * step2 + C::base(2, 0) + column) * C::input_stride(4));
    }
    const auto load_ahead = [&](RowWords& to) {
      const int plane = ahead_index % window_planes;
      const int tile = first_tile() + ahead_index / window_planes % part_tiles;
      const int i0 = first_plane() + plane + static_cast<int>(C::base(0, 0));
      const int i2 = tile * tile_columns * step2 + static_cast<int>(C::base(2, 0)) + column;
      const bool inside =
          has_all_planes || (static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                             static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2)));
      const auto* from = reinterpret_cast<const uint4*>(
          in_line ? next
                  : static_cast<const char*>(block.p.input) +
                        bytes * (ahead_unit * C::input_stride(0) + c * C::input_stride(1) +
                                 i0 * C::input_stride(2) + i2 * C::input_stride(4)));
      if (is_one && ahead_unit < end && (has_all_planes || ahead_index < unit_planes)) {
#pragma unroll
        for (int v = 0; v < row_vectors; ++v) {
          const uint4 got = inside ? from[v] : uint4{0, 0, 0, 0};
          to[4 * v] = got.x;
          to[4 * v + 1] = got.y;
          to[4 * v + 2] = got.z;
          to[4 * v + 3] = got.w;
        }
      }
      ahead_index += planes_apart;
      next += bytes * planes_apart * C::input_stride(2);
      if (ahead_index >= unit_planes) {
        ahead_index = first_of_warp;
        ahead_unit += unit_step();
        next += bytes * (unit_step() * C::input_stride(0) - unit_planes * C::input_stride(2));
      }
    };
#pragma unroll
    for (int i = 0; i < rows_in_flight; ++i) load_ahead(x[i]);
    if constexpr (!all_prepare) barrier::wait(&block.shared.prepared, 0);
    uint32 before = 0;  // planes of the units before
    uint32 largest = 0;
    // Whether each of a warp's rows in flight always goes to the same slot.
    constexpr bool keeps_slots = rows_in_flight * planes_apart == planes && unit_planes % planes == 0;
    uint32 kept_parity = 1;  // the first time round slots are free
    const auto store_row = [&](RowWords& from, int index, int i) {
      const Ring at{keeps_slots ? static_cast<uint32>(first_of_warp + i * planes_apart) : before + index};
      barrier::wait(&block.shared.empty[at.slot()], keeps_slots ? kept_parity : at.parity() ^ 1);
      const uint32 of_slot = at.slot() * static_cast<uint32>(sizeof(block.shared.x[0]));
      if constexpr (splits) {
#pragma unroll
        for (int i = 0; i < row_vectors * 4; ++i)
          from[i] = __float_as_uint(__uint_as_float(from[i]) * thin_input_scale);
      }
      if (is_one) {
#pragma unroll
        for (int row = 0; row < window_rows; ++row) {
          uint32 high[4], low[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            pack_lanes(from, row, j, high[j], low[j]);
            // A further shift adds one element, in the last lane.
            const bool has_new = row < shift || j == 3;
            if (guards && has_new) largest = __vmaxu2(largest, high[j] & 0x7fff7fffu);
          }
#pragma unroll
          for (int k = 0; k < core_rows; ++k) {
            const bool has_all = row >= (core_rows - 1) * delta1 && row < starts;
            if (!has_all && (copies >> (row * core_rows + k) & 1u) == 0) continue;
            auto* copy = reinterpret_cast<uint4*>(place[k] + of_slot + row * row_units * 16);
            *copy = uint4{high[0], high[1], high[2], high[3]};
            if constexpr (input_parts == 2) copy[plane_units] = uint4{low[0], low[1], low[2], low[3]};
          }
        }
      }
      barrier::release_to_copies();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier::arrive(&block.shared.full[at.slot()]);
    };
#pragma unroll 1
    for (int unit = first_unit(); unit < end; unit += unit_step()) {
#pragma unroll 1
      for (int index = first_of_warp; index < unit_planes; index += rows_in_flight * planes_apart) {
#pragma unroll
        for (int i = 0; i < rows_in_flight; ++i) {
          store_row(x[i], index + i * planes_apart, i);
          load_ahead(x[i]);
        }
        kept_parity ^= 1;
      }
      before += unit_planes;
      if constexpr (guards) {
        if (is_one) atomicMax(&block.shared.largest[c][0], max(largest & 0xffffu, largest >> 16));
        largest = 0;
      }
      elements.end_unit(static_cast<int64>(unit) * samples);
    }
    if (guards && threadIdx.x == consumers && rank() == 0)
      block.p.only[block.p.batch + first_unit()] = block.shared.redo;
  }

  __device__ __forceinline__ void produce() const {
    if constexpr (loads_rows) {
      if (rows_are_aligned()) return produce_rows();
    }
    elements.produce();
  }
};

}  // namespace onepass
