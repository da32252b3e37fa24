// gemm_turns.cuh: the moments of a sample, from those that its tiles leave.
#pragma once

#include "gemm_turns_shared.cuh"

namespace onepass {

// One warp takes the tile's parts of all slabs to other tiles and brings the statistics of the sample. Each
// slab of a sample has an owner among its tiles that merges the parts of all and leaves what they come to.
// What is left is 8 bytes that arrive at once, in memory that was cleared, with a sign where there is none
// otherwise: whoever reads it knows whether it is there. So nothing is released and nothing counted, which
// would be trips to L2 one after the other, behind stores of outputs; and only an owner asks for parts again
// and again.
template <class C, class Tail, class Numbers>
struct GemmTurnsExchange {
  using Parameters = GemmTurnsParameters<Tail::parameters>;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr int groups = Numbers::groups;
  static constexpr int slabs = GemmSlabs<C, Tail, Numbers>::slabs_of_sample;
  static constexpr int tiles = Numbers::position_tiles;

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = Item(blockIdx.x, 1).position_tile;  // that the block has of every sample

  __device__ __forceinline__ void run() const {
    gemm::Ring<2> ring;
    const int samples = static_cast<int>(gridDim.x) / tiles;
#pragma unroll 1
    for (int n = static_cast<int>(Item(blockIdx.x, 1).n); n < static_cast<int>(p.batch); n += samples) {
      barrier::wait(&s.parts_full[ring.stage], ring.round);
#pragma unroll 1
      for (int slab = lane; slab < slabs; slab += 32) leave_part(n, slab, s.parts[ring.stage]);
#pragma unroll 1
      for (int slab = first_owned(n); slab < slabs; slab += tiles) merge(n, slab);
#pragma unroll 1
      for (int slab = lane; slab < slabs; slab += 32) {
        uint64 all;
        do {
          asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(all) : "l"(result(n, slab)) : "memory");
        } while (!is_there(all));
        s.statistics[ring.stage][slab] = float2{low(all), high(all)};
      }
      __syncwarp();
      if (lane == 0) barrier::arrive(&s.statistics_full[ring.stage]);
      ring.next();
    }
  }

 private:
  // Two numbers, the second of them not negative.
  static constexpr uint32 sign = 0x80000000u;
  static __device__ __forceinline__ uint64 both(float low, float high) {
    return static_cast<uint64>(__float_as_uint(high) | sign) << 32 | __float_as_uint(low);
  }
  static __device__ __forceinline__ bool is_there(uint64 both) { return both >> 63 != 0; }
  static __device__ __forceinline__ float low(uint64 both) {
    return __uint_as_float(static_cast<uint32>(both));
  }
  static __device__ __forceinline__ float high(uint64 both) {
    return __uint_as_float(static_cast<uint32>(both >> 32) & ~sign);
  }
  static __device__ __forceinline__ void leave(uint64* to, uint64 both) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
  }

  // What a tile has of a slab: mean and M2. Two tiles are read at a time. After those of all samples: mean
  // and 1 / deviation of each slab.
  static constexpr int pairs = (tiles + 1) / 2;
  __device__ __forceinline__ uint64* part(int64 n, int slab, int of_tile) const {
    return reinterpret_cast<uint64*>(p.parts) + (n * slabs + slab) * (2 * pairs) + of_tile;
  }
  __device__ __forceinline__ uint64* result(int64 n, int slab) const {
    return part(p.batch, 0, 0) + n * slabs + slab;
  }
  // Of a sample's slabs the first that this tile is the owner of, or none.
  __device__ __forceinline__ int first_owned(int n) const {
    const int of_first = static_cast<int>(static_cast<uint32>(n) * static_cast<uint32>(slabs) % tiles);
    return tile >= of_first ? tile - of_first : tile - of_first + tiles;
  }

  // The tile's own part of a slab, from those of its warpgroups. The first of them has some.
  __device__ __forceinline__ void leave_part(int n, int slab, const float4 (&of)[groups][slabs]) const {
    const float4 first = of[0][slab];
    float count = first.x, sum = 0.0f;
#pragma unroll
    for (int g = 1; g < groups; ++g) {
      count += of[g][slab].x;
      sum = fmaf(of[g][slab].x, of[g][slab].y - first.y, sum);
    }
    const float mean = fmaf(sum, pointwise::reciprocal_fast(count), first.y);
    float m2 = 0.0f;
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const float distance = of[g][slab].y - mean;
      m2 += fmaf(of[g][slab].x * distance, distance, of[g][slab].z);
    }
    leave(part(n, slab, tile), both(mean, m2));
  }

  // Elements of a tile's part.
  static __device__ __forceinline__ float elements_of(int of_tile) {
    if constexpr (Geometry::outputs(0) % Numbers::box_z == 0 && Geometry::outputs(1) % Numbers::box_y == 0 &&
                  Geometry::outputs(2) % Numbers::box_x == 0)
      return static_cast<float>(Tail::group_channels * Numbers::box_z * Numbers::box_y * Numbers::box_x);
    const typename Geometry::Box box(of_tile);
    constexpr int sizes[3] = {Numbers::box_z, Numbers::box_y, Numbers::box_x};
    int count = Tail::group_channels;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      const int left = Geometry::outputs(d) - box.first[d];
      count *= left < sizes[d] ? left : sizes[d];
    }
    return static_cast<float>(count);
  }

  static __device__ __forceinline__ void load(const uint64* from, uint64 (&two)[2]) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(two[0]), "=l"(two[1])
                 : "l"(from)
                 : "memory");
  }
  // Better than the instruction's by a step of Newton's, if it is finite.
  static __device__ __forceinline__ float inverse_root(float x) {
    const float y = rsqrtf(x);
    const float better = fmaf(fmaf(-0.5f * x * y, y, 0.5f), y, y);
    return x > 0.0f && y > 0.0f ? better : y;
  }
  // Sums of distances from the first part's mean, and of their squares: in one pass. That mean is one of
  // them, so that it is no further from the mean of all than the root of their number in deviations.
  __device__ __forceinline__ void merge(int n, int slab) const {
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    constexpr int of_lane = (pairs + 31) / 32;
    const uint64* const from = part(n, slab, 2 * lane);
    uint64 two[of_lane][2];
#pragma unroll
    for (int i = 0; i < of_lane; ++i) two[i][0] = two[i][1] = lane + 32 * i < pairs ? 0 : ~uint64{0};
    // All that are not there yet, again and again. The last tile may be alone.
    bool has_all;
    do {
      has_all = true;
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        if (!is_there(two[i][0] & two[i][1])) load(from + 64 * i, two[i]);
      }
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        if (tiles % 2 != 0 && 2 * (lane + 32 * i) + 1 == tiles) two[i][1] = ~uint64{0};
        has_all = has_all && is_there(two[i][0] & two[i][1]);
      }
    } while (!has_all);
    __syncwarp();
    const float origin = __shfl_sync(0xffffffffu, low(two[0][0]), 0);
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < of_lane; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int other = 2 * (lane + 32 * i) + e;
        if (other < tiles) {
          const float count = elements_of(other);
          const float distance = low(two[i][e]) - origin;
          sum = fmaf(count, distance, sum);
          square += fmaf(count * distance, distance, high(two[i][e]));
        }
      }
    }
    sum = lanes_sum<32>(sum) * (1.0f / elements);
    square = lanes_sum<32>(square) * (1.0f / elements);
    const float2 all{origin + sum, inverse_root(fmaxf(fmaf(-sum, sum, square), 0.0f) + Tail::eps)};
    if (lane == 0) {
      leave(result(n, slab), both(all.x, all.y));
      float* const to = p.statistics + 2 * (static_cast<int64>(n) * slabs + slab);
      to[0] = all.x;
      to[1] = all.y;
    }
  }
};

}  // namespace onepass
