// What the tiles of tail/streamed.cuh leave in memory for the block that finishes a unit.
//
// Planar: the moments of each row's pieces. Interleaved: those of a part, some channels of one slab at a
// tile's positions, so that a slab of many channels has few of them; and a sum, or a mean, of each channel,
// with channels as neighbours.
#pragma once

#include "tail/tail.cuh"

namespace onepass {

template <class Tail, class Numbers, class Walk>
struct TileParts {
  static constexpr int floats = 4;  // count, mean, M2, what the mean has no bits for
  static constexpr int part_channels = Numbers::part_channels;
  static_assert(Tail::group_channels % part_channels == 0);

  float* parts;
  float* row_sums;
  float* scratch;  // of the block

  // Where the sums of a row's piece lie.
  static __device__ __forceinline__ int64 place_of_sum(int64 row_index, int piece) {
    if constexpr (Numbers::interleaved) {
      const int64 unit = row_index / Walk::rows_of_unit;
      return row_index + (unit * (Walk::pieces - 1) + piece) * Walk::rows_of_unit;
    } else {
      return row_index * Walk::pieces + piece;
    }
  }

  // `part_index`: of all parts of the tensor, as rows are counted.
  __device__ __forceinline__ void store(int64 part_index, int piece, const ExactMoments& own) const {
    float* part = parts + (part_index * Walk::pieces + piece) * floats;
    part[0] = own.count;
    part[1] = own.mean;
    part[2] = own.m2;
    part[3] = own.low;
  }

  // Interleaved: a part's moments come together from those of all threads that have its channels.
  template <int team, int Rows>
  __device__ __forceinline__ void leave_joined(const ExactMoments& own, int64 row_index, int piece) const {
    constexpr int threads = Numbers::threads;
    constexpr int columns = part_channels / Rows;  // of a part
    __syncthreads();
    scratch[threadIdx.x] = own.count;
    scratch[threads + threadIdx.x] = own.mean;
    scratch[2 * threads + threadIdx.x] = own.m2;
    scratch[3 * threads + threadIdx.x] = own.low;
    __syncthreads();
    merge_parts<team * Rows, columns*(threads / team), threads>(
        first_row<team, Rows>(row_index), piece,
        [](int part, int i) { return i / columns * team + part * columns + i % columns; });
  }

  // The same where channels of a vector are several slabs', or their means are wanted.
  template <int team, int Rows, class Sums>
  __device__ __forceinline__ void leave_rows(const Sums& sums, int64 row_index, int piece,
                                             bool in_range) const {
    using Split = ColumnSplit<Numbers, team>;
    constexpr int values = Rows * Split::holders * team;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      // Of a warp's lanes: the mean first, as its distance from that of the first one, then every lane's
      // M2 moved to it.
      const ExactMoments own = sums.moments(r);
      const float count = Split::warp_sum(own.count);
      const float from = __shfl_sync(0xffffffffu, own.mean, threadIdx.x % (team < 32 ? team : 32));
      const float distance = own.distance(from);
      const float moved =
          Split::warp_sum(own.count * distance) * (count > 0.0f ? pointwise::reciprocal_fast(count) : 0.0f);
      const float m2 = Split::warp_sum(fmaf(own.count * (distance - moved), distance - moved, own.m2));
      if (Split::holds()) {
        const int place = Split::place(r, Split::holder());
        float low;
        const float mean = sum_and_rest(from, moved, low);
        scratch[place] = count;
        scratch[values + place] = team < 32 ? mean : own.mean;
        scratch[2 * values + place] = team < 32 ? m2 : own.m2;
        scratch[3 * values + place] = team < 32 ? low : own.low;
      }
    }
    __syncthreads();
    if (in_range) {
      Split::template for_each_row<Rows>([&](int, int r) {
        ExactMoments all;
#pragma unroll
        for (int holder = 0; holder < Split::holders; ++holder)
          merge_from<values>(all, Split::place(r, holder));
        if constexpr (Tail::mean_follows_norm) row_sums[place_of_sum(row_index + r, piece)] = all.mean;
        if constexpr (part_channels == 1) {
          store(row_index + r, piece, all);
        } else {
          // This thread alone has read the row's places.
          const int place = Split::place(r, 0);
          scratch[place] = all.count;
          scratch[values + place] = all.mean;
          scratch[2 * values + place] = all.m2;
          scratch[3 * values + place] = all.low;
        }
      });
    }
    if constexpr (part_channels > 1) {
      __syncthreads();
      merge_parts<team * Rows, part_channels, values>(
          first_row<team, Rows>(row_index), piece, [](int part, int i) {
            const int channel = part * part_channels + i;
            return channel % Rows * Split::holders * team + channel / Rows;
          });
    }
  }

  // The row of column 0, whether or not this thread's own exists.
  template <int team, int Rows>
  static __device__ __forceinline__ int64 first_row(int64 row_index) {
    return row_index - static_cast<int>(threadIdx.x % team) * Rows;
  }

  // Takes in moments of scratch, whose four arrays have `Distance` places each.
  template <int Distance>
  __device__ __forceinline__ void merge_from(ExactMoments& all, int place) const {
    if (scratch[place] > 0.0f) {
      all.merge({scratch[place], scratch[Distance + place], scratch[2 * Distance + place],
                 scratch[3 * Distance + place]});
    }
  }

  // Stores the parts of `Channels` channels, each merged by some lanes from the `Entries` moments that
  // place(part, entry) finds. Those of channels that the strip does not have are left out.
  template <int Channels, int Entries, int Distance, class Place>
  __device__ __forceinline__ void merge_parts(int64 first_row, int piece, Place&& place) const {
    constexpr int lanes = lanes_for(Entries);
    constexpr int count = Channels / part_channels;
    const int left = Walk::rows_of_unit - static_cast<int>(first_row % Walk::rows_of_unit);
    const int lane = threadIdx.x % lanes;
#pragma unroll 1
    for (int first = 0; first < count; first += Numbers::threads / lanes) {
      const int part = first + static_cast<int>(threadIdx.x) / lanes;
      const bool exists = part < count && part * part_channels < left;
      ExactMoments own;
      if (exists) {
#pragma unroll 4
        for (int i = lane; i < Entries; i += lanes) merge_from<Distance>(own, place(part, i));
      }
      ExactMoments all;
      all.count = lanes_sum<lanes>(own.count);
      team_moments<lanes, Numbers::threads>(own, all.count, scratch, all.mean, all.low, all.m2);
      if (exists && lane == 0) store(first_row / part_channels + part, piece, all);
    }
  }

  // Interleaved: what the pieces of a unit left for its channels in the sums, added up in the same order
  // every time, in vectors over channels and lanes over pieces. give(channel, total); of means the distance
  // from that of the first piece, once for each position.
  template <bool means, class Give>
  __device__ __forceinline__ void sum_pieces(int64 unit, Give&& give) const {
    constexpr int channels = Walk::rows_of_unit;
    constexpr int width = channels % 4 == 0 ? 4 : 1;
    constexpr int columns = channels / width < Numbers::threads ? channels / width : Numbers::threads;
    constexpr int lanes = Numbers::threads / columns;
    constexpr float of_last =
        static_cast<float>(Tail::spatial - (Walk::pieces - 1) * Numbers::piece_positions);
    const float* sums = row_sums + unit * Walk::pieces * channels;
    const int column = threadIdx.x % columns;
    const int lane = threadIdx.x / columns;
#pragma unroll 1
    for (int first = 0; first < channels; first += columns * width) {
      const int c = first + column * width;
      double total[width] = {};
      if (c < channels && lane < lanes) {
        float pivot[width] = {};
        if constexpr (means) load_sums(sums + c, pivot);
          // 16 vectors in flight: one block reads some 300 KB here, and others wait for it or are done.
#pragma unroll 16
        for (int piece = lane; piece < Walk::pieces; piece += lanes) {
          float value[width];
          load_sums(sums + static_cast<int64>(piece) * channels + c, value);
          const float count =
              piece < Walk::pieces - 1 ? static_cast<float>(Numbers::piece_positions) : of_last;
#pragma unroll
          for (int k = 0; k < width; ++k)
            total[k] += means ? count * distance_from(value[k], pivot[k]) : value[k];
        }
      }
      if constexpr (lanes == 1) {
#pragma unroll
        for (int k = 0; k < width; ++k) {
          if (c < channels) give(c + k, total[k]);
        }
      } else {  // all channels at once
        __syncthreads();
        if (lane < lanes) {
#pragma unroll
          for (int k = 0; k < width; ++k) scratch[lane * channels + c + k] = static_cast<float>(total[k]);
        }
        __syncthreads();
        for (int channel = threadIdx.x; channel < channels; channel += Numbers::threads) {
          double all = 0.0;
#pragma unroll 8
          for (int i = 0; i < lanes; ++i) all += scratch[i * channels + channel];
          give(channel, all);
        }
      }
    }
  }

  template <int width>
  static __device__ __forceinline__ void load_sums(const float* from, float (&value)[width]) {
    if constexpr (width == 4) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
      value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
    } else {
      value[0] = load_shared_by_blocks(from);
    }
  }
};

}  // namespace onepass
