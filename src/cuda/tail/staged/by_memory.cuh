// tail_staged with more blocks than a cluster has: what they tell each other goes through memory. All of them
// are resident.
#pragma once

#include "device/marked_pair.cuh"
#include "tail/parameters.cuh"
#include "tail/staged/cluster.cuh"

namespace onepass {

// The moments of a block, given and left in `from`, `moved` and `m2`, become those of all blocks that have
// the slab; count_of(block) is the number of a block's elements. By one warp. Every slab has words of its
// own.
template <class S, class Parameters, class CountOf>
__device__ __forceinline__ void exchange_by_memory(const Parameters& p, int slab, int block,
                                                   CountOf&& count_of, float& from, float& moved, float& m2) {
  constexpr int of_lane = (S::blocks + 31) / 32;
  const int lane = threadIdx.x % 32;
  auto* const words =
      reinterpret_cast<uint64*>(p.control + exchange_counters) + static_cast<int64>(slab) * S::blocks;
  if (lane == 0) MarkedPair::publish(words + block, MarkedPair::encode(from + moved, m2));
  float count[of_lane], distance[of_lane], own_m2[of_lane];
#pragma unroll
  for (int i = 0; i < of_lane; ++i) {
    const int other = lane + i * 32;
    count[i] = distance[i] = own_m2[i] = 0.0f;
    if (other < S::blocks) {
      const uint64 word = MarkedPair::wait(words + other);
      count[i] = count_of(other);
      distance[i] = MarkedPair::low(word);
      own_m2[i] = MarkedPair::high(word);
    }
  }
  // As lanes_moments adds them up. The first block has elements.
  from = __shfl_sync(0xffffffffu, distance[0], 0);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < of_lane; ++i) {
    distance[i] = count[i] > 0.0f ? distance_from(distance[i], from) : 0.0f;
    sum = fmaf(count[i], distance[i], sum);
  }
  moved = lanes_sum<32>(sum) * (1.0f / static_cast<float>(S::slab_elements));
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < of_lane; ++i) {
    distance[i] -= moved;
    squares += fmaf(count[i] * distance[i], distance[i], own_m2[i]);
  }
  m2 = lanes_sum<32>(squares);
}

// All threads of these blocks are here, and see what the others wrote. Once in a launch.
template <class S, class Parameters>
__device__ __forceinline__ void sync_by_memory(const Parameters& p) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32* const arrived = p.control + blockIdx.x / S::blocks;
    count_up(arrived);
    wait_for(arrived, S::blocks);
  }
  __syncthreads();
}

}  // namespace onepass
