// The end of banded.cuh: sums pass through the chain in registers, wait in shared memory in the output's
// type, channel by channel, and leave in vectors along x or, where channels lie side by side, across them.
#pragma once

#include "direct/banded/types.cuh"
#include "direct/narrow/results.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct BandedTypes<C, Tail, N>::Store {
  using Output = typename Narrow::Output;
  using After = typename Narrow::After;
  using Bits = ElementBits<Output>;
  using ResultChannel = typename Narrow::ResultChannel;

  static constexpr int vector = 16 / Output::bytes;
  // Stands for a value that is to be computed again; one of a chain may be the same, and is then too.
  static constexpr auto lost = static_cast<Bits>(~uint32{1});

  const Parameters& p;
  Bits* kept;  // shared

  static __device__ __forceinline__ Bits convert(float value) {
    if constexpr (Output::bytes == 4) {
      return __float_as_uint(value);
    } else {
      return static_cast<Bits>(Output::pack(value, 0.0f));
    }
  }

  // What a channel's values need besides the sum.
  struct Channel {
    float bias = 0.0f;
    ChannelValues<After, 1> operands;

    __device__ __forceinline__ void load(const Parameters& p, int64 n, const ResultChannel& at) {
      if (!at.in_range) return;
      if constexpr (C::has_bias) bias = load_one<typename C::Bias>(p.parameter[1], at.channel);
      operands.load(p, n, at.channel);
    }
    __device__ __forceinline__ float value(float sum) const {
      return After::value(sum + bias, operands.value[0], typename After::template Tensors<1>{}, 0);
    }
  };

  // Neighbours along x.
  template <int Count>
  static __device__ __forceinline__ void put(Bits* to, const float (&value)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i += 2) {
      if constexpr (Output::bytes == 4) {
        *reinterpret_cast<float2*>(to + i) = make_float2(value[i], value[i + 1]);
      } else {
        *reinterpret_cast<uint32*>(to + i) = Output::pack(value[i], value[i + 1]);
      }
    }
  }

  // Calls act(channel of the item, place, sums) for the lane's pairs of columns: 2 (lane % 4) and the next
  // one of rows lane / 4 and 8 behind.
  template <class Act>
  static __device__ __forceinline__ void for_each_pair(const Item& item, const Sums& sums, const Act& act) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int channel = item.group * Narrow::group_outputs + item.output;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Segment segment(item.first + lane / 4 + 8 * h);
      if (!segment.in_range) continue;
      const int first = channel * N::result_c + segment.at[0] * N::result_z + segment.at[1] * N::result_y +
                        (segment.at[2] + 2 * (lane % 4)) * x_classes;
#pragma unroll
      for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
        for (int q = 0; q < N::rows; ++q) {
          float sum[2 * x_classes];
#pragma unroll
          for (int i = 0; i < 2 * x_classes; ++i)
            sum[i] = sums.at[o][q][i % x_classes][2 * h + i / x_classes];
          act(o, first + o * N::result_c + q * N::result_y, sum);
        }
      }
    }
  }

  // False where a sum is not finite; such ones are marked.
  __device__ __forceinline__ bool keep(const Tile& tile, const Item& item, const Sums& sums) const {
    constexpr int count = 2 * x_classes;
    Channel channels[N::outputs];
#pragma unroll
    for (int o = 0; o < N::outputs; ++o)
      channels[o].load(p, tile.n, ResultChannel(tile, item.group * Narrow::group_outputs + item.output + o));
    float zero = 0.0f;
    for_each_pair(item, sums, [&](int o, int place, const float(&sum)[count]) {
      float value[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        zero = fmaf(sum[i], 0.0f, zero);
        value[i] = channels[o].value(sum[i]);
      }
      put(kept + place, value);
    });
    if (zero == 0.0f) return true;
    for_each_pair(item, sums, [&](int, int place, const float(&sum)[count]) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (!(fabsf(sum[i]) <= Narrow::largest_float)) kept[place + i] = lost;
      }
    });
    return false;
  }

  // Those that are marked, one by one: zeros of the band and outside the input meet nothing.
  __device__ void keep_careful(const Tile& tile) const {
    constexpr int count = Narrow::channels * Narrow::box[0] * Narrow::box[1] * Narrow::box_outputs;
    const Results sums{p, nullptr};
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
      Parts parts{static_cast<unsigned>(i)};
      const int x = parts.take(Narrow::box_outputs);
      const int y = parts.take(Narrow::box[1]);
      const int z = parts.take(Narrow::box[0]);
      const auto own = static_cast<int>(parts.rest);
      Bits& result = kept[own * N::result_c + z * N::result_z + y * N::result_y + x];
      const ResultChannel at(tile, own);
      if (result != lost || !at.in_range) continue;
      const int r[3] = {tile.r[0], tile.r[1], x % x_classes};
      const int cell[3] = {tile.cell[0] + z, tile.cell[1] + y, tile.cell[2] + x / x_classes};
      Channel channel;
      channel.load(p, tile.n, at);
      result = convert(channel.value(sums.careful_sum(tile.n, at.channel, r, cell)));
    }
  }

  // Where a row of the tile lies.
  struct Row {
    int64 index;  // in the output, of its first element
    int place;
    bool in_range;

    __device__ __forceinline__ Row(const Tile& tile, Parts parts, int channel) {
      const int y = parts.take(Narrow::box[1]);
      const int z = parts.take(Narrow::box[0]);
      if constexpr (!N::output_interleaved) channel = static_cast<int>(parts.rest);
      const ResultChannel at(tile, channel);
      const int out_y = tile.r[1] + static_cast<int>(C::classes(1)) * (tile.cell[1] + y);
      const int out_z = tile.r[0] + static_cast<int>(C::classes(0)) * (tile.cell[0] + z);
      in_range = at.in_range && out_y < C::output_size(1) && out_z < C::output_size(0);
      index = tile.n * C::stride(0) + at.channel * C::stride(1) + out_z * C::stride(2) +
              out_y * C::stride(3) + tile.cell[2] * x_classes * C::stride(4);
      place = channel * N::result_c + z * N::result_z + y * N::result_y;
    }
  };

  // Of the tile's rows, the part inside the output.
  static __device__ __forceinline__ int length(const Tile& tile) {
    const auto left = static_cast<int>(C::output_size(2)) - tile.cell[2] * x_classes;
    return left < Narrow::box_outputs ? left : Narrow::box_outputs;
  }

  __device__ __forceinline__ void load(int place, uint32 (&word)[8], int at) const {
    const uint4 v = *reinterpret_cast<const uint4*>(kept + place);
    word[at] = v.x, word[at + 1] = v.y, word[at + 2] = v.z, word[at + 3] = v.w;
  }

  // Vectors of the output's own 16 bytes, cut from the two of shared memory that have them; elements where a
  // row begins and ends.
  template <bool Aligned>
  __device__ __forceinline__ void store_planar(const Tile& tile) const {
    constexpr int vectors = Narrow::box_outputs / vector + (Aligned ? 0 : 1);
    constexpr int count = vectors * Narrow::box[1] * Narrow::box[0] * Narrow::channels;
    const int size = length(tile);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
      Parts parts{static_cast<unsigned>(i)};
      const int own = parts.take(vectors) * vector;
      const Row row(tile, parts, 0);
      if (!row.in_range) continue;
      Bits* const to = static_cast<Bits*>(p.output) + row.index;
      const int before = Aligned ? 0 : static_cast<int>(reinterpret_cast<uint64>(to) % 16) / Output::bytes;
      const int first = own - before;
      if (C::stride(4) == 1 && first >= 0 && first + vector <= size) {
        uint32 word[8], cut[4];
        const int behind = Aligned ? 0 : (vector - before) % vector;
        load(row.place + first - behind, word, 0);
        if (behind > 0) load(row.place + first - behind + vector, word, 4);
        cut_vector(word, behind * Output::bytes, cut);
        __stcs(reinterpret_cast<uint4*>(to + first), make_uint4(cut[0], cut[1], cut[2], cut[3]));
      } else {
#pragma unroll
        for (int k = 0; k < vector; ++k) {
          if (first + k >= 0 && first + k < size)
            to[(first + k) * C::stride(4)] = kept[row.place + first + k];
        }
      }
    }
  }

  // A thread turns a vector along x of each of `Channels` neighbours.
  template <int Channels>
  __device__ __forceinline__ void store_interleaved(const Tile& tile) const {
    constexpr int vectors = Narrow::box_outputs / vector;
    constexpr int count = Narrow::channels / Channels * vectors * Narrow::box[1] * Narrow::box[0];
    const int size = length(tile);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
      Parts parts{static_cast<unsigned>(i)};
      const int channel = parts.take(Narrow::channels / Channels) * Channels;
      const int first = parts.take(vectors) * vector;
      const Row row(tile, parts, channel);
      if (!row.in_range || first >= size) continue;
      uint32 word[Channels][4];
#pragma unroll
      for (int e = 0; e < Channels; ++e) {
        const uint4 v = *reinterpret_cast<const uint4*>(kept + row.place + e * N::result_c + first);
        word[e][0] = v.x, word[e][1] = v.y, word[e][2] = v.z, word[e][3] = v.w;
      }
#pragma unroll
      for (int k = 0; k < vector; ++k) {
        if (first + k >= size) break;
        Packed<Output, Channels> packed;
        if constexpr (Output::bytes == 4) {
#pragma unroll
          for (int e = 0; e < Channels; ++e) packed.word[e] = word[e][k];
        } else {
          const uint32 selector = k % 2 == 0 ? 0x5410 : 0x7632;
#pragma unroll
          for (int e = 0; e < Channels; e += 2)
            packed.word[e / 2] =
                __byte_perm(word[e][k / 2], word[e + 1 < Channels ? e + 1 : e][k / 2], selector);
        }
        packed.store(p.output, row.index + (first + k) * C::stride(4), true);
      }
    }
  }

  __device__ __forceinline__ void store(const Tile& tile) const {
    const auto address = reinterpret_cast<uint64>(p.output);
    if constexpr (N::output_interleaved) {
      if (N::output_vector > 1 && address % (Output::bytes * N::output_vector) == 0) {
        store_interleaved<N::output_vector>(tile);
      } else {
        store_interleaved<1>(tile);
      }
    } else {
      if (N::rows_aligned && address % 16 == 0) {
        store_planar<true>(tile);
      } else {
        store_planar<false>(tile);
      }
    }
  }
};

// The same where the chain reads tensors: sums wait as f32, and narrow's end loads the tensors in rows.
template <class C, class Tail, class N>
struct BandedTypes<C, Tail, N>::LateStore {
  const Parameters& p;
  float* kept;  // shared

  __device__ __forceinline__ Results results() const { return {p, kept}; }

  __device__ __forceinline__ bool keep(const Tile& tile, const Item& item, const Sums& sums) const {
    constexpr int count = 2 * x_classes;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int channel = item.group * Narrow::group_outputs + item.output;
    float zero = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Segment segment(item.first + lane / 4 + 8 * h);
      if (!segment.in_range) continue;
      float* const to = kept + channel * N::result_c + segment.at[0] * N::result_z +
                        segment.at[1] * N::result_y +
                        (segment.at[2] + 2 * (lane % 4)) * x_classes * N::result_x;
#pragma unroll
      for (int o = 0; o < N::outputs; ++o) {
        const typename Narrow::ResultChannel at(tile, channel + o);
        const float bias = at.in_range ? results().bias(at.channel) : 0.0f;
#pragma unroll
        for (int q = 0; q < N::rows; ++q) {
#pragma unroll
          for (int i = 0; i < count; ++i) {
            const float value = sums.at[o][q][i % x_classes][2 * h + i / x_classes] + bias;
            zero = fmaf(value, 0.0f, zero);
            to[o * N::result_c + q * N::result_y + i * N::result_x] = value;
          }
        }
      }
    }
    return zero == 0.0f;
  }
  __device__ void keep_careful(const Tile& tile) const { results().template keep_careful<true>(tile); }
  __device__ __forceinline__ void store(const Tile& tile) const { results().store(tile); }
};

}  // namespace onepass
