// How gemm_epilogue.cuh stores a tile's values: through shared memory, so that warps write whole lines, and
// of 16 bits also later, beside the products of the next tile.
#pragma once

#include "gemm/store/layout.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmEpilogueOutputs : GemmEpilogueLayout<C, Tail, Numbers> {
  using Base = GemmEpilogueLayout<C, Tail, Numbers>;
  using Base::classes;
  using Base::first_column;
  using Base::lane;
  using Base::p;
  using Base::pairs;
  using Base::row;
  using Base::rows;
  using Base::s;
  using Base::sums;
  using Base::tile_position;
  using Base::warp;
  using typename Base::Geometry;
  using typename Base::Item;
  using typename Base::Output;
  using typename Base::Shared;

  // Four neighbouring columns lie side by side in the output, at offsets that are multiples of four.
  static constexpr bool vectors_fit =
      Geometry::contiguous && Tail::spatial % 4 == 0 && C::stride(1) % 4 == 0 && C::stride(0) % 4 == 0;
  static constexpr bool channels_last = C::stride(1) == 1 && C::stride(4) != 1;

  // The tile's values to memory: eight rows by 32 columns at a time through shared memory, so that a warp
  // writes whole lines. `again`: they are read again soon.
  template <class Type, bool again>
  __device__ __forceinline__ void store(void* to, const Item& item, const float (&d)[sums]) const {
    if constexpr (Type::bytes == 2 && vectors_fit) {
      store_halves<Type>(to, item, d);
      return;
    }
    float(&stage)[8][Shared::value_pitch] = s.stage(warp);
    int in_vectors = vectors_fit && reinterpret_cast<uint64>(to) % (4 * Type::bytes) == 0;
    const int first_row = item.channel_tile * Numbers::tile_channels + row(0) - lane / 4;
    const int first_position = tile_position(item) + first_column();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_row + 8 * h;
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(channel);
#pragma unroll
      for (int j = 0; j < pairs; j += 4) {
        constexpr int all = 32;
        const int columns = (pairs - j) * 8 < all ? (pairs - j) * 8 : all;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < columns / 8; ++k) {
          *reinterpret_cast<float2*>(&stage[lane / 4][8 * k + 2 * (lane % 4)]) =
              float2{d[(j + k) * 4 + h * 2], d[(j + k) * 4 + h * 2 + 1]};
        }
        __syncwarp();
        // Asked again each time: two loops would keep all values of both in registers.
        asm volatile("" : "+r"(in_vectors));
        if (vectors_fit && in_vectors) {
          const int column = lane % 8 * 4;
          const int position = first_position + j * 8 + column;
          const bool has = position < Geometry::positions && column < columns;
#pragma unroll
          for (int r = lane / 8; r < 8; r += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&stage[r][column]);
            if (has && exists(channel + r)) {
              const float value[4] = {four.x, four.y, four.z, four.w};
              Packed<Type, 4> packed;
              packed.pack(value);
              put<Type, again>(to, begin + r * C::stride(1) + position, packed);
            }
          }
        } else {
          store_ones<Type>(to, channel, begin, first_position, j);
        }
      }
    }
  }
  // --- Values that leave beside products ---
  // A warp has all columns of its 16 rows. When a tile of 16-bit values ends, the first vectors of each row,
  // as many as there is room for, stay in shared memory and the others in registers. They go to memory 32 at
  // a time while the next tile is multiplied, those of registers through shared memory when it is free.
  static constexpr int late_vectors = Numbers::late_vectors;
  static constexpr int kept_vectors = late_vectors > 0 ? pairs - late_vectors : 0;
  static constexpr int late_steps = late_vectors / 2;  // 16 rows by 32 lanes
  static constexpr int all_steps = late_steps + (kept_vectors + 1) / 2;
  static_assert(late_vectors % 2 == 0 && kept_vectors <= late_vectors);

  struct Leaving {
    unsigned char* to = nullptr;  // of the first row
    int bytes = 0;                // of a row that has outputs
    int rows = 0;                 // that exist
    int step = all_steps;
    uint32 kept[2 * kept_vectors + 1];
  };

  __device__ __forceinline__ bool leaves_late() const {
    return late_vectors > 0 && reinterpret_cast<uint64>(p.output) % 16 == 0;
  }

  // By a warp: step `i` of a part of the rows, `vectors` of each.
  template <int vectors>
  __device__ __forceinline__ void put_vectors(const Leaving& leaving, int i) const {
    const int v = i * 32 + lane;
    const int r = v / vectors;
    const int column = (v - r * vectors) * 16;
    if (r < leaving.rows && column < leaving.bytes && (vectors % 2 == 0 || r < 16)) {
      const uint4 vector = *reinterpret_cast<const uint4*>(s.values[warp] + r * Numbers::late_pitch + column);
      __stcs(reinterpret_cast<uint4*>(leaving.to + r * (C::stride(1) * Output::bytes) + column), vector);
    }
  }
  // By a warp: the next step.
  __device__ __forceinline__ void put_some(Leaving& leaving) const {
    if (leaving.step >= all_steps) return;
    if (leaving.step < late_steps) {
      put_vectors<late_vectors>(leaving, leaving.step);
    } else if constexpr (kept_vectors > 0) {
      if (leaving.step == late_steps) {
        __syncwarp();
        put_words<kept_vectors>([&](int j, int h) { return leaving.kept[2 * j + h]; });
        leaving.to += late_vectors * 16;
        leaving.bytes -= late_vectors * 16;
      }
      put_vectors<kept_vectors>(leaving, leaving.step - late_steps);
    }
    ++leaving.step;
  }
  // By a warp: what lies in shared memory may be overwritten.
  __device__ __forceinline__ void put_rest(Leaving& leaving) const {
#pragma unroll 1
    while (leaving.step < all_steps) put_some(leaving);
    __syncwarp();
  }

  // `vectors` of the warp's rows to shared memory. `word(j, h)`: two neighbours of vector j in the thread's
  // row h.
  template <int vectors, class Word>
  __device__ __forceinline__ void put_words(Word&& word) const {
    // Rows begin in different banks if the vectors of a row are odd in number; if only their half is, the
    // last four rows take two vectors the other way round.
    constexpr int row_vectors = Numbers::late_pitch / 16;
    constexpr bool in_turn = row_vectors % 2 == 0;
    static_assert(row_vectors % 4 != 0);
    const int late = in_turn ? lane / 16 : 0;
    unsigned char* const own = s.values[warp] + lane / 4 * Numbers::late_pitch + lane % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < vectors; j += in_turn ? 2 : 1) {
        unsigned char* const place = own + h * 8 * Numbers::late_pitch + j * 16;
        const uint32 first = word(j, h);
        if (in_turn && j + 1 < vectors) {
          const uint32 second = word(j + 1, h);
          *reinterpret_cast<uint32*>(place + late * 16) = late ? second : first;
          *reinterpret_cast<uint32*>(place + 16 - late * 16) = late ? first : second;
        } else {
          *reinterpret_cast<uint32*>(place) = first;
        }
      }
    }
    __syncwarp();
  }

  // The tile's values, for later.
  __device__ __forceinline__ void keep(const Item& item, const float (&d)[sums], Leaving& leaving) const {
    const int first_row = item.channel_tile * Numbers::tile_channels + row(0) - lane / 4;
    const int first_position = tile_position(item) + first_column();
    leaving.to = static_cast<unsigned char*>(p.output) +
                 (output_origin<C>(item.n) + first_row * C::stride(1) + first_position) * Output::bytes;
    leaving.bytes = (Geometry::positions - first_position) * Output::bytes;
    leaving.rows = rows - first_row;
    leaving.step = 0;
    const auto word = [&](int j, int h) { return Output::pack(d[j * 4 + h * 2], d[j * 4 + h * 2 + 1]); };
    put_words<late_vectors>(word);
#pragma unroll
    for (int j = 0; j < kept_vectors; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) leaving.kept[2 * j + h] = word(late_vectors + j, h);
    }
  }

  // The same of 16-bit elements that lie side by side: 64 columns at a time.
  template <class Type>
  __device__ __forceinline__ void store_halves(void* to, const Item& item, const float (&d)[sums]) const {
    constexpr bool by_eights = Tail::spatial % 8 == 0 && C::stride(1) % 8 == 0 && C::stride(0) % 8 == 0;
    constexpr int width = by_eights ? 8 : 4;  // of a lane's vector
    constexpr int lanes = 64 / width;         // that have a row
    constexpr int pitch = 64 + 8;             // words of eight rows lie in different banks
    static_assert(Shared::value_bytes >= 8 * pitch * 2);
    auto* const stage = reinterpret_cast<uint16*>(s.values[warp]);
    int in_vectors = reinterpret_cast<uint64>(to) % (width * 2) == 0;
    const int first_row = item.channel_tile * Numbers::tile_channels + row(0) - lane / 4;
    const int first_position = tile_position(item) + first_column();
    const int column = lane % lanes * width;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_row + 8 * h;
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(channel);
#pragma unroll
      for (int j = 0; j < pairs; j += 8) {
        asm volatile("" : "+r"(in_vectors));
        if (in_vectors) {
          __syncwarp();
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            if (j + k >= pairs) break;
            *reinterpret_cast<uint32*>(stage + lane / 4 * pitch + 8 * k + 2 * (lane % 4)) =
                Type::pack(d[(j + k) * 4 + h * 2], d[(j + k) * 4 + h * 2 + 1]);
          }
          __syncwarp();
          const int position = first_position + j * 8 + column;
          const bool has = position < Geometry::positions && j * 8 + column < Numbers::columns;
#pragma unroll
          for (int r = 0; r < 8; r += 32 / lanes) {
            const int own = r + lane / lanes;
            Packed<Type, width> some;
            some.load(stage + own * pitch, column, true);
            if (has && exists(channel + own)) some.store(to, begin + own * C::stride(1) + position, true);
          }
        } else {
#pragma unroll
          for (int i = j; i < j + 8; i += 4) {
            if (i >= pairs) break;
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (i + k >= pairs) break;
              *reinterpret_cast<float2*>(&s.stage(warp)[lane / 4][8 * k + 2 * (lane % 4)]) =
                  float2{d[(i + k) * 4 + h * 2], d[(i + k) * 4 + h * 2 + 1]};
            }
            __syncwarp();
            store_ones<Type>(to, channel, begin, first_position, i);
          }
        }
      }
    }
  }
  // What lies in shared memory, one by one. A lane has a column; where channels are neighbours a row; where
  // classes are, those of a column.
  template <class Type>
  __device__ __forceinline__ void store_ones(void* to, int channel, int64 begin, int first_position,
                                             int j) const {
    const int columns = (pairs - j) * 8 < 32 ? (pairs - j) * 8 : 32;
    constexpr int side_by_side = 8 % C::classes(2) == 0 ? static_cast<int>(C::classes(2)) : 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int of_rows = (i * 32 + lane) % (32 * side_by_side);
      const int column = channels_last ? lane / 8 + 4 * i : of_rows / side_by_side;
      const int r = channels_last ? lane % 8 : i / side_by_side * side_by_side + of_rows % side_by_side;
      int offset;
      if constexpr (Geometry::contiguous) {
        offset = first_position + j * 8 + column;
        if (offset >= Geometry::positions) offset = -1;
      } else {
        offset = column < columns ? s.offsets[first_column() + j * 8 + column] : -1;
      }
      const float value = s.stage(warp)[r][column];
      if (offset >= 0 && column < columns && exists(channel + r))
        store_one<Type>(to, first_of(channel, begin, r) + offset, value);
    }
  }
  // Where the r-th row after one that begins at `begin` does.
  static __device__ __forceinline__ int64 first_of(int row, int64 begin, int r) {
    if constexpr (classes == 1) return begin + r * C::stride(1);
    return begin - Geometry::row_offset(row) + Geometry::row_offset(row + r);
  }
  static __device__ __forceinline__ bool exists(int row) {
    return rows % Numbers::tile_channels == 0 || row < rows;
  }
  template <class Type, bool again>
  static __device__ __forceinline__ void put(void* to, int64 index, const Packed<Type, 4>& four) {
    if constexpr (again) {
      __stcg(reinterpret_cast<uint4*>(static_cast<float*>(to) + index),
             uint4{four.word[0], four.word[1], four.word[2], four.word[3]});
    } else {
      four.store(to, index, true);
    }
  }
};

}  // namespace onepass
