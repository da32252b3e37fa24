// The exchange of moments between the blocks of the ping-pong kernel: from parts of slabs to statistics.
#pragma once

#include "device/marked_pair.cuh"
#include "gemm/pingpong/doubled.cuh"
#include "gemm/pingpong/layout.cuh"

namespace onepass::pingpong {

// An extra block without a tile merges the parts that the warpgroups of all tiles publish, a team of lanes
// for each slab, and publishes the statistics. Each value is one 8-byte store to cleared memory; the sign bit
// of its second number marks it valid. So nothing is released or counted, which would queue trips to L2
// behind the stores of outputs. The warps that poll have nothing else to do.
template <class L>
struct Exchange {
  static constexpr int parts = L::position_tiles * L::groups;  // of a slab
  static constexpr int pairs = (parts + 1) / 2;                // parts are read by pairs

  const typename L::Parameters& p;

  // --- By a warpgroup ---
  // The number of elements of its parts, once.
  __device__ __forceinline__ void publish_count(int tile, int group, float count) const {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p.counts + tile * L::groups + group),
                 "f"(count + 1.0f)
                 : "memory");
  }
  __device__ __forceinline__ void publish_part(int64 n, uint32 slab, int tile, int group, float mean,
                                               float m2) const {
    MarkedPair::publish(part(n, slab) + (tile * L::groups + group), MarkedPair::encode(mean, m2));
  }
  // By a converting warp: the bits of the largest magnitude of x in its part of the tile.
  __device__ __forceinline__ void publish_largest(int64 n, int tile, uint32 warp, uint32 bits) const {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(largest(n, tile) + warp), "r"(bits | sign)
                 : "memory");
  }
  // Copies the statistics of two slabs, the first of them even, to shared memory at `to`, valid or not. The
  // copy bypasses L1 and takes no register.
  __device__ __forceinline__ void prefetch(int64 n, uint32 slab, uint32 to) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(result(n, slab)) : "memory");
  }
  // Mean of a slab and the norm's factor; `all` was prefetched.
  __device__ __forceinline__ float2 wait(int64 n, uint32 slab, uint64 all) const {
    all = MarkedPair::wait(result(n, slab), all);
    return float2{MarkedPair::low(all), MarkedPair::high(all)};
  }

  // --- By a merger ---
  // Slabs of few parts take few lanes, so that a team waits only for its own slab.
  __device__ __forceinline__ void run() const {
    judge_operands();
    const int lane = static_cast<int>(threadIdx.x % team);
    const uint32 mask =
        team == 32 ? 0xffffffffu : ((1u << (team % 32)) - 1u) << (threadIdx.x % 32 / team * team);
    float counts[of_lane][2];
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int number = 2 * (lane + team * i) + e;
        counts[i][e] = 1.0f;
        if (number < parts) {
          do {
            asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];"
                         : "=f"(counts[i][e])
                         : "l"(p.counts + number)
                         : "memory");
          } while (counts[i][e] == 0.0f);
        }
        counts[i][e] -= 1.0f;
      }
    }
    const int64 all = p.batch * L::slabs;
#pragma unroll 1
    for (int64 i = threadIdx.x / team; i < all; i += blockDim.x / team) {
      const int64 n = i / L::slabs;
      merge(n, static_cast<uint32>(i - n * L::slabs), lane, mask, counts);
    }
  }

 private:
  static constexpr uint32 sign = MarkedPair::sign;

  // The parts of a slab: mean and M2. Behind the parts of all samples come the results: the mean of each slab
  // and the norm's factor.
  __device__ __forceinline__ uint64* part(int64 n, uint32 slab) const {
    return p.parts + (n * L::slabs + slab) * (2 * pairs);
  }
  __device__ __forceinline__ uint64* result(int64 n, uint32 slab) const {
    return part(p.batch, 0) + n * ((L::slabs + 1) / 2 * 2) + slab;
  }

  // Marks all samples where a weight is not finite or x does not begin on 16 bytes; the largest sum of a
  // channel's weights is for `judge`.
  __device__ __forceinline__ void judge_operands() const {
    if (threadIdx.x < 32) {
      float largest = 0.0f;
      bool is_finite = true;
#pragma unroll
      for (int c = static_cast<int>(threadIdx.x); c < L::rows; c += 32) {
        const float sum = p.sums[c];
        is_finite = is_finite && sum == sum;
        largest = fmaxf(largest, sum);
      }
      // Magnitudes are ordered as their bits.
      const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      is_finite = __all_sync(0xffffffffu, is_finite);
      if (threadIdx.x == 0) {
        p.scales[L::Numbers::padded_channels] = __uint_as_float(bits);
        if (!is_finite || reinterpret_cast<uint64>(p.input) % 16 != 0)
          atomicMax(p.only + p.batch, static_cast<uint32>(redo_all));
      }
    }
    __syncthreads();
  }
  // The largest magnitudes that the converting warps of a tile saw.
  __device__ __forceinline__ uint32* largest(int64 n, int tile) const {
    return p.guard + (n * L::position_tiles + tile) * converting_warps;
  }

  // rsqrtf, improved by one Newton step where it is finite.
  static __device__ __forceinline__ float inverse_root(float x) {
    const float y = rsqrtf(x);
    const float better = fmaf(fmaf(-0.5f * x * y, y, 0.5f), y, y);
    return x > 0.0f && y > 0.0f ? better : y;
  }

  static constexpr int team = pairs > 16 ? 32 : pairs > 8 ? 16 : pairs > 4 ? 8 : pairs > 2 ? 4 : 2;  // lanes
  static constexpr int of_lane = (pairs + team - 1) / team;
  static __device__ __forceinline__ float add_lanes(float value, uint32 mask) {
#pragma unroll
    for (int offset = team / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(mask, value, offset);
    return value;
  }
  // One pass over the parts: sums of distances from the first part's mean, and of their squares. That mean is
  // at most sqrt(parts) deviations from the mean of all.
  __device__ __forceinline__ void merge(int64 n, uint32 slab, int lane, uint32 mask,
                                        const float (&counts)[of_lane][2]) const {
    constexpr float elements = static_cast<float>(L::Tail::group_channels * L::Tail::spatial);
    const uint64* const from = part(n, slab) + 2 * lane;
    uint64 two[of_lane][2];
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
      two[i][0] = 2 * (lane + team * i) < parts ? 0 : ~uint64{0};
      two[i][1] = 2 * (lane + team * i) + 1 < parts ? 0 : ~uint64{0};
    }
    // Polls all that are not valid yet.
    bool has_all;
    do {
      has_all = true;
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        if (!MarkedPair::is_valid(two[i][0] & two[i][1])) {
          asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                       : "=l"(two[i][0]), "=l"(two[i][1])
                       : "l"(from + 2 * team * i)
                       : "memory");
        }
      }
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        if (parts % 2 != 0 && 2 * (lane + team * i) + 1 == parts) two[i][1] = ~uint64{0};
        has_all = has_all && MarkedPair::is_valid(two[i][0] & two[i][1]);
      }
    } while (!has_all);
    const float origin = __shfl_sync(mask, MarkedPair::low(two[0][0]), 0, team);
    float sum = 0.0f, square = 0.0f;
    bool is_flat = true;
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (2 * (lane + team * i) + e < parts) {
          is_flat = is_flat && MarkedPair::high(two[i][e]) == 0.0f;
          const float distance = MarkedPair::low(two[i][e]) - origin;
          sum = fmaf(counts[i][e], distance, sum);
          square += fmaf(counts[i][e] * distance, distance, MarkedPair::high(two[i][e]));
        }
      }
    }
    sum = add_lanes(sum, mask) * (1.0f / elements);
    square = add_lanes(square, mask) * (1.0f / elements);
    constexpr float times = Doubled<typename L::Tail::Before::Only, L::Output::bytes>::exists ? 2.0f : 1.0f;
    const float variance = fmaf(-sum, sum, square);  // NaN stays NaN
    const float2 all{origin + sum,
                     inverse_root(fmaf(times * times, L::Tail::eps, variance < 0.0f ? 0.0f : variance))};
    // Where all values are equal, the means of parts differ only by rounding. The norm's factor is then 0 and
    // the result is exactly its bias.
    const float least = all.x * 0x1p-19f;
    is_flat = __all_sync(mask, is_flat) && variance <= least * least && L::Tail::eps > 0.0f &&
              (fabsf(all.x) > 0x1p-35f || all.x == 0.0f);  // below, squares may have underflowed
    if (lane == 0) {
      MarkedPair::publish(result(n, slab), MarkedPair::encode(all.x, is_flat ? 0.0f : all.y));
      float* const to = p.statistics + 2 * (n * L::slabs + slab);
      to[0] = all.x / times;
      to[1] = all.y * times;
    }
    if constexpr (L::Numbers::guards) judge(n, slab, all.y * times, lane, mask);
  }
  // Marks the sample where its x does not fit in f16. Every slab checks with its own deviation.
  __device__ __forceinline__ void judge(int64 n, uint32 slab, float scale, int lane, uint32 mask) const {
    constexpr int count = (L::position_tiles + team - 1) / team;
    static_assert(converting_warps == 4);
    uint4 own[count];
    const auto has = [](const uint4& bits) { return (bits.x & bits.y & bits.z & bits.w & sign) != 0; };
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const uint32 none = lane + team * i < L::position_tiles ? 0 : sign;
      own[i] = uint4{none, none, none, none};
    }
    // Polls all that are not valid yet.
    bool has_all;
    do {
      has_all = true;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (!has(own[i])) {
          asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(own[i].x), "=r"(own[i].y), "=r"(own[i].z), "=r"(own[i].w)
                       : "l"(largest(n, lane + team * i))
                       : "memory");
        }
      }
#pragma unroll
      for (int i = 0; i < count; ++i) has_all = has_all && has(own[i]);
    } while (!has_all);
    uint32 most = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      most = max(most, max(max(own[i].x, own[i].y), max(own[i].z, own[i].w)) & ~sign);
    }
#pragma unroll
    for (int offset = team / 2; offset > 0; offset /= 2) {
      const uint32 other = __shfl_xor_sync(mask, most, offset);
      most = other > most ? other : most;
    }
    for (int i = lane; i < L::Tail::group_channels; i += team) {
      const float weight = L::Tail::weight(p, static_cast<int>(slab) * L::Tail::group_channels + i);
      gemm::judge<typename L::Tail, typename L::Numbers>(p, n, __uint_as_float(most), fabsf(weight * scale));
    }
  }
};

}  // namespace onepass::pingpong
