// The epilogue of the row "gemm_mma": the chain, moments, values to memory, statistics.
#pragma once

#include "gemm/mma/layout.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmMmaEpilogue {
  const GemmMmaBlock<C, Tail, Numbers> block;

  // The chain before the norm; without a norm all of it.
  using Chain = conditional<Tail::has_norm, typename Tail::Before, typename Tail::After>;
  using Item = GemmMmaItem<C, Numbers>;
  using Geometry = GemmMmaGeometry<C, Numbers>;
  static constexpr int rows = Geometry::rows;
  static constexpr int padded_rows = Numbers::channel_tiles * Numbers::tile_rows;
  static constexpr int group_rows = Tail::group_channels * Geometry::row_classes;
  static constexpr int slabs_of_sample = Tail::channels / Tail::group_channels;
  // A thread has rows of both halves of 16, unless all channels fit one.
  static constexpr int halves = rows <= 8 ? 1 : 2;
  // Lanes that store neighbouring rows, where rows are neighbours in memory.
  static constexpr int row_lanes = rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
  static constexpr int position_parts = Geometry::classes * Numbers::position_tiles;

  // Applies scale, bias and chain in place. `inside`: a bit for each column with an output.
  __device__ __forceinline__ void activate(const Item& item, uint32 inside, GemmMmaSums<Numbers>& d) const {
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        const int own = item.channel_tile * Numbers::tile_rows + block.row(i, h);
        const int existing = own < rows ? own : 0;
        const int channel = existing / Geometry::row_classes;
        const float scale =
            Numbers::guards ? __ldg(block.p.scales + group_of<C>(item.n) * padded_rows + existing) : 1.0f;
        float bias = 0.0f;
        if constexpr (C::has_bias)
          bias = load_one<typename C::Bias>(block.p.parameter[1], Tail::channel(item.n, channel));
        ChannelValues<Chain, 1> values;
        values.load(block.p, item.n, channel);
        const int64 begin = Geometry::sample_offset(item.n) + Geometry::row_offset(existing);
#pragma unroll
        for (int j = 0; j < 2 * Numbers::column_tiles; ++j) {
          float& value = d[i][j / 2][2 * h + j % 2];
          typename Chain::template Tensors<1> tensors;
          if constexpr (Numbers::chain_reads_tensors) {
            if (inside >> j & 1u) tensors.load(block.p, begin + block.s.targets[block.column(j)]);
          }
          value = Chain::value(Numbers::guards ? fmaf(value, scale, bias) : value + bias, values.value[0],
                               tensors, 0);
        }
      }
    }
  }

  // Stores the tile's values through shared memory, 16 rows by 32 columns of a warp at a time.
  template <class Type>
  __device__ __forceinline__ void store_values(void* to, const Item& item,
                                               const GemmMmaSums<Numbers>& d) const {
    constexpr bool rows_are_neighbours = Numbers::stride(1) == 1 && Numbers::stride(4) != 1;
    float(&stage)[16][GemmMmaShared<C, Tail, Numbers>::value_pitch] = block.s.finish.values[block.warp];
    const int64 sample = Geometry::sample_offset(item.n);
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
      const int first = item.channel_tile * Numbers::tile_rows + block.first_row + i * 16;
#pragma unroll
      for (int half = 0; half < Numbers::column_tiles / 4; ++half) {
        __syncwarp();
#pragma unroll
        for (int h = 0; h < halves; ++h) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            *reinterpret_cast<float2*>(&stage[block.lane / 4 + 8 * h][8 * j + 2 * (block.lane % 4)]) =
                float2{d[i][half * 4 + j][2 * h], d[i][half * 4 + j][2 * h + 1]};
          }
        }
        __syncwarp();
        if constexpr (rows_are_neighbours) {
          // A lane has a row of every other column, or of every fourth or eighth.
          constexpr int columns = 32 / row_lanes;
          const int own = first + block.lane % row_lanes;
          const int64 begin = sample + Geometry::row_offset(own < rows ? own : 0);
#pragma unroll
          for (int j = 0; j < row_lanes; ++j) {
            const int in_stage = columns * j + block.lane / row_lanes;
            const int offset = block.s.targets[block.first_column + half * 32 + in_stage];
            if (offset >= 0 && own < rows)
              store_one<Type>(to, begin + offset, stage[block.lane % row_lanes][in_stage]);
          }
        } else {
          // A lane has a column.
          const int offset = block.s.targets[block.first_column + half * 32 + block.lane];
#pragma unroll
          for (int r = 0; r < (rows < 16 ? rows : 16); ++r) {
            if (offset >= 0 && first + r < rows)
              store_one<Type>(to, sample + Geometry::row_offset(first + r) + offset, stage[r][block.lane]);
          }
        }
      }
    }
  }

  // Leaves the moments of the tile's rows in shared memory; a barrier must follow.
  __device__ __forceinline__ void row_moments(uint32 inside, const GemmMmaSums<Numbers>& d) const {
    const int count = __popc(inside);
    const float own_count = static_cast<float>(count);
    const float quad_count = lanes_sum<4>(own_count);
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        // Distances from one of the values: they are 0 where all are equal.
        PivotSums<2> sums;
#pragma unroll
        for (int j = 2 * Numbers::column_tiles - 1; j >= 0; --j)
          sums.pivot = (inside >> j & 1u) != 0 ? d[i][j / 2][2 * h + j % 2] : sums.pivot;
#pragma unroll
        for (int j = 0; j < 2 * Numbers::column_tiles; ++j)
          sums.add_distance(
              (inside >> j & 1u) != 0 ? distance_from(d[i][j / 2][2 * h + j % 2], sums.pivot) : 0.0f, j);
        Moments own{own_count, 0.0f, 0.0f};
        float moved;
        sums.finish(own_count, moved, own.m2);
        own.mean = sums.pivot + moved;
        float mean, all_m2;
        team_moments<4, Numbers::threads>(own, quad_count, nullptr, mean, all_m2);
        if (block.lane % 4 == 0)
          block.s.finish.rows[block.warp % Numbers::warps_n][block.row(i, h)] =
              float4{quad_count, mean, all_m2, 0.0f};
      }
    }
  }

  static __device__ __forceinline__ void merge(Moments& own, const float4& other) {
    if (other.x > 0.0f) own.merge(other.x, other.y, other.z);
  }
  __device__ __forceinline__ float4* parts_of(int64 n, int slab) const {
    return block.p.parts + (n * slabs_of_sample + slab) * (Numbers::spans * position_parts);
  }

  // One warp for each slab of the tile merges the slab's rows to one part.
  __device__ __forceinline__ void store_parts(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_rows;
    const int end = begin + Numbers::tile_rows < rows ? begin + Numbers::tile_rows : rows;
    const int first_slab = begin / group_rows;
    const int last_slab = (end - 1) / group_rows;
    for (int slab = first_slab + block.warp; slab <= last_slab; slab += Numbers::threads / 32) {
      int first = slab * group_rows - begin;
      int last = first + group_rows;
      first = first < 0 ? 0 : first;
      last = last < Numbers::tile_rows ? last : Numbers::tile_rows;
      Moments own;
      for (int i = block.lane; i < (last - first) * Numbers::warps_n; i += 32)
        merge(own, block.s.finish.rows[i % Numbers::warps_n][first + i / Numbers::warps_n]);
      const float elements = lanes_sum<32>(own.count);
      float mean, m2;
      team_moments<32, Numbers::threads>(own, elements, nullptr, mean, m2);
      const int span = item.channel_tile - slab * group_rows / Numbers::tile_rows;
      if (block.lane == 0)
        __stcg(parts_of(item.n, slab) +
                   (span * Geometry::classes + item.class_index) * Numbers::position_tiles +
                   item.position_tile,
               float4{elements, mean, m2, 0.0f});
    }
  }

  // Sums of the tile's rows, for means.
  __device__ __forceinline__ void store_sums(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_rows;
    for (int r = block.thread; r < Numbers::tile_rows && begin + r < rows; r += Numbers::threads) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Numbers::warps_n; ++i)
        sum += block.s.finish.rows[i][r].x * block.s.finish.rows[i][r].y;
      __stcg(block.p.sums + (item.n * Tail::channels + begin + r) * position_parts +
                 item.class_index * Numbers::position_tiles + item.position_tile,
             sum);
    }
  }
  // Lanes that add the sums of a row: a warp, where there are many.
  static constexpr int mean_lanes = position_parts >= 32 ? 32 : 1;
  __device__ __forceinline__ float row_mean(int64 row) const {
    double total = 0.0;
#pragma unroll 4
    for (int i = block.lane % mean_lanes; i < position_parts; i += mean_lanes)
      total += static_cast<double>(__ldcg(block.p.sums + row * position_parts + i));
#pragma unroll
    for (int offset = mean_lanes / 2; offset > 0; offset /= 2)
      total += __shfl_xor_sync(0xffffffffu, total, offset);
    return static_cast<float>(total / static_cast<double>(Tail::spatial));
  }

  // Threads that merge a slab: a warp, or the block where slabs are few and have many parts.
  static constexpr int slab_threads =
      slabs_of_sample < Numbers::threads / 32 && Numbers::spans * position_parts > 128 ? Numbers::threads
                                                                                       : 32;

  // By the last block of a sample: statistics, and the means that follow from them.
  __device__ __forceinline__ void finish_sample(int64 n) const {
    if constexpr (Tail::has_norm) {
      for (int slab = block.thread / slab_threads; slab < slabs_of_sample;
           slab += Numbers::threads / slab_threads)
        finish_slab(n, slab);
    } else {
      if constexpr (Numbers::guards) {
        if (block.thread == 0) gemm::judge<Tail, Numbers>(block.p, n, 1.0f);
      }
      if constexpr (Tail::has_mean) {
        for (int c = block.thread / mean_lanes; c < Tail::channels; c += Numbers::threads / mean_lanes) {
          const int64 row = n * Tail::channels + c;
          const float mean = row_mean(row);
          if (block.lane % mean_lanes == 0) store_one<typename Tail::Output>(block.p.output, row, mean);
        }
      }
    }
  }

  __device__ __forceinline__ void finish_slab(int64 n, int slab) const {
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    const int own_thread = block.thread % slab_threads;
    const int tiles =
        ((slab + 1) * group_rows - 1) / Numbers::tile_rows - slab * group_rows / Numbers::tile_rows + 1;
    const float4* parts = parts_of(n, slab);
    Moments own;
#pragma unroll 4
    for (int i = own_thread; i < tiles * position_parts; i += slab_threads) merge(own, __ldcg(parts + i));
    float mean, m2;
    team_moments<slab_threads, Numbers::threads>(own, elements, &block.s.finish.values[0][0][0], mean, m2);
    const float per_deviation = 1.0f / sqrtf(m2 / elements + Tail::eps);
    if (own_thread == 0) {
      float* to = block.p.statistics + 2 * (n * slabs_of_sample + slab);
      to[0] = mean;
      to[1] = per_deviation;
    }
    constexpr int lanes = Tail::mean_follows_norm ? mean_lanes : 1;
    for (int i = own_thread / lanes; i < Tail::group_channels; i += slab_threads / lanes) {
      const int c = slab * Tail::group_channels + i;
      const int of_norm = Tail::channel(n, c);
      const float weight = Tail::weight(block.p, of_norm);
      if constexpr (Numbers::guards) gemm::judge<Tail, Numbers>(block.p, n, fabsf(weight * per_deviation));
      if constexpr (Tail::mean_follows_norm) {
        const int64 row = n * Tail::channels + c;
        const float scale = weight * norm_factor<Tail>(per_deviation, mean, m2);
        const float value = fmaf(row_mean(row) - mean, scale, Tail::bias(block.p, of_norm));
        if (block.lane % lanes == 0) store_one<typename Tail::Output>(block.p.output, row, value);
      }
    }
  }
};

}  // namespace onepass
