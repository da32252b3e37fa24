// What becomes of a tile's sums, for gemm.cuh: chains, moments, the norm, the output.
#pragma once

#include "gemm/store/moments.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmEpilogue : GemmEpilogueMoments<C, Tail, Numbers> {
  using Base = GemmEpilogueMoments<C, Tail, Numbers>;
  using Base::agent;
  using Base::agent_thread;
  using Base::agent_threads;
  using Base::agent_warp;
  using Base::agent_warps;
  using Base::apart;
  using Base::classes;
  using Base::first_column;
  using Base::first_slab;
  using Base::group;
  using Base::group_rows;
  using Base::keep;
  using Base::lane;
  using Base::late_vectors;
  using Base::leave_parts;
  using Base::leaves_late;
  using Base::p;
  using Base::pairs;
  using Base::position_part;
  using Base::put_rest;
  using Base::row;
  using Base::row_moments;
  using Base::rows;
  using Base::rows_are_slabs;
  using Base::s;
  using Base::slab_count;
  using Base::slabs;
  using Base::slabs_of_sample;
  using Base::store_parts;
  using Base::sums;
  using Base::sync;
  using Base::tile_position;
  using Base::unit_parts;
  using Base::warp;
  using typename Base::After;
  using typename Base::Before;
  using typename Base::Columns;
  using typename Base::Geometry;
  using typename Base::Item;
  using typename Base::Leaving;
  using typename Base::Output;
  using typename Base::Staging;

  // Of the tiles of its group the row's.
  static __device__ __forceinline__ int scale_index(const Item& item, int row) {
    return group_of<C>(item.n) * Numbers::channel_tiles * Numbers::tile_channels + row;
  }

  // Scale and bias, then the chain before the norm, in place.
  __device__ __forceinline__ void activate(const Item& item, const Columns& columns, float (&d)[sums]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const int own = c < rows ? c : 0;
      const int channel = own / classes;
      const float scale = Numbers::guards ? __ldg(p.scales + scale_index(item, own)) : 1.0f;
      float bias = 0.0f;
      if constexpr (C::has_bias)
        bias = load_one<typename C::Bias>(p.parameter[1], Tail::channel(item.n, channel));
      ChannelValues<Before, 1> values;
      values.load(p, item.n, channel);
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(own);
#pragma unroll
      for (int i = 0; i < 2 * pairs; ++i) {
        float& value = d[i / 2 * 4 + h * 2 + i % 2];
        typename Before::template Tensors<1> tensors;
        if constexpr (Numbers::before_reads_tensors) {
          if (columns.has(i)) tensors.load(p, begin + columns.offset(i));
        }
        if constexpr (Numbers::guards) {
          value = fmaf(value, scale, bias);
        } else if constexpr (C::has_bias) {
          value += bias;
        }
        value = Before::value(value, values.value[0], tensors, 0);
      }
    }
  }

  // --- After the last tile of a unit ---
  __device__ __forceinline__ bool arrives_last(uint32* counter) const {
    sync();
    if (agent_thread == 0) s.last[agent] = count_up(counter) == unit_parts - 1;
    sync();
    return s.last[agent];
  }

  // All slabs of the unit, by the block that came last.
  __device__ __forceinline__ void finish_moments(const Item& item) const {
    const int first = Numbers::unit_channel_tiles == Numbers::channel_tiles ? 0 : first_slab(item);
    const int end =
        first + (Numbers::unit_channel_tiles == Numbers::channel_tiles ? slabs_of_sample : slab_count(item));
    for (int slab = first + agent_warp; slab < end; slab += agent_warps) slabs.finish(item.n, slab);
  }

  __device__ __forceinline__ void finish_mean(const Item& item) const {
    const int first = item.channel_tile / Numbers::unit_channel_tiles * Numbers::unit_channel_tiles *
                      Numbers::tile_channels;
    const int end = first + Numbers::unit_channel_tiles * Numbers::tile_channels;
    for (int c = first + static_cast<int>(threadIdx.x); c < end && c < Tail::channels;
         c += gemm::consumer_threads) {
      const int64 row = item.n * Tail::channels + c;
      store_one<Output>(p.output, row, slabs.row_sum(row) / static_cast<float>(Tail::spatial));
    }
  }

  // --- The norm and what follows ---
  // Statistics of the tile's slabs, in shared memory; every consumer.
  __device__ __forceinline__ void load_statistics(const Item& item) const {
    const int first = first_slab(item);
    const int count = slab_count(item);
    if constexpr (Numbers::held) {
      for (int i = agent_warp; i < count; i += agent_warps) {
        const auto statistics = slabs.statistics(item.n, first + i);
        if (lane != 0) continue;
        s.statistics[agent][i] = {statistics.mean, statistics.factor};
        if (position_part(item) == 0) {
          float* to = p.statistics + 2 * (item.n * slabs_of_sample + first + i);
          to[0] = statistics.mean;
          to[1] = statistics.rstd;
        }
      }
    } else {
      for (int i = agent_thread; i < count; i += agent_threads) {
        const float* from = p.statistics + 2 * (item.n * slabs_of_sample + first + i);
        s.statistics[agent][i] = {load_shared_by_blocks(from), load_shared_by_blocks(from + 1)};
      }
    }
    sync();
  }

  // What the norm multiplies the thread's rows by and adds, read before other tiles are waited for. Not where
  // a chain follows, for whose registers there is no room then.
  static constexpr bool reads_affine_early = Numbers::held && !Numbers::has_after;
  struct Affine {
    float weight[2];
    float bias[2];
  };
  __device__ __forceinline__ Affine affine_of(const Item& item) const {
    Affine affine;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const int channel = Tail::channel(item.n, (c < rows ? c : 0) / classes);
      affine.weight[h] = Tail::weight(p, channel);
      affine.bias[h] = Tail::bias(p, channel);
    }
    return affine;
  }

  // The norm and the chain after it, in place; or the sums of rows, where they are what is wanted.
  __device__ __forceinline__ void apply(const Item& item, const Columns& columns, const Affine& affine,
                                        float (&d)[sums]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const bool in_range = c < rows;
      const int own = in_range ? c : 0;
      const int channel = own / classes;
      // Held: as one multiply-add; what it multiplies by is 0 then where all values are the same.
      float mean = 0.0f, scale = 1.0f, shift = 0.0f;
      if constexpr (Tail::has_norm) {
        const int slab = in_range ? c / group_rows - first_slab(item) : 0;
        const float2 statistics = s.statistics[agent][slab];
        const int of_norm = Tail::channel(item.n, channel);
        mean = statistics.x;
        scale = (reads_affine_early ? affine.weight[h] : Tail::weight(p, of_norm)) * statistics.y;
        shift = reads_affine_early ? affine.bias[h] : Tail::bias(p, of_norm);
        if constexpr (Numbers::held) shift = fmaf(-mean, scale, shift);
        if constexpr (Numbers::guards && Numbers::held) {
          if (item.position_tile == 0 && in_range && lane % 4 == 0) {
            // Equal values are divided by the root of eps: they may be equal because f16 has no room for x.
            const float weight = reads_affine_early ? affine.weight[h] : Tail::weight(p, of_norm);
            Staging::judge(p, item.n, fabsf(statistics.y == 0.0f ? weight * rsqrtf(Tail::eps) : scale));
          }
        }
      }
      ChannelValues<After, 1> values;
      values.load(p, item.n, channel);
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(own);
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * pairs; ++i) {
        float& value = d[i / 2 * 4 + h * 2 + i % 2];
        typename After::template Tensors<1> tensors;
        if constexpr (Numbers::after_reads_tensors) {
          if (columns.has(i)) tensors.load(p, begin + columns.offset(i));
        }
        if constexpr (Tail::has_norm)
          value = Numbers::held ? fmaf(value, scale, shift) : normalise(value, mean, scale, shift);
        value = After::value(value, values.value[0], tensors, 0);
        if constexpr (Tail::has_mean) total += columns.has(i) ? value : 0.0f;
      }
      if constexpr (Tail::has_mean) {
        total = lanes_sum<4>(total);
        if (lane % 4 == 0) s.rows(group, warp % 4 * 16 + lane / 4 + 8 * h).x = total;
      }
    }
    if constexpr (Tail::has_mean) {
      gemm::consumers_sync();
      const int begin = item.channel_tile * Numbers::tile_channels;
      for (int r = static_cast<int>(threadIdx.x); r < Numbers::tile_channels; r += gemm::consumer_threads) {
        if (begin + r >= Tail::channels) break;
        const float sum = Numbers::groups_share_positions ? s.rows(r / 64, r % 64).x
                                                          : s.rows(0, r % 64).x + s.rows(1, r % 64).x;
        p.sums[(item.n * Tail::channels + begin + r) * Numbers::position_tiles + item.position_tile] = sum;
      }
    }
  }

  // Where the tile's positions lie, before its products: every consumer.
  __device__ __forceinline__ void prepare(const Item& item) const {
    if constexpr (Geometry::contiguous) return;
    // Those of its own warpgroup, where each goes its own way.
    constexpr int count = apart ? Numbers::columns : Numbers::tile_positions;
    const int first = apart ? first_column() : 0;
    for (int i = agent_thread; i < count; i += agent_threads)
      s.offsets[first + i] = Geometry::target(item.position_tile, first + i);
  }

  __device__ __forceinline__ void run(const Item& item, float (&d)[sums], Leaving& leaving) const {
    uint32* counters = p.control + item.unit * 4;
    if constexpr (!Geometry::contiguous) sync();
    const Columns columns(s.offsets, tile_position(item), first_column() + 2 * (lane % 4));
    activate(item, columns, d);
    Affine affine{};
    if constexpr (Tail::has_norm) {
      if constexpr (reads_affine_early) affine = affine_of(item);
      if (Numbers::held || item.is_first) {
        if constexpr (late_vectors > 0) put_rest(leaving);
        if constexpr (rows_are_slabs) {
          leave_parts(item, columns, d);
        } else {
          row_moments(columns, d);
          if constexpr (Numbers::stored) this->template store<f32, true>(p.values, item, d);
          sync();
          store_parts(item);
        }
        if constexpr (Numbers::held && !Tail::mean_follows_norm) {
          sync();
          if (agent_thread == 0) {
            gemm::arrive(counters);
            wait_for(counters, unit_parts);
          }
        } else if constexpr (Numbers::stored) {
          // Another launch merges them: a block does not wait for its stores here.
          sync();
          return;
        } else {
          if (arrives_last(counters)) {
            finish_moments(item);
            sync();
            if (agent_thread == 0) release(counters + 2, 1u);
          }
          return;
        }
      } else if (threadIdx.x == 0) {
        wait_for(counters + 2, 1u);
      }
      sync();
      load_statistics(item);
    }
    apply(item, columns, affine, d);
    if constexpr (Tail::has_mean) {
      if (arrives_last(counters + 1)) finish_mean(item);
    } else if (leaves_late()) {
      if constexpr (late_vectors > 0) keep(item, d, leaving);
    } else {
      this->template store<Output, false>(p.output, item, d);
    }
    // What is in shared memory is free before the next tile writes there; where values are held, barriers
    // come before that.
    if constexpr (Tail::has_mean || !Geometry::contiguous || (Tail::has_norm && !Numbers::held)) sync();
  }
};

}  // namespace onepass
