// The schedule "overlapped" of tail_staged: the moments of a slab, from a thread's sums to the cluster's.
#pragma once

#include "tail/staged/overlapped_pieces.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct StagedOverlapped<Tail, Numbers>::Statistics {
  template <int count>
  static __device__ __forceinline__ float merge(const float4* parts, float& mean, float& m2) {
    float from, moved;
    const float elements = merge_parts<count>(parts, from, moved, m2);
    mean = from + moved;
    return elements;
  }

  // The warp's elements, mean and M2 go to the block; the last warp sends the block's to the cluster. Returns
  // the warp's sum of squared distances from its pivot.
  static __device__ __forceinline__ float send(const Pieces& pieces, const Part& part, const Sums& sums,
                                               int round) {
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int k = 0; k < S::accumulators; ++k) sum += sums.sum[k], square += sums.square[k];
    sum = lanes_sum<32>(sum);
    square = lanes_sum<32>(square);
    float elements = static_cast<float>(pieces.elements_of(part));
    const float distance = sum * (elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f);
    float mean = sums.pivot + distance;
    // Not below zero: what is left of a constant slab.
    float m2 = pointwise::maximum(fmaf(-distance, sum, square), 0.0f);
#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
    if (S::blocks > 1 && threadIdx.x == 0) barrier::expect(&pieces.shared.received[parity], S::blocks * 16);
    uint32 before = 0;
    if (pieces.lane() == 0) {
      pieces.shared.of_warps[parity][pieces.warp()] = float4{elements, mean, m2, 0.0f};
      barrier::arrive(&pieces.shared.warps_given[parity]);
      if constexpr (S::blocks > 1) before = atomicAdd(&pieces.shared.warps_counted, 1u);
    }
    if constexpr (S::blocks > 1) {
      before = __shfl_sync(0xffffffffu, before, 0);
      if (before % S::warps == S::warps - 1) {
        barrier::wait(&pieces.shared.warps_given[parity], round / 2 & 1);  // a short wait: all have counted
        elements = merge<S::warps>(pieces.shared.of_warps[parity], mean, m2);
        if (pieces.lane() < S::blocks) {
          barrier::send(&pieces.shared.of_blocks[parity][pieces.block], float4{elements, mean, m2, 0.0f},
                        &pieces.shared.received[parity], pieces.lane());
        }
      }
    }
#endif
    return square;
  }

  // Whether f16 holds all distances of a warp whose squares have this sum. Small distances are rounded by
  // 2^-25 at most, which the norm may make 2^-12.
  static __device__ __forceinline__ bool fits_f16(float square, float rstd) {
    constexpr float largest = 65504.0f;
    return square <= largest * largest && rstd <= 8192.0f;
  }

  // The slab's mean, 1 / deviation, and what the norm's weight is multiplied by.
  static __device__ __forceinline__ void receive(Shared& shared, int round, float& mean, float& rstd,
                                                 float& factor) {
    float m2 = 0.0f;
    constexpr float per_element = 1.0f / static_cast<float>(S::slab_elements);
#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    const uint32 phase = round / 2 & 1;
    if constexpr (S::blocks == 1) {
      barrier::wait(&shared.warps_given[parity], phase);
      merge<S::warps>(shared.of_warps[parity], mean, m2);
    } else {
      barrier::wait(&shared.received[parity], phase);
      merge<S::blocks>(shared.of_blocks[parity], mean, m2);
    }
#endif
    rstd = rsqrtf(m2 * per_element + Tail::eps);
    factor = norm_factor<Tail>(rstd, mean, m2);
  }
};

}  // namespace onepass
