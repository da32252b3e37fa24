// The kernel of thin/wgmma.cuh: warps take their roles. Consumers pass over units and finish them.
#pragma once

#include "thin/wgmma/outputs.cuh"
#include "thin/wgmma/producer.cuh"
#include "thin/wgmma/weights.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class Product>
struct ThinWgmma<C, Tail, Numbers, Product>::Kernel {
  const Block block;

  // A warp's moments, or sums, of its slots.
  static constexpr int team = row_groups > 1 ? row_groups / 2 : 1;  // lanes that share a sample
  __device__ __forceinline__ float* scratch_of(int slot) const {
    return block.shared.scratch[threadIdx.x / 32][slot];
  }

  template <class State>
  __device__ __forceinline__ void leave_moments(const State (&state)[2], const int (&slot)[2][state_rows],
                                                const bool (&in_range)[state_rows]) const {
#pragma unroll
    for (int r = 0; r < state_rows; ++r) {
      float count[2], mean[2], m2[2];
      if constexpr (row_groups > 1) {
        count[0] = lanes_sum<team>(state[0].count + state[1].count);
        // As distances from one of the means: equal means stay exact.
        const float from = first_mean<team>(state[0].count + state[1].count,
                                            state[0].count > 0.0f ? state[0].mean[r] : state[1].mean[r]);
        float d0 = state[0].mean[r] - from;
        float d1 = state[1].mean[r] - from;
        const float sum = lanes_sum<team>(fmaf(state[0].count, d0, state[1].count * d1));
        const float moved = count[0] > 0.0f ? sum / count[0] : 0.0f;
        mean[0] = from + moved;
        d0 -= moved;
        d1 -= moved;
        m2[0] = lanes_sum<team>(fmaf(state[0].count * d0, d0, state[0].m2[r]) +
                                fmaf(state[1].count * d1, d1, state[1].m2[r]));
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          count[e] = state[e].count;
          mean[e] = state[e].mean[r];
          m2[e] = state[e].m2[r];
        }
      }
#pragma unroll
      for (int e = 0; e < (row_groups > 1 ? 1 : 2); ++e) {
        if (in_range[r] && threadIdx.x % team == 0) {
          float* place = scratch_of(slot[e][r]);
          place[0] = count[e];
          place[1] = mean[e];
          place[2] = m2[e];
        }
      }
    }
  }

  template <class State>
  __device__ __forceinline__ void leave_sums(const State (&state)[2], const int (&slot)[2][state_rows],
                                             const bool (&in_range)[state_rows]) const {
#pragma unroll
    for (int r = 0; r < state_rows; ++r) {
      const float both = lanes_sum<team>(state[0].sum[r] + state[1].sum[r]);
#pragma unroll
      for (int e = 0; e < (row_groups > 1 ? 1 : 2); ++e) {
        if (in_range[r] && threadIdx.x % team == 0)
          scratch_of(slot[e][r])[0] = row_groups > 1 ? both : state[e].sum[r];
      }
    }
  }

  // Calls take(moments or sum) for each warp that has values of a slot.
  template <class Take>
  __device__ __forceinline__ void for_each_warp(int slot, Take&& take) const {
    const int eight = slot % C::channels / 8 % (2 * channel_blocks);
    constexpr int holders = paired ? (taps0 == 2 ? 1 : 2) : taps0;
    constexpr int apart = paired ? 2 : channel_blocks;
    const int first = paired ? eight : eight / 2;
#pragma unroll
    for (int group = 0; group < warpgroups; ++group) {
#pragma unroll
      for (int t = 0; t < holders; ++t) take(block.shared.scratch[group * 4 + t * apart + first][slot]);
    }
  }

  // Merges the block's moments, or sums; by one warpgroup, when all warps have left theirs.
  template <bool is_first>
  __device__ __forceinline__ void leave_part() const {
    for (int slot = threadIdx.x % 128; slot < Numbers::slots; slot += 128) {
      Moments all;
      float total = 0.0f;
      for_each_warp(slot, [&](const float* part) {
        if constexpr (is_first) {
          if (part[0] > 0.0f) all.merge(part[0], part[1], part[2]);
        } else {
          total += part[0];
        }
      });
      block.shared.part[slot][0] = is_first ? all.count : total;
      block.shared.part[slot][1] = all.mean;
      block.shared.part[slot][2] = all.m2;
    }
  }

  // Calls take() for each part of a unit: blocks of a cluster, or warps of the one block.
  template <class Take>
  __device__ __forceinline__ void for_each_part(int slot, Take&& take) const {
    if constexpr (parts == 1) return for_each_warp(slot, take);
    float part[parts][3];  // all on their way at a time
#pragma unroll
    for (int i = 0; i < parts; ++i) {
#pragma unroll
      for (int k = 0; k < 3; ++k)
        part[i][k] = barrier::load_of_block(&block.shared.part[parts == 1 ? 0 : slot][k], i);
    }
#pragma unroll
    for (int i = 0; i < parts; ++i) take(part[i]);
  }

  // Finishes a unit by one warpgroup, or one of its warps. Channels of a slab are neighbouring lanes where
  // their number is a power of two: no barrier is needed.
  static constexpr bool by_lanes =
      (Tail::group_channels & (Tail::group_channels - 1)) == 0 && Tail::group_channels <= 32;
  template <int finishers>
  __device__ __forceinline__ void finish_by_lanes(int64 n, int thread) const {
    constexpr int group = static_cast<int>(Tail::group_channels);
    constexpr auto spatial = static_cast<float>(Tail::spatial);
#pragma unroll 1
    for (int first = 0; first < Numbers::slots; first += finishers) {
      const int slot = first + thread;
      const bool is_one = slot < Numbers::slots && n + slot / Tail::channels < block.p.batch;
      const int channel = slot % static_cast<int>(Tail::channels);
      float gamma = 0.0f, beta = 0.0f;  // on their way
      if constexpr (Tail::mean_follows_norm) {
        if (is_one) {
          gamma = Tail::weight(block.p, channel);
          beta = Tail::bias(block.p, channel);
        }
      }
      Moments all;
      for_each_part(slot < Numbers::slots ? slot : 0, [&](const float* part) {
        if (part[0] > 0.0f) all.merge(part[0], part[1], part[2]);
      });
      // As distances from the first channel's.
      const float from = __shfl_sync(0xffffffffu, all.mean, threadIdx.x % 32 & ~(group - 1));
      const float moved = lanes_sum<group>(all.mean - from) * (1.0f / group);
      const float mean = from + moved;
      const float distance = all.mean - from - moved;
      const float m2 = lanes_sum<group>(fmaf(distance * distance, spatial, all.m2));
      const float rstd = 1.0f / sqrtf(m2 / (spatial * group) + Tail::eps);
      if (!is_one) continue;
      const int64 index = (n * Tail::channels + slot) / group;
      if (channel % group == 0) {
        block.p.statistics[2 * index] = mean;
        block.p.statistics[2 * index + 1] = rstd;
      }
      if constexpr (Tail::mean_follows_norm)
        store_one<typename Tail::Output>(block.p.output, n * Tail::channels + slot,
                                         fmaf(distance * rstd, gamma, beta));
    }
  }

  // Finishes a unit; by one warpgroup, when all warps have left their moments.
  __device__ __forceinline__ void finish_moments(int64 n) const {
    if constexpr (by_lanes) {
      if constexpr (parts > 1) {
        finish_by_lanes<128>(n, threadIdx.x % 128);
      } else if (threadIdx.x % 128 < 32) {
        finish_by_lanes<32>(n, threadIdx.x % 32);
      }
      return;
    }
    const int thread = threadIdx.x % 128;
    for (int slot = thread; slot < Numbers::slots; slot += 128) {
      Moments all;
      for_each_part(slot, [&](const float* part) {
        if (part[0] > 0.0f) all.merge(part[0], part[1], part[2]);
      });
      block.shared.moments[slot][0] = all.mean;
      block.shared.moments[slot][1] = all.m2;
    }
    warpgroup::sync<128>(1 + threadIdx.x / 128);
    constexpr int groups = Tail::channels / Tail::group_channels;
    constexpr auto spatial = static_cast<float>(Tail::spatial);
    for (int slab = thread; slab < samples * groups; slab += 128) {
      if (n + slab / groups >= block.p.batch) break;
      const float(*rows)[2] = block.shared.moments + slab * Tail::group_channels;
      float moved = 0.0f;  // from the first channel's
      for (int c = 1; c < Tail::group_channels; ++c) moved += rows[c][0] - rows[0][0];
      const float mean = fmaf(moved, 1.0f / Tail::group_channels, rows[0][0]);
      float m2 = 0.0f;
      for (int c = 0; c < Tail::group_channels; ++c) {
        const float distance = rows[c][0] - mean;
        m2 += fmaf(distance * distance, spatial, rows[c][1]);
      }
      const float rstd = 1.0f / sqrtf(m2 / (spatial * Tail::group_channels) + Tail::eps);
      const int64 index = n * groups + slab;
      block.p.statistics[2 * index] = mean;
      block.p.statistics[2 * index + 1] = rstd;
      if constexpr (Tail::mean_follows_norm) {
        for (int c = 0; c < Tail::group_channels; ++c) {
          const int channel = slab % groups * Tail::group_channels + c;
          const float value =
              fmaf((rows[c][0] - mean) * rstd, Tail::weight(block.p, channel), Tail::bias(block.p, channel));
          store_one<typename Tail::Output>(block.p.output, index * Tail::group_channels + c, value);
        }
      }
    }
  }

  __device__ __forceinline__ void finish_mean(int64 n) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
    for (int slot = threadIdx.x % 128; slot < Numbers::slots; slot += 128) {
      if (n + slot / Tail::channels >= block.p.batch) break;
      float total = 0.0f;
      for_each_part(slot, [&](const float* part) { total += part[0]; });
      store_one<typename Tail::Output>(block.p.output, n * Tail::channels + slot, total * per_element);
    }
  }

  template <bool is_first>
  __device__ __forceinline__ void finish(int64 n) const {
    if constexpr (is_first) {
      finish_moments(n);
    } else {
      finish_mean(n);
    }
  }

  // One pass over a unit. The warpgroup that arrives last merges; the other goes on.
  template <bool is_first>
  __device__ __forceinline__ void pass_over(int64 n, Ring& ring) const {
    const Outputs outputs{block};
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    if constexpr (ends_may_meet) warpgroup::sync<consumers>(5);
#pragma unroll 1
    for (int tile = 0; tile < channel_tiles; ++tile) {
      int slot[2][state_rows];
      bool in_range[state_rows];
      float unscale[state_rows], bias[state_rows];
#pragma unroll
      for (int r = 0; r < state_rows; ++r) {
        const bool is_one = Products::is_used(warp, r);
        const int o =
            tile * channel_blocks * 16 + (is_one ? Products::channels_of(warp, r) * 8 : 0) + lane / 4;
        unscale[r] = block.shared.unscale[o];
        bias[r] = block.shared.bias[o];
        in_range[r] = o < C::channels && is_one;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          slot[e][r] = Products::sample_of_lane(e) * C::channels + (o < C::channels ? o : 0);
      }
      // A sample beyond the batch reads the operands of the last sample.
      const int64 last = block.p.batch - 1;
      const auto within = [&](int s) { return n + s > last ? static_cast<int>(last - n) : s; };
      int read[2][state_rows];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int r = 0; r < state_rows; ++r)
          read[e][r] = within(slot[e][r] / C::channels) * C::channels + slot[e][r] % C::channels;
      }
      if constexpr (is_first) {
        const MomentsPass pass{block.p, nullptr, n};
        decltype(begin_rows(pass, read[0], in_range)) state[2] = {begin_rows(pass, read[0], in_range),
                                                                  begin_rows(pass, read[1], in_range)};
        outputs.consume(pass, state, tile, ring, unscale, bias);
        leave_moments(state, slot, in_range);
      } else {
        const ApplyPass pass{block.p, nullptr, n};
        decltype(begin_rows(pass, read[0], in_range)) state[2] = {begin_rows(pass, read[0], in_range),
                                                                  begin_rows(pass, read[1], in_range)};
        outputs.consume(pass, state, tile, ring, unscale, bias);
        leave_sums(state, slot, in_range);
      }
    }
    const int group = threadIdx.x / 128;
    warpgroup::sync<128>(1 + group);
    if (threadIdx.x % 128 == 0) {
      __threadfence_block();
      block.shared.group_is_last[group] = atomicAdd(&block.shared.arrived, 1u) % warpgroups == warpgroups - 1;
      __threadfence_block();
    }
    warpgroup::sync<128>(1 + group);
    if constexpr (parts > 1) {
      if (block.shared.group_is_last[group]) leave_part<is_first>();
      barrier::cluster_sync();
      if (rank() == 0 && group == 0) finish<is_first>(n);
      barrier::cluster_sync();
    } else if (block.shared.group_is_last[group]) {
      finish<is_first>(n);
    }
    if constexpr (is_first && two_passes) {
      __threadfence();
      warpgroup::sync<consumers>(5);
    }
  }

  // Whether a warpgroup could reach the end of a unit while the other still merges the one before. The ring
  // keeps them less than `planes` planes apart.
  static constexpr bool ends_may_meet = channel_tiles * part_tiles * window_planes <= planes;

  __device__ __forceinline__ void run() const {
    const Weights weights{block};
    const Producer producer{block};
    if constexpr (guards) allow_kernel_after();
    if (threadIdx.x == 0) {
      for (int i = 0; i < planes; ++i) {
        barrier::initialise(&block.shared.full[i],
                            producer.rows_are_aligned() ? Producer::row_chunks : producers / 32);
        barrier::initialise(&block.shared.empty[i], consumer_warps);
      }
      barrier::initialise(&block.shared.prepared, consumers);
      block.shared.arrived = 0;
      block.shared.redo = redo_none;
    }
    // Prefetches what the end of a unit reads.
    if (threadIdx.x < Tail::parameters) barrier::prefetch(block.p.parameter[threadIdx.x]);
    if constexpr (guards) {  // the counters of the launch that does samples again
      for (int64 i = static_cast<int64>(blockIdx.x) * Numbers::threads + threadIdx.x;
           i < 4 * (block.p.batch + 1); i += static_cast<int64>(gridDim.x) * Numbers::threads)
        block.p.control[i] = 0;
    }
    for (int i = threadIdx.x; i < C::in_channels * samples; i += Numbers::threads)
      block.shared.largest[i / samples][i % samples] = 0;
    __syncthreads();
    if constexpr (all_prepare) {
      weights.load_weights();
      barrier::release_to_copies();
      __syncthreads();
    }
    if (threadIdx.x < consumers) {
      warpgroup::take_registers<Numbers::consumer_registers>();
      if constexpr (!all_prepare) {
        weights.load_weights();
        barrier::release_to_copies();
        // Producers wait for it. Not one bar.sync for all: compute-sanitizer takes a barrier at two places of
        // the code for two barriers.
        barrier::arrive(&block.shared.prepared);
        weights.sync_preparing();
      }
      Ring ring;
#pragma unroll 1
      for (int64 n = static_cast<int64>(first_unit()) * samples; n < block.p.batch;
           n += static_cast<int64>(unit_step()) * samples) {
        if constexpr (Tail::has_norm) pass_over<true>(n, ring);
        if constexpr (!Tail::mean_follows_norm) pass_over<false>(n, ring);
      }
    } else {
      warpgroup::give_registers<Numbers::producer_registers>();
      producer.produce();
    }
  }
};

}  // namespace onepass
