// Moments of values that the row "gemm_boxes" holds in registers until every tile of their slabs has left its
// own, or computes again by another launch: parts of slabs, the wait, and statistics.
#pragma once

#include "device/reduce.cuh"
#include "gemm/boxes/geometry.cuh"
#include "gemm/gemm.cuh"
#include "tail/tail.cuh"

namespace onepass {

// Slabs are whole within a tile's channels, or a tile's channels are a whole part of one. A tile is of one
// sample, and of one class. A unit is the tiles that have the same slabs. A group of a sample is a sample.
template <class C, class Tail, class Numbers>
struct BoxesHold {
  using Parameters = BoxesParameters<Tail::parameters>;
  using Geometry = BoxGeometry<C, Numbers>;
  static constexpr int columns = Numbers::tile_channels;
  static constexpr int products = Numbers::products;
  static constexpr int blocks = columns / 8;
  static constexpr int group = Tail::group_channels < columns ? Tail::group_channels : columns;
  static_assert(!Tail::has_norm || (columns % group == 0 && Tail::group_channels % group == 0));
  static constexpr int tile_slabs = columns / group;
  static constexpr int slabs_of_sample = static_cast<int>(Tail::channels) / Tail::group_channels;
  static constexpr int unit_channel_tiles = Tail::group_channels / group;
  using Rows = PackedGemmGeometry<C, Numbers>;
  static constexpr int classes = Rows::apart ? Rows::classes : 1;
  static constexpr int sample_boxes = Numbers::boxes_z * Numbers::boxes_y * Numbers::boxes_x;
  static constexpr int unit_tiles = sample_boxes * classes * unit_channel_tiles;  // parts of a slab, too
  static constexpr int units_of_sample = Rows::group_tiles / classes / unit_channel_tiles;
  // What the lanes of a warp sum: slabs, where no eight neighbours belong to two of them, else columns.
  static constexpr bool by_slab = group % 8 == 0;
  static constexpr int entries = by_slab ? tile_slabs : columns;
  struct Shared {
    float pivot[columns];
    float2 sums[gemm::consumer_warps][entries];  // of distances from the pivot, and of their squares
    float2 statistics[tile_slabs];               // mean, and what the norm multiplies by
  };

  const Parameters& p;
  Shared& s;

  // The sample that chains and norms know, and which of its group's tiles of channels a tile has.
  static __device__ __forceinline__ int sample_of(const typename Geometry::Tile& tile, int channel_tile) {
    return tile.n * static_cast<int>(C::groups) + channel_tile / Rows::group_tiles;
  }
  static __device__ __forceinline__ int own_tile(int channel_tile) {
    return channel_tile % Rows::group_tiles / classes;
  }
  // The sample's channel of a thread's j-th column, and its row among the weights; those of the tile's first
  // column where there is none.
  static __device__ __forceinline__ int column_of(int j) {
    return j / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2;
  }
  static __device__ __forceinline__ int channel_of(int channel_tile, int column) {
    const int own = own_tile(channel_tile) * columns + column;
    return own < static_cast<int>(C::channels) ? own : own - column;
  }

  static __device__ __forceinline__ int box_of(const typename Geometry::Tile& tile) {
    return (tile.first[0] / Numbers::box_z * Numbers::boxes_y + tile.first[1] / Numbers::box_y) *
               Numbers::boxes_x +
           tile.first[2] / Numbers::box_x;
  }

  // Bias and the chain before the norm, in place. All positions of a tile are of one sample.
  static __device__ __forceinline__ void activate(const Parameters& p, const typename Geometry::Tile& tile,
                                                  int channel_tile, float (&d)[products][columns / 2]) {
    using Chain = typename Tail::Before;
    const int n = sample_of(tile, channel_tile);
#pragma unroll
    for (int j = 0; j < blocks * 2; ++j) {
      const int channel = channel_of(channel_tile, column_of(j));
      const int row = channel_tile * columns + channel - own_tile(channel_tile) * columns;
      const float bias = C::has_bias ? load_one<typename C::Bias>(p.parameter[1], Rows::channel(row)) : 0.0f;
      const float scale = Numbers::guards ? __ldg(p.scales + row) : 1.0f;
      ChannelValues<Chain, 1> values;
      values.load(p, n, channel);
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& value = d[i][j / 2 * 4 + h * 2 + j % 2];
          typename Chain::template Tensors<1> none;
          value = Chain::value(Numbers::guards ? fmaf(value, scale, bias) : value + bias, values.value[0],
                               none, 0);
        }
      }
    }
  }

  // `has`: a bit for each of the thread's rows that has an output. Without one a tile leaves a part of none.
  __device__ __forceinline__ void leave_parts(const typename Geometry::Tile& tile, int channel_tile,
                                              uint32 has, const float (&d)[products][columns / 2]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x < 4) {
#pragma unroll
      for (int j = 0; j < blocks * 2; ++j) s.pivot[j / 2 * 8 + lane * 2 + j % 2] = d[0][j / 2 * 4 + j % 2];
    }
    gemm::consumers_sync();
    if constexpr (by_slab) {
#pragma unroll
      for (int slab = 0; slab < tile_slabs; ++slab) {
        const float pivot = s.pivot[slab * group];
        float2 sum{0.0f, 0.0f};
#pragma unroll
        for (int j = slab * group / 4; j < (slab + 1) * group / 4; ++j) add(sum, d, j, pivot, has);
        sum = {lanes_sum<32>(sum.x), lanes_sum<32>(sum.y)};
        if (lane == 0) s.sums[warp][slab] = sum;
        keep_order(slab);
      }
    } else {
#pragma unroll
      for (int j = 0; j < blocks * 2; ++j) {
        const int column = j / 2 * 8 + lane % 4 * 2 + j % 2;
        float2 sum{0.0f, 0.0f};
        add(sum, d, j, s.pivot[column / group * group], has);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          sum.x += __shfl_xor_sync(0xffffffffu, sum.x, offset);
          sum.y += __shfl_xor_sync(0xffffffffu, sum.y, offset);
        }
        if (lane < 4) s.sums[warp][column] = sum;
        keep_order(j);
      }
    }
    gemm::consumers_sync();
    // A warp for each slab.
    const int first_slab = own_tile(channel_tile) * columns / Tail::group_channels;
    const typename Geometry::Class of_class(Rows::class_of_tile(channel_tile));
    int positions = 1;
#pragma unroll
    for (int d0 = 0; d0 < 3; ++d0) {
      const int left = of_class.positions[d0] - tile.first[d0];
      positions *= left < 0 ? 0 : left < Geometry::box(d0) ? left : Geometry::box(d0);
    }
#pragma unroll 1
    for (int slab = warp; slab < tile_slabs && first_slab + slab < slabs_of_sample;
         slab += gemm::consumer_warps) {
      constexpr int own = entries / tile_slabs;
      float sum = 0.0f, square = 0.0f;
      for (int i = lane; i < own * gemm::consumer_warps; i += 32) {
        const float2 part = s.sums[i / own][slab * own + i % own];
        sum += part.x;
        square += part.y;
      }
      sum = lanes_sum<32>(sum);
      square = lanes_sum<32>(square);
      if (lane == 0) {
        const float count = static_cast<float>(positions * group);
        const float moved = sum / count;
        const float left = fmaf(-sum, moved, square);
        *part(tile, channel_tile, first_slab + slab) =
            positions > 0 ? float4{count, s.pivot[slab * group] + moved, left < 0.0f ? 0.0f : left, 0.0f}
                          : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
    }
    gemm::consumers_sync();
  }

  // Waits for the parts of all tiles of the unit, and merges them.
  __device__ __forceinline__ void await_statistics(const typename Geometry::Tile& tile,
                                                   int channel_tile) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int first_slab = own_tile(channel_tile) * columns / Tail::group_channels;
    if (threadIdx.x == 0) {
      uint32* const counter =
          p.control + (static_cast<int64>(tile.n) * units_of_sample + channel_tile / unit_channel_tiles);
      gemm::arrive(counter);
      wait_for(counter, unit_tiles);
    }
    gemm::consumers_sync();
    for (int slab = warp; slab < tile_slabs && first_slab + slab < slabs_of_sample;
         slab += gemm::consumer_warps)
      merge(tile, channel_tile, first_slab, slab);
    gemm::consumers_sync();
  }

  // Takes statistics that a launch before has merged (BoxesMerge).
  __device__ __forceinline__ void load_statistics(const typename Geometry::Tile& tile,
                                                  int channel_tile) const {
    const int first_slab = own_tile(channel_tile) * columns / Tail::group_channels;
    gemm::consumers_sync();  // the tile's before are read
    const int slab = static_cast<int>(threadIdx.x);
    if (slab < tile_slabs && first_slab + slab < slabs_of_sample) {
      s.statistics[slab] =
          p.lines[static_cast<int64>(sample_of(tile, channel_tile)) * slabs_of_sample + first_slab + slab];
    }
    gemm::consumers_sync();
  }

  // The norm of a channel as x * scale + shift.
  __device__ __forceinline__ float2 affine(int column, int channel) const {
    const float2 own = s.statistics[column / group];
    const float scale = Tail::weight(p, channel) * own.y;
    return {scale, fmaf(-own.x, scale, Tail::bias(p, channel))};
  }

 private:
  // The compiler may mix a few sums: of more it spills values.
  static __device__ __forceinline__ void keep_order(int i) {
    if (i % 4 == 3) asm volatile("" ::: "memory");
  }

  // Adds the thread's values of its j-th column.
  static __device__ __forceinline__ void add(float2& sum, const float (&d)[products][columns / 2], int j,
                                             float pivot, uint32 has) {
#pragma unroll
    for (int i = 0; i < products; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float distance = distance_from(d[i][j / 2 * 4 + h * 2 + j % 2], pivot);
        const float own = has >> (2 * i + h) & 1u ? distance : 0.0f;
        sum.x += own;
        sum.y = fmaf(own, own, sum.y);
      }
    }
  }

  __device__ __forceinline__ float4* parts_of(int n, int slab) const {
    return p.parts + (static_cast<int64>(n) * slabs_of_sample + slab) * unit_tiles;
  }
  __device__ __forceinline__ float4* part(const typename Geometry::Tile& tile, int channel_tile,
                                          int slab) const {
    const int of_slab = box_of(tile) * classes + Rows::class_of_tile(channel_tile);
    return parts_of(sample_of(tile, channel_tile), slab) + of_slab * unit_channel_tiles +
           own_tile(channel_tile) % unit_channel_tiles;
  }

  // By a warp: the statistics of a slab from all its parts, as distances from the first one's mean.
  __device__ __forceinline__ void merge(const typename Geometry::Tile& tile, int channel_tile, int first_slab,
                                        int slab) const {
    constexpr int of_lane = (unit_tiles + 31) / 32;
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float4* const from_memory = parts_of(tile.n, first_slab + slab);
    float4 own[of_lane];
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      own[i] =
          lane + 32 * i < unit_tiles ? __ldcg(from_memory + lane + 32 * i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    const float from = __shfl_sync(0xffffffffu, own[0].y, 0);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < of_lane; ++i) sum = fmaf(own[i].x, own[i].x > 0.0f ? own[i].y - from : 0.0f, sum);
    const float moved = lanes_sum<32>(sum) / elements;
    float m2 = 0.0f;
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      const float distance = own[i].x > 0.0f ? own[i].y - from - moved : 0.0f;
      m2 += fmaf(own[i].x * distance, distance, own[i].z);
    }
    m2 = lanes_sum<32>(m2);
    const float mean = from + moved;
    const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
    if (lane != 0) return;
    s.statistics[slab] = {mean, norm_factor<Tail>(rstd, mean, m2)};
    if (box_of(tile) == 0 && channel_tile % unit_channel_tiles == 0) {
      float* const to = p.statistics + 2 * (static_cast<int64>(tile.n) * slabs_of_sample + first_slab + slab);
      to[0] = mean;
      to[1] = rstd;
    }
  }
};

}  // namespace onepass
