// Stores f32 outputs of the ping-pong kernel: 20-bit integers become outputs of whole rows or of any columns.
#pragma once

#include "gemm/pingpong/norm.cuh"
#include "gemm/pingpong/ring.cuh"

namespace onepass::pingpong {

template <class L>
struct StoreF32 {
  using After = typename L::Tail::After;
  using Held = typename Hold<L>::Registers;
  using Format = typename Hold<L>::Format;
  using Channel = ChannelValues<After, 1>;
  static constexpr int runs = Pieces<L>::runs;

  const HeldTile<L> tile;

  __device__ __forceinline__ void run(int64 n, const Held& held, const Affine& affine) const {
    const bool in_pairs = pairs_fit<L> && reinterpret_cast<uint64>(tile.p.output) % 8 == 0;
    if constexpr (L::Numbers::store_rows) {
      put_rows(n, held, affine, in_pairs);
    } else {
      put_columns(n, held, affine, in_pairs);
    }
  }

 private:
  // Outputs of the thread's pair j of its row h; `at(i)` is held word i.
  template <class At>
  static __device__ __forceinline__ void make_pair(int j, int h, const At& at, const Affine& affine,
                                                   const Channel& channel, float (&two)[2]) {
    const int g = j / 2;
    const int values = Format::values_of(L::sums, g);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 4 * (j % 2) + 2 * h + e;
      two[e] = Norm<L>::value(Format::unpack(at(5 * g + i / 2), at(5 * g + values / 2), affine.exponent, i),
                              affine, h, channel);
    }
  }
  // Four lanes store 32 bytes of a channel; L2 merges the parts of a sector. Without a memory clobber the
  // compiler may compute the next outputs before the store.
  static __device__ __forceinline__ void store_two(uint64 to, const float (&two)[2]) {
    asm volatile("st.global.cs.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(two[0]), "f"(two[1]));
  }
  static __device__ __forceinline__ void store_one(uint64 to, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value));
  }
  // Address of the thread's row h of a sample.
  __device__ __forceinline__ uint64 output_of(int64 n, int h) const {
    return __cvta_generic_to_global(static_cast<unsigned char*>(tile.p.output)) +
           static_cast<uint64>((n * L::C::stride(0) + tile.thread.row(h) * L::C::stride(1)) * 4);
  }

  // --- Rows of the box ---
  // The last row comes first: rows are staged over its held words.
  static constexpr int row_pairs = L::Numbers::pitch / 8;
  static constexpr int staged_words = L::Numbers::row_pitch / 4;  // of a thread
  __device__ __forceinline__ void put_rows(int64 n, const Held& held, const Affine& affine,
                                           bool in_pairs) const {
    constexpr int kept = Hold<L>::in_registers + staged_words;
    typename Hold<L>::Words all;
#pragma unroll
    for (int i = 0; i < Hold<L>::words; ++i) {
      if (i < kept) all.value[i] = tile.hold.word(i, held);
    }
    const auto at = [&](int i) { return i < kept ? all.value[i] : tile.hold.word(i, held); };
    if (in_pairs) {
      put_staged<runs - 1>(n, at, affine);
    } else {
      put_unstaged<runs - 1>(n, at, affine);
    }
    __syncwarp();  // `held` has been read
  }
  // Rows from `run` down to the first, staged so that they are stored as vectors.
  template <int run, class At>
  __device__ __forceinline__ void put_staged(int64 n, const At& at, const Affine& affine) const {
    if constexpr (run >= 0) {
      using Ring = RowRing<L>;
      const int2 row = tile.s.rows[tile.thread.group * runs + run];
      const Ring ring(
          barrier::shared_address(tile.s.held_words[tile.thread.warp]),
          __cvta_generic_to_global(static_cast<unsigned char*>(tile.p.output)) + n * (L::C::stride(0) * 4),
          static_cast<uint32>(tile.thread.first_row() * static_cast<int>(L::C::stride(1)) + row.x) * 4u,
          2 * row.y, tile.thread.lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Channel channel = tile.norm.channel_values(n, h);
        const int left = L::rows % 64 == 0 ? 8 : L::rows - tile.thread.first_row() - 8 * h;  // channels
        const auto put = [&](int first, int count) {
          __syncwarp();
          // Upwards the assembler spills more: 44 bytes for 40, or 20 for 12.
#pragma unroll
          for (int j = first + count - 1; j >= first; --j) {
            float two[2];
            make_pair(run * row_pairs + j, h, at, affine, channel, two);
            ring.put(j, two[0], two[1]);
          }
          __syncwarp();
        };
        put(0, Ring::first_pairs);
        ring.template store<0>(8 * h, left);
        put(Ring::first_pairs, row_pairs - Ring::first_pairs);
        ring.template store<1>(8 * h, left);
      }
      put_staged<run - 1>(n, at, affine);
    }
  }
  // The same where the output is not on 8 bytes.
  template <int run, class At>
  __device__ __forceinline__ void put_unstaged(int64 n, const At& at, const Affine& affine) const {
    if constexpr (run >= 0) {
      const int2 row = tile.s.rows[tile.thread.group * runs + run];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Channel channel = tile.norm.channel_values(n, h);
        const uint64 to = output_of(n, h) + static_cast<uint64>((row.x + tile.thread.lane % 4 * 2) * 4);
#pragma unroll
        for (int j = 0; j < row_pairs; ++j) {
          float two[2];
          make_pair(run * row_pairs + j, h, at, affine, channel, two);
          if (4 * j + tile.thread.lane % 4 >= row.y || !L::has_row(tile.thread.row(h))) continue;
          store_one(to + 32 * j, two[0]);
          store_one(to + 32 * j + 4, two[1]);
        }
      }
      put_unstaged<run - 1>(n, at, affine);
    }
  }

  // --- Any columns, by a table of their offsets ---
  __device__ __forceinline__ void put_columns(int64 n, const Held& held, const Affine& affine,
                                              bool in_pairs) const {
    const auto at = [&](int i) { return tile.hold.word(i, held); };
    const int* const offsets = tile.s.offsets() + tile.thread.group * L::columns + 2 * (tile.thread.lane % 4);
    const Channel channel[2] = {tile.norm.channel_values(n, 0), tile.norm.channel_values(n, 1)};
    uint64 to[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to[h] = output_of(n, h);
      asm volatile("" : "+l"(to[h]));  // keeps the sum in registers instead of its terms
    }
#pragma unroll
    for (int j = 0; j < L::pairs; ++j) {
      const int offset[2] = {offsets[8 * j], offsets[8 * j + 1]};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float two[2];
        make_pair(j, h, at, affine, channel[h], two);
        if (!L::has_row(tile.thread.row(h))) continue;
        if (in_pairs) {
          if (offset[0] >= 0) store_two(to[h] + uint64{4} * static_cast<uint32>(offset[0]), two);
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (offset[e] >= 0) store_one(to[h] + uint64{4} * static_cast<uint32>(offset[e]), two[e]);
          }
        }
      }
    }
    __syncwarp();  // `held` has been read
  }
};

}  // namespace onepass::pingpong
