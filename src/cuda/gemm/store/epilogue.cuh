// The epilogue of gemm/wgmma.cuh: chains, moments, the norm, the output.
#pragma once

#include "gemm/store/moments.cuh"
#include "gemm/store/outputs.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmEpilogue {
  using Consumer = GemmConsumer<C, Tail, Numbers>;
  using Outputs = GemmOutputs<C, Tail, Numbers>;
  const Consumer thread;
  const Outputs outputs{thread};
  const GemmTileMoments<C, Tail, Numbers> moments{thread};

  using Geometry = GemmGeometry<C, Numbers>;
  using Columns = GemmTileColumns<C, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  static constexpr int slabs_of_sample = GemmSlabs<C, Tail, Numbers>::slabs_of_sample;
  static constexpr bool defers = Outputs::late_vectors > 0;

  // The index of a row's scale, among the tiles of its group of channels.
  static __device__ __forceinline__ int scale_index(const Item& item, int row) {
    return group_of<C>(item.n) * Numbers::channel_tiles * Numbers::tile_channels + row;
  }

  // Scale and bias, then the chain before the norm, in place.
  __device__ __forceinline__ void activate(const Item& item, const Columns& columns,
                                           GemmSums<Numbers>& d) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + thread.row(h);
      const int own = c < Geometry::rows ? c : 0;
      const int channel = own / Geometry::classes;
      const float scale = Numbers::guards ? __ldg(thread.p.scales + scale_index(item, own)) : 1.0f;
      float bias = 0.0f;
      if constexpr (C::has_bias)
        bias = load_one<typename C::Bias>(thread.p.parameter[1], Tail::channel(item.n, channel));
      ChannelValues<typename Tail::Before, 1> values;
      values.load(thread.p, item.n, channel);
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(own);
#pragma unroll
      for (int i = 0; i < Numbers::columns / 4; ++i) {
        float& value = d[i / 2 * 4 + h * 2 + i % 2];
        typename Tail::Before::template Tensors<1> tensors;
        if constexpr (Numbers::before_reads_tensors) {
          if (columns.has(i)) tensors.load(thread.p, begin + columns.offset(i));
        }
        if constexpr (Numbers::guards) {
          value = fmaf(value, scale, bias);
        } else if constexpr (C::has_bias) {
          value += bias;
        }
        value = Tail::Before::value(value, values.value[0], tensors, 0);
      }
    }
  }

  // --- After the last tile of a unit ---
  __device__ __forceinline__ bool arrives_last(uint32* counter) const {
    thread.sync();
    if (thread.agent_thread == 0) thread.s.last[thread.agent] = count_up(counter) == Consumer::unit_parts - 1;
    thread.sync();
    return thread.s.last[thread.agent];
  }

  // Statistics of all slabs of the unit, by the last block.
  __device__ __forceinline__ void finish_moments(const Item& item) const {
    const int first = Numbers::unit_channel_tiles == Numbers::channel_tiles ? 0 : Consumer::first_slab(item);
    const int end =
        first + (Numbers::unit_channel_tiles == Numbers::channel_tiles ? slabs_of_sample
                                                                       : Consumer::slab_count(item));
    for (int slab = first + thread.agent_warp; slab < end; slab += Consumer::agent_warps)
      thread.slabs.finish(item.n, slab);
  }

  __device__ __forceinline__ void finish_mean(const Item& item) const {
    const int first = item.channel_tile / Numbers::unit_channel_tiles * Numbers::unit_channel_tiles *
                      Numbers::tile_channels;
    const int end = first + Numbers::unit_channel_tiles * Numbers::tile_channels;
    for (int c = first + static_cast<int>(threadIdx.x); c < end && c < Tail::channels;
         c += gemm::consumer_threads) {
      const int64 row = item.n * Tail::channels + c;
      store_one<typename Tail::Output>(thread.p.output, row,
                                       thread.slabs.row_sum(row) / static_cast<float>(Tail::spatial));
    }
  }

  // --- The norm and what follows ---
  // Brings the statistics of the tile's slabs to shared memory. By every consumer.
  __device__ __forceinline__ void load_statistics(const Item& item) const {
    const int first = Consumer::first_slab(item);
    const int count = Consumer::slab_count(item);
    if constexpr (Numbers::held) {
      for (int i = thread.agent_warp; i < count; i += Consumer::agent_warps) {
        const auto statistics = thread.slabs.statistics(item.n, first + i);
        if (thread.lane != 0) continue;
        thread.s.statistics[thread.agent][i] = {statistics.mean, statistics.factor};
        if (thread.position_part(item) == 0) {
          float* to = thread.p.statistics + 2 * (item.n * slabs_of_sample + first + i);
          to[0] = statistics.mean;
          to[1] = statistics.rstd;
        }
      }
    } else {
      for (int i = thread.agent_thread; i < count; i += Consumer::agent_threads) {
        const float* from = thread.p.statistics + 2 * (item.n * slabs_of_sample + first + i);
        thread.s.statistics[thread.agent][i] = {load_shared_by_blocks(from), load_shared_by_blocks(from + 1)};
      }
    }
    thread.sync();
  }

  // The norm's weight and bias of the thread's rows, read before the wait for other tiles. Where a chain
  // follows the norm, registers do not suffice for that.
  static constexpr bool reads_affine_early = Numbers::held && !Numbers::has_after;
  struct Affine {
    float weight[2];
    float bias[2];
  };
  __device__ __forceinline__ Affine affine_of(const Item& item) const {
    Affine affine;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + thread.row(h);
      const int channel = Tail::channel(item.n, (c < Geometry::rows ? c : 0) / Geometry::classes);
      affine.weight[h] = Tail::weight(thread.p, channel);
      affine.bias[h] = Tail::bias(thread.p, channel);
    }
    return affine;
  }

  // Applies the norm and the chain after it in place; for a mean, sums the rows.
  __device__ __forceinline__ void apply(const Item& item, const Columns& columns, const Affine& affine,
                                        GemmSums<Numbers>& d) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + thread.row(h);
      const bool in_range = c < Geometry::rows;
      const int own = in_range ? c : 0;
      const int channel = own / Geometry::classes;
      // Held values take one multiply-add, whose factor is 0 where all values are equal.
      float mean = 0.0f, scale = 1.0f, shift = 0.0f;
      if constexpr (Tail::has_norm) {
        const int slab = in_range ? c / Consumer::Slabs::group_rows - Consumer::first_slab(item) : 0;
        const float2 statistics = thread.s.statistics[thread.agent][slab];
        const int of_norm = Tail::channel(item.n, channel);
        mean = statistics.x;
        scale = (reads_affine_early ? affine.weight[h] : Tail::weight(thread.p, of_norm)) * statistics.y;
        shift = reads_affine_early ? affine.bias[h] : Tail::bias(thread.p, of_norm);
        if constexpr (Numbers::held) shift = fmaf(-mean, scale, shift);
        if constexpr (Numbers::guards && Numbers::held) {
          if (item.position_tile == 0 && in_range && thread.lane % 4 == 0) {
            // Values may be equal because x underflows f16. Their factor would be 1 / sqrt(eps).
            const float weight = reads_affine_early ? affine.weight[h] : Tail::weight(thread.p, of_norm);
            gemm::judge<Tail, Numbers>(thread.p, item.n,
                                       fabsf(statistics.y == 0.0f ? weight * rsqrtf(Tail::eps) : scale));
          }
        }
      }
      ChannelValues<typename Tail::After, 1> values;
      values.load(thread.p, item.n, channel);
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(own);
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < Numbers::columns / 4; ++i) {
        float& value = d[i / 2 * 4 + h * 2 + i % 2];
        typename Tail::After::template Tensors<1> tensors;
        if constexpr (Numbers::after_reads_tensors) {
          if (columns.has(i)) tensors.load(thread.p, begin + columns.offset(i));
        }
        if constexpr (Tail::has_norm)
          value = Numbers::held ? fmaf(value, scale, shift) : normalise(value, mean, scale, shift);
        value = Tail::After::value(value, values.value[0], tensors, 0);
        if constexpr (Tail::has_mean) total += columns.has(i) ? value : 0.0f;
      }
      if constexpr (Tail::has_mean) {
        total = lanes_sum<4>(total);
        if (thread.lane % 4 == 0)
          thread.s.rows(thread.group, thread.warp % 4 * 16 + thread.lane / 4 + 8 * h).x = total;
      }
    }
    if constexpr (Tail::has_mean) {
      gemm::consumers_sync();
      const int begin = item.channel_tile * Numbers::tile_channels;
      for (int r = static_cast<int>(threadIdx.x); r < Numbers::tile_channels; r += gemm::consumer_threads) {
        if (begin + r >= Tail::channels) break;
        const float sum = Numbers::groups_share_positions
                              ? thread.s.rows(r / 64, r % 64).x
                              : thread.s.rows(0, r % 64).x + thread.s.rows(1, r % 64).x;
        thread.p.sums[(item.n * Tail::channels + begin + r) * Numbers::position_tiles + item.position_tile] =
            sum;
      }
    }
  }

  // Offsets of the tile's positions, before its mainloop. By every consumer.
  __device__ __forceinline__ void prepare(const Item& item) const {
    if constexpr (Geometry::contiguous) return;
    // Independent warpgroups have offsets of their own.
    constexpr int count = Numbers::apart ? Numbers::columns : Numbers::tile_positions;
    const int first = Numbers::apart ? thread.first_column() : 0;
    for (int i = thread.agent_thread; i < count; i += Consumer::agent_threads)
      thread.s.offsets[first + i] = Geometry::target(item.position_tile, first + i);
  }

  __device__ __forceinline__ void run(const Item& item, GemmSums<Numbers>& d,
                                      typename Outputs::Deferred& deferred) const {
    uint32* counters = thread.p.control + item.unit * 4;
    if constexpr (!Geometry::contiguous) thread.sync();
    const Columns columns(thread.s.offsets, Consumer::tile_position(item),
                          thread.first_column() + 2 * (thread.lane % 4));
    activate(item, columns, d);
    Affine affine{};
    if constexpr (Tail::has_norm) {
      if constexpr (reads_affine_early) affine = affine_of(item);
      if (Numbers::held || item.is_first) {
        if constexpr (defers) outputs.store_rest(deferred);
        if constexpr (Numbers::rows_are_slabs) {
          moments.leave_parts(item, columns, d);
        } else {
          moments.row_moments(columns, d);
          if constexpr (Numbers::stored) outputs.template store<f32, true>(thread.p.values, item, d);
          thread.sync();
          moments.store_parts(item);
        }
        if constexpr (Numbers::held && !Tail::mean_follows_norm) {
          thread.sync();
          if (thread.agent_thread == 0) {
            gemm::arrive(counters);
            wait_for(counters, Consumer::unit_parts);
          }
        } else if constexpr (Numbers::stored) {
          // Another launch merges the parts: the block does not wait for its stores.
          thread.sync();
          return;
        } else {
          if (arrives_last(counters)) {
            finish_moments(item);
            thread.sync();
            if (thread.agent_thread == 0) release(counters + 2, 1u);
          }
          return;
        }
      } else if (threadIdx.x == 0) {
        wait_for(counters + 2, 1u);
      }
      thread.sync();
      load_statistics(item);
    }
    apply(item, columns, affine, d);
    if constexpr (Tail::has_mean) {
      if (arrives_last(counters + 1)) finish_mean(item);
    } else if (outputs.stores_late()) {
      if constexpr (defers) outputs.defer(item, d, deferred);
    } else {
      outputs.template store<typename Tail::Output, false>(thread.p.output, item, d);
    }
    // Shared memory must be free before the next tile writes to it. Held tiles pass other barriers before
    // that.
    if constexpr (Tail::has_mean || !Geometry::contiguous || (Tail::has_norm && !Numbers::held))
      thread.sync();
  }
};

}  // namespace onepass
