// Moments of a tile's rows, and the parts of slabs they become, for gemm/wgmma.cuh.
#pragma once

#include "gemm/store/consumer.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmTileMoments {
  const GemmConsumer<C, Tail, Numbers> thread;

  using Item = GemmItem<Tail, Numbers>;
  using Columns = GemmTileColumns<C, Numbers>;
  static constexpr int group_rows = GemmSlabs<C, Tail, Numbers>::group_rows;

  // Leaves the moments of the tile's rows in shared memory. By every consumer; a barrier must follow.
  __device__ __forceinline__ void row_moments(const Columns& columns, const GemmSums<Numbers>& d) const {
    const int count = columns.count();
    const float own_count = static_cast<float>(count);
    const float quad_count = lanes_sum<4>(own_count);
    const bool all = __all_sync(0xffffffffu, count == Numbers::columns / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Moments own{own_count, 0.0f, 0.0f};
      if (all) {
        moments<true>(d, h, columns, own);
      } else {
        moments<false>(d, h, columns, own);
      }
      float mean, m2;
      team_moments<4, gemm::consumer_threads>(own, quad_count, nullptr, mean, m2);
      if (thread.lane % 4 == 0)
        thread.s.rows(thread.group, thread.warp % 4 * 16 + thread.lane / 4 + 8 * h) =
            float4{quad_count, mean, m2, 0.0f};
    }
  }

  template <bool all>
  static __device__ __forceinline__ void moments(const GemmSums<Numbers>& d, int h, const Columns& columns,
                                                 Moments& own) {
    // Distances from one of the values: they are 0 where all are equal.
    PivotSums<4> distances;
    distances.pivot = first_value<all>(d, h, columns);
#pragma unroll
    for (int i = 0; i < Numbers::columns / 4; ++i) {
      const float distance = distance_from(d[i / 2 * 4 + h * 2 + i % 2], distances.pivot);
      distances.add_distance(all || columns.has(i) ? distance : 0.0f, i);
    }
    float moved;
    distances.finish(own.count, moved, own.m2);
    own.mean = distances.pivot + moved;
  }
  // A value of the thread's row h that has an output, if there is one.
  template <bool all>
  static __device__ __forceinline__ float first_value(const GemmSums<Numbers>& d, int h,
                                                      const Columns& columns) {
    float first = d[h * 2];
    if constexpr (!all) {
#pragma unroll
      for (int i = Numbers::columns / 4 - 1; i > 0; --i)
        first = columns.has(i) ? d[i / 2 * 4 + h * 2 + i % 2] : first;
      first = columns.has(0) ? d[h * 2] : first;
    }
    return first;
  }

  // Where a warp has whole slabs and all their positions, it leaves their parts directly.
  __device__ __forceinline__ void leave_parts(const Item& item, const Columns& columns,
                                              const GemmSums<Numbers>& d) const {
    const int count = columns.count();
    if (__all_sync(0xffffffffu, count == Numbers::columns / 4)) {
      leave_parts<true>(item, columns, count, d);
    } else {
      leave_parts<false>(item, columns, count, d);
    }
  }
  template <bool all>
  __device__ __forceinline__ void leave_parts(const Item& item, const Columns& columns, int count,
                                              const GemmSums<Numbers>& d) const {
    constexpr int sets = group_rows == 16 ? 1 : 2;  // of the thread's two rows
    constexpr int lanes = group_rows == 16 ? 32 : 4 * group_rows;
    const float elements = lanes_sum<lanes>(static_cast<float>((3 - sets) * count));
#pragma unroll
    for (int h = 0; h < sets; ++h) {
      // Distances from one of the slab's values: they are 0 where all are equal.
      PivotSums<4> distances;
      distances.pivot = first_mean<lanes>(static_cast<float>(count), first_value<all>(d, h, columns));
#pragma unroll
      for (int i = 0; i < Numbers::columns / 4; ++i) {
#pragma unroll
        for (int k = h; k < h + 3 - sets; ++k) {
          if (all || columns.has(i)) distances.add(d[i / 2 * 4 + k * 2 + i % 2], i % 2 + 2 * (k - h));
        }
      }
      float moved, m2;
      distances.sum_lanes<lanes>();
      distances.finish(elements, moved, m2);
      const float mean = distances.pivot + moved;
      const int first = item.channel_tile * Numbers::tile_channels + thread.row(h);
      if (thread.lane % lanes == 0 && thread.exists(first))
        __stcg(thread.slabs.part(item.n, first / group_rows, item.channel_tile, thread.position_part(item)),
               float4{elements, mean, m2, 0.0f});
    }
  }

  // One warp for each slab of the tile merges the slab's rows to one part.
  __device__ __forceinline__ void store_parts(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_channels;
    const int count = thread.slab_count(item);
    for (int i = thread.agent_warp; i < count; i += thread.agent_warps) {
      const int slab = thread.first_slab(item) + i;
      int first = slab * group_rows - begin;
      int last = first + group_rows;
      first = first < 0 ? 0 : first;
      last = last < Numbers::tile_channels ? last : Numbers::tile_channels;
      Moments own;
      if constexpr (Numbers::apart) {
        for (int r = first + thread.lane; r < last; r += 32)
          thread.slabs.merge(own, thread.s.rows(thread.group, r));
      } else if constexpr (Numbers::groups_share_positions) {
        for (int r = first + thread.lane; r < last; r += 32)
          thread.slabs.merge(own, thread.s.rows(r / 64, r % 64));
      } else {
        for (int r = 2 * first + thread.lane; r < 2 * last; r += 32)
          thread.slabs.merge(own, thread.s.rows(r % 2, r / 2));
      }
      const float elements = lanes_sum<32>(own.count);
      float mean, m2;
      team_moments<32, gemm::consumer_threads>(own, elements, nullptr, mean, m2);
      if (thread.lane == 0)
        __stcg(thread.slabs.part(item.n, slab, item.channel_tile, thread.position_part(item)),
               float4{elements, mean, m2, 0.0f});
    }
    if constexpr (Tail::mean_follows_norm) {
      // Means of channels follow from the sums of rows.
      for (int r = static_cast<int>(threadIdx.x); r < Numbers::tile_channels; r += gemm::consumer_threads) {
        if (begin + r >= Tail::channels) break;
        float sum;
        if constexpr (Numbers::groups_share_positions) {
          sum = thread.s.rows(r / 64, r % 64).x * thread.s.rows(r / 64, r % 64).y;
        } else {
          sum = thread.s.rows(0, r).x * thread.s.rows(0, r).y + thread.s.rows(1, r).x * thread.s.rows(1, r).y;
        }
        thread.p.sums[(item.n * Tail::channels + begin + r) * Numbers::position_tiles + item.position_tile] =
            sum;
      }
    }
  }
};

}  // namespace onepass
