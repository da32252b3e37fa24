// Sums over lanes, warps and blocks, and moments (count, mean, M2), always in the same order.
#pragma once

#include "types.cuh"

namespace onepass {

// The sum over `Lanes` neighbouring lanes (a power of two), in each of them.
template <int Lanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// The sums of `Count` values over the block, in every thread. `scratch` holds Count * Threads / 32 floats and
// is free again after the next barrier of the block.
template <int Threads, int Count>
__device__ __forceinline__ void block_sum(float (&value)[Count], float* scratch) {
  constexpr int warps = Threads / 32;
#pragma unroll
  for (int i = 0; i < Count; ++i) value[i] = lanes_sum<32>(value[i]);
  if constexpr (warps > 1) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    __syncthreads();
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < Count; ++i) scratch[i * warps + warp] = value[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      value[i] = lanes_sum<32>(lane < warps ? scratch[i * warps + lane] : 0.0f);
    }
  }
}

// Elements seen so far as their count, mean and sum of squared distances from it.
struct Moments {
  float count = 0.0f;
  float mean = 0.0f;
  float m2 = 0.0f;

  // Takes in `n` elements of this mean and M2 (Chan). The quotient is a weight: its error of 1 ulp moves the
  // mean by that part of the distance between the two means.
  __device__ __forceinline__ void merge(float n, float other_mean, float other_m2) {
    const float total = count + n;
    float weight;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(total));
    weight *= n;
    const float distance = other_mean - mean;
    mean = fmaf(distance, weight, mean);
    m2 = fmaf(distance * distance, count * weight, m2 + other_m2);
    count = total;
  }
};

// The moments of the elements of `Threads` threads together; `elements` is their number. Two sums instead of
// a tree of merges: the mean first, then every thread's M2 moved to it. Lanes is 32 or less for a team inside
// a warp, else Threads.
template <int Lanes, int Threads>
__device__ __forceinline__ void team_moments(const Moments& own, float elements, float* scratch, float& mean,
                                             float& m2) {
  float sum[1] = {own.count * own.mean};
  if constexpr (Lanes <= 32) {
    sum[0] = lanes_sum<Lanes>(sum[0]);
  } else {
    block_sum<Threads>(sum, scratch);
  }
  mean = elements > 0.0f ? sum[0] / elements : 0.0f;
  const float distance = own.mean - mean;
  float square[1] = {fmaf(own.count * distance, distance, own.m2)};
  if constexpr (Lanes <= 32) {
    square[0] = lanes_sum<Lanes>(square[0]);
  } else {
    block_sum<Threads>(square, scratch);
  }
  m2 = square[0];
}

}  // namespace onepass
