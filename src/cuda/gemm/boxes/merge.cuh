// What the row "gemm_boxes" computes from what tiles have left: statistics of slabs, and means.
#pragma once

#include "gemm/boxes/hold.cuh"

namespace onepass {

// A warp for each slab: statistics from all its parts, in a fixed order, as distances from the first one's
// mean.
template <class C, class Tail, class Numbers>
struct BoxesMerge {
  using Hold = BoxesHold<C, Tail, Numbers>;
  static constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);

  template <class Parameters>
  static __device__ __forceinline__ void run(const Parameters& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64 slab = static_cast<int64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (slab >= p.batch * Hold::slabs_of_sample) return;
    const float4* const parts = p.parts + slab * Hold::unit_tiles;
    const float from = __ldcg(parts).y;
    float sum = 0.0f, m2 = 0.0f;
#pragma unroll 4
    for (int i = lane; i < Hold::unit_tiles; i += 32) {
      const float4 own = __ldcg(parts + i);
      sum = fmaf(own.x, own.x > 0.0f ? own.y - from : 0.0f, sum);
    }
    const float moved = lanes_sum<32>(sum) / elements;
#pragma unroll 4
    for (int i = lane; i < Hold::unit_tiles; i += 32) {
      const float4 own = __ldcg(parts + i);
      const float distance = own.x > 0.0f ? own.y - from - moved : 0.0f;
      m2 += fmaf(own.x * distance, distance, own.z);
    }
    m2 = lanes_sum<32>(m2);
    const float mean = from + moved;
    const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
    if (lane != 0) return;
    p.statistics[2 * slab] = mean;
    p.statistics[2 * slab + 1] = rstd;
    p.lines[slab] = float2{mean, norm_factor<Tail>(rstd, mean, m2)};
  }
};

// A warp for each channel of a sample: the mean of what its tiles have summed up, in a fixed order.
template <class C, class Tail, class Numbers>
struct BoxesMeans {
  template <class Parameters>
  static __device__ __forceinline__ void run(const Parameters& p) {
    constexpr int tiles = Numbers::sums_of_row;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64 row = static_cast<int64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.batch * C::channels) return;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane; i < tiles; i += 32) sum += __ldcg(p.sums + row * tiles + i);
    sum = lanes_sum<32>(sum);
    if (lane == 0) store_one<typename Tail::Output>(p.output, row, sum / static_cast<float>(Tail::spatial));
  }
};

}  // namespace onepass
