// Merges the moments of a sample's tiles. Channels are merged to groups, 32 tiles to a set, and sets to the
// sample. The warp that arrives last merges: a sample's second pass does not wait for a chain of loads.
#pragma once

#include "thin/mma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Statistics {
  const Warp warp;

  static constexpr int tiles_of_set = 32;
  static constexpr int sets = (Numbers::tiles + tiles_of_set - 1) / tiles_of_set;

  __device__ __forceinline__ float* part_of(int64 n, int index) const {
    return warp.p.parts + (n * Numbers::tiles + index) * groups * 3;
  }

  // Whether this warp is the last of `count` to arrive.
  __device__ __forceinline__ bool arrives_last(uint32* counter, uint32 count) const {
    __syncwarp();
    uint32 before = 0;
    if (warp.lane == 0) before = count_up(counter);
    return __shfl_sync(0xffffffffu, before, 0) == count - 1;
  }

  // body(group, elements, mean, M2) of the parts that lie `step` tiles apart.
  template <int step, class Body>
  __device__ __forceinline__ void merge_parts(int64 n, int first, int count, Body&& body) const {
    constexpr int at_once = groups < 4 ? groups : 4;
#pragma unroll 1
    for (int group = 0; group < groups; group += at_once) {
      Moments all[at_once];
#pragma unroll 2
      for (int i = warp.lane; i < count; i += 32) {
        const float* from = part_of(n, first + i * step) + group * 3;
        float part[at_once][3];
#pragma unroll
        for (int k = 0; k < at_once * 3; ++k)
          part[k / 3][k % 3] = group + k / 3 < groups ? load_shared_by_blocks(from + k) : 0.0f;
#pragma unroll
        for (int k = 0; k < at_once; ++k) all[k].merge(part[k][0], part[k][1], part[k][2]);
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const float elements = lanes_sum<32>(all[k].count);
        float mean, m2;
        team_moments<32, threads>(all[k], elements, nullptr, mean, m2);
        if (group + k < groups) body(group + k, elements, mean, m2);
      }
    }
  }

  __device__ __forceinline__ void merge(const Tile& tile) const {
    __syncwarp();
    for (int group = warp.lane; group < groups; group += 32) {
      Moments all;
#pragma unroll 1
      for (int i = 0; i < Tail::group_channels; ++i) {
        const float* from = warp.area.moments[group * Tail::group_channels + i];
        all.merge(from[0], from[1], from[2]);
      }
      float* to = part_of(tile.n, tile.index) + group * 3;
      to[0] = all.count;
      to[1] = all.mean;
      to[2] = all.m2;
    }
    const int first = tile.index / tiles_of_set * tiles_of_set;
    const int left = Numbers::tiles - first;
    const int count = left < tiles_of_set ? left : tiles_of_set;
    if (!arrives_last(warp.p.sets + tile.n * sets + tile.index / tiles_of_set, count)) return;
    uint32* counters = warp.p.control + 4 + tile.n * 4;
    if constexpr (sets > 1) {
      merge_parts<1>(tile.n, first, count, [&](int group, float elements, float mean, float m2) {
        if (warp.lane == 0) {
          float* to = part_of(tile.n, first) + group * 3;
          to[0] = elements;
          to[1] = mean;
          to[2] = m2;
        }
      });
      if (!arrives_last(counters, sets)) return;
    }
    merge_parts<(sets > 1 ? tiles_of_set : 1)>(
        tile.n, 0, sets > 1 ? sets : count, [&](int group, float, float mean, float m2) {
          constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
          if (warp.lane == 0) {
            const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
            float* to = warp.p.statistics + 2 * (tile.n * groups + group);
            to[0] = mean;
            to[1] = rstd;
            // Pass 2 reads it where the first part was. All lanes have read that part.
            float* norm = part_of(tile.n, 0) + group * 3;
            norm[0] = mean;
            norm[1] = norm_factor<Tail>(rstd, mean, m2);
          }
        });
    if (warp.lane == 0) release(counters + 2, 1u);  // lane 0 wrote all of them
  }
};

}  // namespace onepass
