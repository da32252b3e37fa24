// Sums over lanes, warps and blocks, and moments (count, mean, M2), always in the same order.
#pragma once

#include "device/types.cuh"

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

  __device__ __forceinline__ float distance(float from) const { return mean - from; }

  // Takes in `n` elements of this mean and M2 (Chan). The quotient is a weight: its error of 1 ulp moves the
  // mean by that part of the distance between the two means. The first mean is taken as it is. Its square may
  // be more than f32 has room for.
  __device__ __forceinline__ void merge(float n, float other_mean, float other_m2) {
    const float total = count + n;
    float weight;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(total));
    weight = count > 0.0f ? weight * n : 1.0f;
    const float distance = other_mean - mean;
    mean = fmaf(distance, weight, mean);
    m2 = fmaf(distance * (count * weight), distance, m2 + other_m2);
    count = total;
  }
};

// a + b, and what rounding took from it (Knuth).
__device__ __forceinline__ float sum_and_rest(float a, float b, float& rest) {
  const float sum = a + b;
  const float of_b = sum - a;
  rest = (a - (sum - of_b)) + (b - of_b);
  return sum;
}

// Moments whose mean is two numbers: `low` is what rounding took from it.
struct ExactMoments {
  float count = 0.0f;
  float mean = 0.0f;
  float m2 = 0.0f;
  float low = 0.0f;

  __device__ __forceinline__ float distance(float from) const { return (mean - from) + low; }

  __device__ __forceinline__ void merge(const ExactMoments& other) {
    if (count == 0.0f) {
      *this = other;
      return;
    }
    const float total = count + other.count;
    float weight;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(total));
    weight *= other.count;
    const float distance = (other.mean - mean) + (other.low - low);
    mean = sum_and_rest(mean, fmaf(distance, weight, low), low);
    m2 = fmaf(distance * (count * weight), distance, m2 + other.m2);
    count = total;
  }
};

// How far a value is from a mean, or from a pivot. Never fused with the product that the value may be: a
// value that is rounded in one place and not in another differs from itself.
__device__ __forceinline__ float distance_from(float value, float mean) { return __fsub_rn(value, mean); }

// What a norm multiplies distances from its mean by, given 1 / deviation: 0 where all values of the slab are
// the same number, as M2 says. x * scale + shift is then the shift, which is the norm's bias exactly. Without
// an eps the result is no number, as PyTorch's.
template <class Tail>
__device__ __forceinline__ float norm_factor(float rstd, float mean, float m2) {
  const float least = mean * 0x1p-25f;  // less than half of what two numbers near the mean differ by
  // Below 2^-35 squares of what they differ by are no normal numbers, and M2 says nothing.
  const bool is_known = Tail::eps > 0.0f && fabsf(mean) > 0x1p-35f;
  return is_known && m2 <= least * least ? 0.0f : rstd;
}

// A norm that knows its mean and deviation alone. An instruction more than x * scale + shift, and exact where
// x is the mean.
__device__ __forceinline__ float normalise(float x, float mean, float scale, float bias) {
  return fmaf(distance_from(x, mean), scale, bias);
}

// Sums of distances from a pivot, the mean of some first values, and of their squares. Those of
// equal values are 0.
template <int Lines>
struct PivotSums {
  float pivot = 0.0f;
  float sum[Lines] = {};
  float square[Lines] = {};

  // The mean of values, exactly if they are equal.
  template <int Count>
  static __device__ __forceinline__ float mean_of(const float (&value)[Count]) {
    float all = 0.0f;
#pragma unroll
    for (int k = 1; k < Count; ++k) all += distance_from(value[k], value[0]);
    return fmaf(all, 1.0f / Count, value[0]);
  }

  __device__ __forceinline__ void add_distance(float distance, int k) {
    sum[k % Lines] += distance;
    square[k % Lines] = fmaf(distance, distance, square[k % Lines]);
  }
  // The value's distance.
  __device__ __forceinline__ float add(float value, int k) {
    const float distance = distance_from(value, pivot);
    add_distance(distance, k);
    return distance;
  }

  // Those of `Lanes` neighbouring lanes that have the same pivot, in each of them.
  template <int Lanes>
  __device__ __forceinline__ void sum_lanes() {
#pragma unroll
    for (int k = 1; k < Lines; ++k) {
      sum[0] += sum[k];
      square[0] += square[k];
      sum[k] = square[k] = 0.0f;
    }
    sum[0] = lanes_sum<Lanes>(sum[0]);
    square[0] = lanes_sum<Lanes>(square[0]);
  }

  // The mean's distance from the pivot, and M2.
  __device__ __forceinline__ void finish(float count, float& moved, float& m2) const {
    float all = sum[0], squares = square[0];
#pragma unroll
    for (int k = 1; k < Lines; ++k) {
      all += sum[k];
      squares += square[k];
    }
    float per_element;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(per_element) : "f"(count));
    moved = count > 0.0f ? all * per_element : 0.0f;
    // Not below zero: what is left of equal values. NaN stays.
    const float left = fmaf(-all, moved, squares);
    m2 = left < 0.0f ? 0.0f : left;
  }
};

// Of `Lanes` neighbouring lanes the mean of the first one that has elements.
template <int Lanes>
__device__ __forceinline__ float first_mean(float count, float mean) {
  const uint32 first = threadIdx.x % 32 & ~(Lanes - 1u);
  const uint32 team = Lanes == 32 ? 0xffffffffu : ((1u << (Lanes % 32)) - 1u) << first;
  const uint32 have = __ballot_sync(0xffffffffu, count > 0.0f) & team;
  return __shfl_sync(0xffffffffu, mean, have == 0 ? first : __ffs(static_cast<int>(have)) - 1);
}

// The moments of `Lanes` neighbouring lanes together, in each of them: the mean first, as its distance
// `moved` from one of theirs (`from`), then every M2 moved to it. Two sums instead of a tree of merges. Equal
// means stay what they are, and large ones lose nothing.
template <int Lanes, class Own>
__device__ __forceinline__ void lanes_moments(const Own& own, float per_element, float& from, float& moved,
                                              float& m2) {
  from = first_mean<Lanes>(own.count, own.mean);
  const float distance = own.distance(from);
  moved = lanes_sum<Lanes>(own.count * distance) * per_element;
  m2 = lanes_sum<Lanes>(fmaf(own.count * (distance - moved), distance - moved, own.m2));
}

// The moments of the elements of `Threads` threads together; `elements` is their number. Lanes is 32 or less
// for a team inside a warp, else Threads. `scratch` holds 4 * Threads / 32 floats. `low` is what the mean has
// no bits for.
template <int Lanes, int Threads, class Own>
__device__ __forceinline__ void team_moments(const Own& own, float elements, float* scratch, float& mean,
                                             float& low, float& m2) {
  float from, moved;
  const float per_element = elements > 0.0f ? 1.0f / elements : 0.0f;
  if constexpr (Lanes <= 32) {
    lanes_moments<Lanes>(own, per_element, from, moved, m2);
  } else {
    constexpr int warps = Threads / 32;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    ExactMoments part{lanes_sum<32>(own.count), 0.0f, 0.0f, 0.0f};
    lanes_moments<32>(own, part.count > 0.0f ? 1.0f / part.count : 0.0f, from, moved, part.m2);
    part.mean = sum_and_rest(from, moved, part.low);
    __syncthreads();
    if (lane == 0) {
      scratch[warp] = part.count;
      scratch[warps + warp] = part.mean;
      scratch[2 * warps + warp] = part.m2;
      scratch[3 * warps + warp] = part.low;
    }
    __syncthreads();
    part = {};
    if (lane < warps) {
      part = {scratch[lane], scratch[warps + lane], scratch[2 * warps + lane], scratch[3 * warps + lane]};
    }
    lanes_moments<32>(part, per_element, from, moved, m2);
  }
  mean = sum_and_rest(from, moved, low);
}
template <int Lanes, int Threads>
__device__ __forceinline__ void team_moments(const Moments& own, float elements, float* scratch, float& mean,
                                             float& m2) {
  float low;
  team_moments<Lanes, Threads>(own, elements, scratch, mean, low, m2);
}

}  // namespace onepass
