// Staging of banded.cuh: the input's window in shared memory, planes of channels, with zeros outside the
// input.
#pragma once

#include "direct/banded/types.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct BandedTypes<C, Tail, N>::Window {
  const Parameters& p;
  uint16* window;

  static constexpr auto size_x = static_cast<int>(C::input_size(2));
  static constexpr int staged_channels = N::groups * N::inputs;

  // A chunk of a row, of one channel or of neighbours in memory.
  struct Piece {
    int index;  // of its first element in the sample
    int x;
    int place;
    bool in_range;

    template <int Channels>
    __device__ __forceinline__ void find(const Tile& tile, const int (&origin)[3], int first_input, int i) {
      Parts parts{static_cast<unsigned>(i)};
      int channel = 0;
      if constexpr (N::input_interleaved) channel = parts.take(staged_channels / Channels) * Channels;
      const int first = parts.take(N::window_chunks) * chunk;
      const int y = parts.take(N::window_size_y);
      const int z = parts.take(N::window_size_z);
      if constexpr (!N::input_interleaved) channel = static_cast<int>(parts.rest);
      const int g = channel / N::inputs;
      const int c = channel % N::inputs;
      const int at[2] = {origin[0] + z, origin[1] + y};
      x = origin[2] + first;
      in_range = static_cast<unsigned>(at[0]) < static_cast<unsigned>(C::input_size(0)) &&
                 static_cast<unsigned>(at[1]) < static_cast<unsigned>(C::input_size(1)) &&
                 tile.group + g < C::groups && first_input + c < C::in_channels;
      // Outside the input it may wrap around.
      const auto along = [](int at_d, int d) {
        return static_cast<unsigned>(at_d) * static_cast<unsigned>(C::input_stride(d));
      };
      index =
          static_cast<int>(along((tile.group + g) * static_cast<int>(C::in_channels) + first_input + c, 1) +
                           along(at[0], 2) + along(at[1], 3) + along(x, 4));
      place = g * N::window_g + c * N::window_c + z * N::window_z + y * N::window_y + first;
    }
  };

  static __device__ __forceinline__ uint32 pair(uint32 low, uint32 high, uint32 selector) {
    return __byte_perm(low, high, selector);
  }

  __device__ __forceinline__ void put(const uint32 (&word)[4], int place) const {
    *reinterpret_cast<uint4*>(window + place) = make_uint4(word[0], word[1], word[2], word[3]);
  }

  // Channels lie side by side: a thread turns eight positions of `Channels` of them.
  template <int Channels>
  __device__ __forceinline__ void stage_interleaved(const Tile& tile, int first_input) const {
    constexpr int count = staged_channels / Channels * N::window_chunks * N::window_size_y * N::window_size_z;
    constexpr int together = Channels >= 4 ? 1 : 4 / Channels;
    const int origin[3] = {tile.origin(0), tile.origin(1), tile.origin(2)};
    const auto* const sample = static_cast<const uint16*>(p.input) + tile.n * C::input_stride(0);
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x); first < count; first += N::threads * together) {
      Packed<Input, Channels> x[together][chunk];
      int place[together];
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const int i = first + u * N::threads;
        Piece own;
        own.template find<Channels>(tile, origin, first_input, i);
        place[u] = i < count ? own.place : -1;
#pragma unroll
        for (int k = 0; k < chunk; ++k) {
#pragma unroll
          for (uint32& word : x[u][k].word) word = 0;
          if (i < count && own.in_range && static_cast<unsigned>(own.x + k) < static_cast<unsigned>(size_x))
            x[u][k].load(sample, own.index + k * static_cast<int>(C::input_stride(4)), true);
        }
      }
#pragma unroll
      for (int u = 0; u < together; ++u) {
        if (place[u] < 0) break;
#pragma unroll
        for (int e = 0; e < Channels; ++e) {
          uint32 word[4];
#pragma unroll
          for (int k = 0; k < 4; ++k)
            word[k] =
                pair(x[u][2 * k].word[e / 2], x[u][2 * k + 1].word[e / 2], e % 2 == 0 ? 0x5410 : 0x7632);
          put(word, place[u] + (N::inputs % Channels == 0
                                    ? e * N::window_c
                                    : e / N::inputs * N::window_g + e % N::inputs * N::window_c));
        }
      }
    }
  }

  // Rows lie along x. A chunk begins anywhere: it is cut from the two vectors of memory that have it, or
  // taken by elements at the ends of rows and samples.
  struct Chunk {
    uint32 word[8];
    int shift;  // of bytes, -1: `word` has an element each

    template <int Shift>
    __device__ __forceinline__ void load(const uint16* sample, const Piece& own) {
#pragma unroll
      for (uint32& of_two : word) of_two = 0;
      shift = -1;
      if (!own.in_range) return;
      if (C::input_stride(4) == 1 && size_x >= chunk && static_cast<unsigned>(own.x) <= size_x - chunk &&
          own.index >= chunk && own.index <= N::sample_elements - 2 * chunk) {
        const auto address = reinterpret_cast<uint64>(sample + own.index);
        shift = Shift >= 0 ? Shift : static_cast<int>(address % 16);
        const auto* const from = reinterpret_cast<const uint4*>(address - static_cast<uint64>(shift));
        const uint4 low = from[0];
        word[0] = low.x, word[1] = low.y, word[2] = low.z, word[3] = low.w;
        if (Shift >= 0 ? Shift > 0 : shift > 0) {
          const uint4 high = from[1];
          word[4] = high.x, word[5] = high.y, word[6] = high.z, word[7] = high.w;
        }
      } else {
#pragma unroll
        for (int k = 0; k < chunk; ++k) {
          if (static_cast<unsigned>(own.x + k) < static_cast<unsigned>(size_x))
            word[k] = sample[own.index + k * static_cast<int>(C::input_stride(4))];
        }
      }
    }

    template <int Shift>
    __device__ __forceinline__ void cut(uint32 (&to)[4]) const {
      const int by = Shift >= 0 ? Shift : shift;
      if (shift < 0) {
#pragma unroll
        for (int k = 0; k < 4; ++k) to[k] = pair(word[2 * k], word[2 * k + 1], 0x5410);
        return;
      }
      cut_vector(word, by, to);
    }
  };

  // `Shift`: of all chunks that lie in a row and begin with a segment; -1 where rows begin anywhere.
  template <int Shift>
  __device__ __forceinline__ void stage_planar(const Tile& tile, int first_input) const {
    constexpr int count = staged_channels * N::window_chunks * N::window_size_y * N::window_size_z;
    constexpr int together = 4;
    const int origin[3] = {tile.origin(0), tile.origin(1), tile.origin(2)};
    const auto* const sample = static_cast<const uint16*>(p.input) + tile.n * C::input_stride(0);
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x); first < count; first += N::threads * together) {
      Chunk x[together];
      int place[together];
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const int i = first + u * N::threads;
        Piece own;
        own.template find<1>(tile, origin, first_input, i);
        own.in_range &= i < count;
        place[u] = i < count ? own.place : -1;
        x[u].template load<Shift>(sample, own);
      }
#pragma unroll
      for (int u = 0; u < together; ++u) {
        if (place[u] < 0) break;
        uint32 word[4];
        x[u].template cut<Shift>(word);
        put(word, place[u]);
      }
    }
  }

  __device__ __forceinline__ void stage(const Tile& tile, int first_input) const {
    const auto address = reinterpret_cast<uint64>(p.input);
    if constexpr (N::input_interleaved) {
      if (N::input_vector > 1 && address % (2 * N::input_vector) == 0) {
        stage_interleaved<N::input_vector>(tile, first_input);
      } else {
        stage_interleaved<1>(tile, first_input);
      }
    } else {
      if (N::shift >= 0 && address % 16 == 0) {
        stage_planar<N::shift>(tile, first_input);
      } else {
        stage_planar<-1>(tile, first_input);
      }
    }
  }
};

}  // namespace onepass
