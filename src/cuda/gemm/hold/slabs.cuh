// Statistics of slabs from the parts that the tiles of gemm/wgmma.cuh leave.
#pragma once

#include "gemm/gemm.cuh"

namespace onepass {

// Each tile with channels of a slab leaves a part of it.
template <class C, class Tail, class Numbers>
struct GemmSlabs {
  using Parameters = GemmParameters<Tail::parameters>;
  using Output = typename Tail::Output;
  static constexpr int group_rows = Tail::group_channels * GemmGeometry<C, Numbers>::classes;
  static constexpr int slabs_of_sample = Tail::channels / Tail::group_channels;
  // Channel tiles a slab may have channels in.
  static constexpr int spans = (group_rows - 1) / Numbers::tile_channels + 2;
  static constexpr bool one_span = Numbers::tile_channels % group_rows == 0;
  static constexpr int agents = Numbers::apart ? 2 : 1;  // that leave parts of a tile
  static constexpr int position_parts = Numbers::position_tiles * agents;

  const Parameters& p;

  // Where values are stored: a warp for each slab, after all tiles.
  __device__ __forceinline__ void run() const {
    const int64 own = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (own >= p.batch * slabs_of_sample) return;
    const int64 n = own / slabs_of_sample;
    finish(n, static_cast<int>(own - n * slabs_of_sample));
  }

  static __device__ __forceinline__ void merge(Moments& own, const float4& other) {
    if (other.x > 0.0f) own.merge(other.x, other.y, other.z);
  }
  __device__ __forceinline__ float4* part(int64 n, int slab, int channel_tile, int position) const {
    const int span = one_span ? 0 : channel_tile - slab * group_rows / Numbers::tile_channels;
    return p.parts + ((n * slabs_of_sample + slab) * (one_span ? 1 : spans) + span) * position_parts +
           position;
  }

  // By one warp: mean and 1 / deviation of a slab from all its parts, and what its norm multiplies by.
  struct Statistics {
    float mean;
    float rstd;
    float factor;
  };
  __device__ __forceinline__ Statistics statistics(int64 n, int slab) const {
    const int first_tile = slab * group_rows / Numbers::tile_channels;
    const int last_tile = ((slab + 1) * group_rows - 1) / Numbers::tile_channels;
    const int count = (last_tile - first_tile + 1) * position_parts;
    const float4* parts = part(n, slab, first_tile, 0);
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    constexpr int of_lane = ((one_span ? 1 : spans) * position_parts + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float mean, m2;
    if constexpr (of_lane <= 8) {
      // All at once, the mean first: blocks wait for this.
      float4 own[of_lane];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < of_lane; ++i)
        own[i] = lane + 32 * i < count ? __ldcg(parts + lane + 32 * i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
      // As distances from the first part's.
      const float from = first_mean<32>(own[0].x, own[0].y);
#pragma unroll
      for (int i = 0; i < of_lane; ++i) sum = fmaf(own[i].x, own[i].y - from, sum);
      const float moved = lanes_sum<32>(sum) / elements;
      mean = from + moved;
      m2 = 0.0f;
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        const float distance = own[i].y - from - moved;
        m2 += fmaf(own[i].x * distance, distance, own[i].z);
      }
      m2 = lanes_sum<32>(m2);
    } else {
      Moments own;
#pragma unroll 4
      for (int i = lane; i < count; i += 32) merge(own, __ldcg(parts + i));
      team_moments<32, gemm::consumer_threads>(own, elements, nullptr, mean, m2);
    }
    const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
    return {mean, rstd, norm_factor<Tail>(rstd, mean, m2)};
  }

  // By one warp: the slab's statistics, and what is known then.
  __device__ __forceinline__ void finish(int64 n, int slab) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Statistics own = statistics(n, slab);
    float* to = p.statistics + 2 * (n * slabs_of_sample + slab);
    if (lane == 0) {
      to[0] = own.mean;
      to[1] = own.rstd;
    }
    for (int i = lane; i < Tail::group_channels; i += 32) {
      const int c = slab * Tail::group_channels + i;
      const int of_norm = Tail::channel(n, c);
      const float weight = Tail::weight(p, of_norm);
      if constexpr (Numbers::guards) gemm::judge<Tail, Numbers>(p, n, fabsf(weight * own.rstd));
      if constexpr (Tail::mean_follows_norm) {
        const float mean = row_sum(n * Tail::channels + c) / static_cast<float>(Tail::spatial);
        store_one<Output>(p.output, n * Tail::channels + c,
                          fmaf(mean - own.mean, weight * own.factor, Tail::bias(p, of_norm)));
      }
    }
  }

  __device__ __forceinline__ float row_sum(int64 row) const {
    double total = 0.0;
    for (int i = 0; i < Numbers::position_tiles; ++i)
      total += static_cast<double>(__ldcg(p.sums + row * Numbers::position_tiles + i));
    return static_cast<float>(total);
  }
};

}  // namespace onepass
