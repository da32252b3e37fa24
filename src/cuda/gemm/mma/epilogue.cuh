// The epilogue of the row "gemm_mma": the chain, moments, values to memory, statistics; where values are
// computed again, the norm, the chain after it and its means.
#pragma once

#include "gemm/mma/layout.cuh"
#include "gemm/store/finish.cuh"

namespace onepass {

constexpr __device__ int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

template <class C, class Tail, class Numbers>
struct GemmMmaEpilogue {
  const GemmMmaBlock<C, Tail, Numbers> block;

  // The chain before the norm; without a norm all of it.
  using Chain = conditional<Tail::has_norm, typename Tail::Before, typename Tail::After>;
  using Item = GemmMmaItem<C, typename Numbers::OfKernel>;
  using Geometry = GemmMmaGeometry<C, Numbers>;
  using Shared = GemmMmaShared<C, Tail, typename Numbers::OfKernel>;
  static constexpr int rows = Geometry::rows;
  static constexpr int padded_rows = Numbers::channel_tiles * Numbers::tile_rows;
  static constexpr int group_rows = Tail::group_channels * Geometry::row_classes;
  static constexpr int slabs_of_sample = Tail::channels / Tail::group_channels;
  static constexpr int team = Numbers::team;  // lanes that share a row
  // A thread has rows of both halves of 16, unless all channels fit one.
  static constexpr int halves = rows <= 32 / team ? 1 : 2;
  // Where taps are rows, sums were scaled as they were added.
  static constexpr bool scales = Numbers::guards && Numbers::row_taps == 1;
  // Lanes that store neighbouring rows, where rows are neighbours in memory.
  static constexpr int row_lanes = rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
  static constexpr int position_parts = Geometry::classes * Numbers::position_tiles;

  // What a row does before and in the chain before the norm: scale, bias, chain.
  struct ActivatedRow {
    float scale, bias = 0.0f;
    ChannelValues<Chain, 1> values;

    __device__ __forceinline__ ActivatedRow(const GemmMmaBlock<C, Tail, Numbers>& block, const Item& item,
                                            int row, int channel) {
      scale = scales ? __ldg(block.p.scales + group_of<C>(item.n) * padded_rows + row) : 1.0f;
      if constexpr (C::has_bias)
        bias = load_one<typename C::Bias>(block.p.parameter[1], Tail::channel(item.n, channel));
      values.load(block.p, item.n, channel);
    }
    template <class Tensors>
    __device__ __forceinline__ float value(float x, const Tensors& tensors) const {
      return Chain::value(scales ? fmaf(x, scale, bias) : x + bias, values.value[0], tensors, 0);
    }
  };
  // The norm and the chain after it.
  struct NormedRow {
    NormedChannel<Tail> own;

    __device__ __forceinline__ NormedRow(const GemmMmaBlock<C, Tail, Numbers>& block, const Item& item, int,
                                         int channel) {
      own.load(block.p, item.n, channel);
    }
    template <class Tensors>
    __device__ __forceinline__ float value(float x, const Tensors& tensors) const {
      return own.value(x, tensors, 0);
    }
  };

  // Scale, bias and chain in place. `inside`: a bit for each column with an output.
  __device__ __forceinline__ void activate(const Item& item, uint32 inside, GemmMmaSums<Numbers>& d) const {
    transform<ActivatedRow, Chain, Numbers::chain_reads_tensors>(item, inside, d);
  }
  // Norm and second chain in place.
  __device__ __forceinline__ void norm(const Item& item, uint32 inside, GemmMmaSums<Numbers>& d) const {
    transform<NormedRow, typename Tail::After, Numbers::second_chain_reads_tensors>(item, inside, d);
  }

  // Rows that one store takes, where rows are neighbours in memory and vectors of them lie on 16 bytes if the
  // first one does.
  template <class Type>
  static constexpr __device__ int vector_rows() {
    constexpr int width = 16 / Type::bytes;
    constexpr bool whole = Geometry::row_classes == 1 && rows % width == 0 &&
                           Numbers::stride(0) % width == 0 && Numbers::stride(2) % width == 0 &&
                           Numbers::stride(3) % width == 0 && Numbers::stride(4) % width == 0;
    return rows_are_neighbours && whole ? width : 1;
  }
  static constexpr bool rows_are_neighbours = Numbers::stride(1) == 1 && Numbers::stride(4) != 1;

  // Stores the tile's values through shared memory, 16 rows by 32 columns of a warp at a time.
  template <class Type>
  __device__ __forceinline__ void store_values(void* to, const Item& item,
                                               const GemmMmaSums<Numbers>& d) const {
    if constexpr (vector_rows<Type>() > 1) {
      store_vectors<Type, vector_rows<Type>()>(to, item, d);
      return;
    }
    constexpr int tiles_at_once = 16 / team;
    float(&stage)[16][Shared::value_pitch] = block.s.finish.values[block.warp];
    const int64 sample = Geometry::sample_offset(item.n);
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
      const int first = item.channel_tile * Numbers::tile_rows + block.first_row + i * 16;
#pragma unroll
      for (int half = 0; half < Numbers::column_tiles / tiles_at_once; ++half) {
        __syncwarp();
#pragma unroll
        for (int h = 0; h < halves; ++h) {
#pragma unroll
          for (int j = 0; j < tiles_at_once; ++j) {
            const float(&pair)[4] = d[i][half * tiles_at_once + j];
            *reinterpret_cast<float2*>(
                &stage[block.lane / team + 32 / team * h][2 * team * j + 2 * (block.lane % team)]) =
                float2{pair[2 * h], pair[2 * h + 1]};
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

  // Moments are of runs of rows that lie in one slab: `run_halves` halves of 16 rows of a warp, or the rows
  // of a half, or each row, where the mean of each is asked for too.
  static constexpr bool means_of_rows = Tail::mean_follows_norm;
  static constexpr int common_rows = means_of_rows ? 1 : common_divisor(group_rows, Numbers::tile_rows);
  static constexpr int run_halves =
      common_rows % 16 == 0 ? 2 * common_divisor(common_rows / 16, Numbers::row_tiles) : 1;
  static constexpr int run_lanes = common_rows % 8 == 0 ? 32 : team;  // that have values of a run
  static constexpr int run_rows = run_lanes == 32 ? 8 * run_halves : 1;

  // Leaves the moments of the tile's runs of rows in shared memory; a barrier must follow. Values that are no
  // outputs are lost.
  __device__ __forceinline__ void row_moments(uint32 inside, GemmMmaSums<Numbers>& d) const {
    constexpr int columns = 2 * Numbers::column_tiles;
    constexpr int run = run_halves;
    static_assert(run % halves == 0 || run == 1);
    const bool whole = __all_sync(0xffffffffu, inside == (columns == 32 ? ~0u : (1u << columns) - 1));
    const float own_count = static_cast<float>(run * __popc(inside));
    const float run_count = lanes_sum<run_lanes>(own_count);
#pragma unroll
    for (int first = 0; first < Numbers::row_tiles * halves; first += run) {
      const auto at = [&](int half, int j) -> float& {
        return d[half / halves][j / 2][2 * (half % halves) + j % 2];
      };
      // Distances from one of the values: they are 0 where all are equal.
      PivotSums<2> sums;
      sums.pivot = at(first, 0);
      if (!whole) {
        sums.pivot = 0.0f;
#pragma unroll
        for (int j = columns - 1; j >= 0; --j)
          sums.pivot = (inside >> j & 1u) != 0 ? at(first, j) : sums.pivot;
#pragma unroll
        for (int half = first; half < first + run; ++half) {
#pragma unroll
          for (int j = 0; j < columns; ++j) at(half, j) = (inside >> j & 1u) != 0 ? at(half, j) : sums.pivot;
        }
      }
#pragma unroll
      for (int half = first; half < first + run; ++half) {
#pragma unroll
        for (int j = 0; j < columns; ++j) sums.add(at(half, j), j);
      }
      Moments own{own_count, 0.0f, 0.0f};
      float moved;
      sums.finish(own_count, moved, own.m2);
      own.mean = sums.pivot + moved;
      float mean, all_m2;
      team_moments<run_lanes, Numbers::threads>(own, run_count, nullptr, mean, all_m2);
      if (block.lane % run_lanes == 0)
        block.s.finish.rows[block.warp % Numbers::warps_n][block.row(first / halves, first % halves)] =
            float4{run_count, mean, all_m2, 0.0f};
    }
  }

  // Leaves the sums of the tile's rows in shared memory, as `store_sums` reads them; a barrier must follow.
  __device__ __forceinline__ void row_sums(uint32 inside, const GemmMmaSums<Numbers>& d) const {
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 2 * Numbers::column_tiles; ++j)
          sum += (inside >> j & 1u) != 0 ? d[i][j / 2][2 * h + j % 2] : 0.0f;
        sum = lanes_sum<team>(sum);
        if (block.lane % team == 0)
          block.s.finish.rows[block.warp % Numbers::warps_n][block.row(i, h)] = float4{1.0f, sum, 0.0f, 0.0f};
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
      for (int i = block.lane; i < (last - first) / run_rows * Numbers::warps_n; i += 32)
        merge(own, block.s.finish.rows[i % Numbers::warps_n][first + i / Numbers::warps_n * run_rows]);
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

  // By the last block of a channel tile of a sample: the means of its rows.
  __device__ __forceinline__ void store_means(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_rows;
    for (int r = block.thread / mean_lanes; r < Numbers::tile_rows && begin + r < rows;
         r += Numbers::threads / mean_lanes) {
      const int64 row = item.n * Tail::channels + begin + r;
      const float mean = row_mean(row);
      if (block.lane % mean_lanes == 0) store_one<typename Tail::Output>(block.p.output, row, mean);
    }
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

 private:
  // The same where a lane has a vector of a column's rows, and eight neighbouring lanes have columns whose
  // vectors lie in different banks.
  template <class Type, int width>
  __device__ __forceinline__ void store_vectors(void* to, const Item& item,
                                                const GemmMmaSums<Numbers>& d) const {
    constexpr int pitch = 20;  // of a column: 16 rows, padded
    constexpr int tiles_at_once = 16 / team;
    static_assert(32 * pitch <= 16 * Shared::value_pitch);
    constexpr int vectors = rows <= width ? 1 : rows <= 2 * width ? 2 : 16 / width;  // of a column
    constexpr int columns = 32 / vectors;  // that are stored at once
    float(&stage)[32][pitch] = *reinterpret_cast<float(*)[32][pitch]>(block.s.finish.values[block.warp]);
    const bool aligned = reinterpret_cast<uint64>(to) % 16 == 0;
    const int64 sample = Geometry::sample_offset(item.n);
    const int own = block.lane / columns * width;  // the lane's first row of 16
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
      const int row = item.channel_tile * Numbers::tile_rows + block.first_row + i * 16 + own;
#pragma unroll
      for (int half = 0; half < Numbers::column_tiles / tiles_at_once; ++half) {
        __syncwarp();
#pragma unroll
        for (int h = 0; h < halves; ++h) {
#pragma unroll
          for (int j = 0; j < 2 * tiles_at_once; ++j)
            stage[block.column(j) - block.first_column][block.row(0, h) - block.first_row] =
                d[i][half * tiles_at_once + j / 2][2 * h + j % 2];
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < vectors; ++j) {
          const int in_stage = columns * j + block.lane % columns;
          const int offset = block.s.targets[block.first_column + half * 32 + in_stage];
          float value[width];
#pragma unroll
          for (int k = 0; k < width; k += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&stage[in_stage][own + k]);
            value[k] = four.x, value[k + 1] = four.y, value[k + 2] = four.z, value[k + 3] = four.w;
          }
          Packed<Type, width> packed;
          packed.pack(value);
          if (offset >= 0 && row < rows) packed.store(to, sample + row + offset, aligned);
        }
      }
    }
  }

  // `Row(...).value` of each value, with what `Stages` read of tensors.
  template <class Row, class Stages, bool reads_tensors>
  __device__ __forceinline__ void transform(const Item& item, uint32 inside, GemmMmaSums<Numbers>& d) const {
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        const int own = item.channel_tile * Numbers::tile_rows + block.row(i, h);
        const int existing = own < rows ? own : 0;
        const Row row(block, item, existing, existing / Geometry::row_classes);
        const int64 begin = Geometry::sample_offset(item.n) + Geometry::row_offset(existing);
#pragma unroll
        for (int j = 0; j < 2 * Numbers::column_tiles; ++j) {
          float& value = d[i][j / 2][2 * h + j % 2];
          typename Stages::template Tensors<1> tensors;
          if constexpr (reads_tensors) {
            if (inside >> j & 1u) tensors.load(block.p, begin + block.s.targets[block.column(j)]);
          }
          value = row.value(value, tensors);
        }
      }
    }
  }
};

}  // namespace onepass
