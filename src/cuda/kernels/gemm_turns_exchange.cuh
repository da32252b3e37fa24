// gemm_turns.cuh: the moments of a sample, from those that its tiles leave.
#pragma once

#include "gemm_turns_shared.cuh"

namespace onepass {

// One warp takes the parts of all slabs to the other tiles and brings theirs: it has nothing else on its
// way to memory, which others would wait for before they say that their parts are there.
template <class C, class Tail, class Numbers>
struct GemmTurnsExchange {
  using Parameters = GemmTurnsParameters<Tail::parameters>;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Slabs = GemmSlabs<C, Tail, Numbers>;
  static constexpr int groups = Numbers::groups;

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ __forceinline__ void run() const {
    gemm::Ring<2> ring;
    const int64 count = Item::count(p.batch, 1);
#pragma unroll 1
    for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
      const Item item(i, 1);
      barrier::wait_asleep(&s.parts_full[ring.stage], ring.round);
      const auto& parts = s.parts[ring.stage];
      for (int slab = lane; slab < Slabs::slabs_of_sample; slab += 32) {
        Moments own{parts[0][slab].x, parts[0][slab].y, parts[0][slab].z};
#pragma unroll
        for (int g = 1; g < groups; ++g) Slabs::merge(own, parts[g][slab]);
        __stcg(part(item.n, slab, item.position_tile), float2{own.mean, own.m2});
      }
      __syncwarp();
      if (lane == 0) {
        gemm::arrive(p.control + item.n);
        wait_for(p.control + item.n, static_cast<uint32>(Numbers::position_tiles));
      }
      __syncwarp();
      for (int first = 0; first < Slabs::slabs_of_sample; first += Numbers::merge_slabs) {
        fetch(item.n, first);
        merge(item, first, s.statistics[ring.stage]);
      }
      __syncwarp();
      if (lane == 0) barrier::arrive(&s.statistics_full[ring.stage]);
      ring.next();
    }
  }
  // Of a slab, what a tile has: mean and M2. Two tiles are copied at a time.
  static constexpr int part_pairs = (Numbers::position_tiles + 1) / 2;
  static constexpr int part_pitch = 2 * part_pairs;
  __device__ __forceinline__ float2* part(int64 n, int slab, int tile) const {
    return reinterpret_cast<float2*>(p.parts) + (n * Slabs::slabs_of_sample + slab) * part_pitch + tile;
  }
  // Of how many elements.
  static __device__ __forceinline__ float elements_of(int tile) {
    if constexpr (Geometry::outputs(0) % Numbers::box_z == 0 && Geometry::outputs(1) % Numbers::box_y == 0 &&
                  Geometry::outputs(2) % Numbers::box_x == 0)
      return static_cast<float>(Tail::group_channels * Numbers::box_z * Numbers::box_y * Numbers::box_x);
    const typename Geometry::Box box(tile);
    constexpr int sizes[3] = {Numbers::box_z, Numbers::box_y, Numbers::box_x};
    int count = Tail::group_channels;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      const int left = Geometry::outputs(d) - box.first[d];
      count *= left < sizes[d] ? left : sizes[d];
    }
    return static_cast<float>(count);
  }
  // By one warp: parts of `merge_slabs` slabs to shared memory, all of them on their way at once.
  __device__ __forceinline__ void fetch(int64 n, int first) const {
    const int left = Slabs::slabs_of_sample - first;
    const int count = (left < Numbers::merge_slabs ? left : Numbers::merge_slabs) * part_pairs;
    const auto* const from = reinterpret_cast<const float4*>(part(n, first, 0));
    const uint32 to = barrier::shared_address(s.others);
    __syncwarp();
    for (int i = lane; i < count; i += 32)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + static_cast<uint32>(i) * 16u),
                   "l"(from + i)
                   : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }
  // Lanes that merge a slab's parts together.
  static constexpr int team = 32 / Numbers::merge_slabs;
  // Sums of distances from the first part's mean, and of their squares: in one pass. That mean is one of
  // them, so that it is no further from the mean of all than the root of their number in deviations.
  __device__ __forceinline__ void merge(const Item& item, int first, float2* statistics) const {
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    const int slab = first + lane / team;
    const bool exists = slab < Slabs::slabs_of_sample;
    const float2* const parts = s.others[exists ? lane / team : 0];
    const float origin = parts[0].x;
    float sum = 0.0f, square = 0.0f;
#pragma unroll 4
    for (int tile = lane % team; tile < Numbers::position_tiles; tile += team) {
      const float count = elements_of(tile);
      const float distance = parts[tile].x - origin;
      sum = fmaf(count, distance, sum);
      square += fmaf(count * distance, distance, parts[tile].y);
    }
    sum = lanes_sum<team>(sum) / elements;
    square = lanes_sum<team>(square) / elements;
    const float2 all{origin + sum, 1.0f / sqrtf(fmaxf(fmaf(-sum, sum, square), 0.0f) + Tail::eps)};
    if (exists && lane % team == 0) {
      statistics[slab] = all;
      if (item.position_tile == 0) {
        float* to = p.statistics + 2 * (item.n * Slabs::slabs_of_sample + slab);
        to[0] = all.x;
        to[1] = all.y;
      }
    }
  }
};

}  // namespace onepass
