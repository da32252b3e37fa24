// The mainloop of the ping-pong kernel: a warpgroup's products of one tile.
#pragma once

#include "gemm/pingpong/bands.cuh"
#include "gemm/pingpong/shared.cuh"

namespace onepass::pingpong {

template <class L>
struct Mainloop {
  static constexpr int sums = L::sums;

  Shared<L>& s;
  const int lane;
  const int group;

  // The descriptor of an operand without swizzle. `begin` is its lower half: the address and the distance
  // to the next eight channels, in units of 16 bytes.
  static __device__ __forceinline__ uint64 descriptor(uint32 begin, int bytes) {
    return static_cast<uint64>(128 >> 4) << 32 | (begin + static_cast<uint32>(bytes >> 4));
  }

  // Waits for the warpgroup's turn. The turn passes to the next warpgroup when all products are issued.
  // `adds`: d holds values that products are added to.
  template <bool adds>
  __device__ __forceinline__ void run(uint32 tile, float (&d)[sums]) const {
    const uint32 round = tile & 1u;
    barrier::wait(&s.turn[group], round);
    // The shuffles tell the compiler that these are uniform: descriptors are made in uniform registers.
    const uint32 x_begin =
        __shfl_sync(0xffffffffu,
                    (barrier::shared_address(s.x[0]) >> 4) + static_cast<uint32>(group * L::columns), 0) +
        (static_cast<uint32>(Shared<L>::half_bytes >> 4) << 16);
    const uint32 weights_begin =
        __shfl_sync(0xffffffffu, barrier::shared_address(s.weights[0]) >> 4, 0) | 64u << 16;
    const int own = __shfl_sync(0xffffffffu, group, 0);
    int arrived = Bands<L>::first_band(own, 0);  // bands before it are in shared memory
    int released = arrived;                      // bands before it are free again
    barrier::wait(&s.weights_full, 0u);
#pragma unroll
    for (int i = 0; i < Bands<L>::tap_rows; ++i) {
#pragma unroll 1
      for (; arrived <= Bands<L>::last_band(own, i); ++arrived) barrier::wait(&s.x_full[arrived], round);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int chunk = 0; chunk < L::Numbers::chunks; ++chunk) {
#pragma unroll
        for (int t = Bands<L>::first_tap(i); t < Bands<L>::first_tap(i) + Bands<L>::taps_of_row; ++t) {
          L::Numbers::Product::run(
              d, descriptor(weights_begin, chunk * Shared<L>::weight_bytes + t * 64 * 32),
              descriptor(x_begin, chunk * 2 * Shared<L>::half_bytes + L::Geometry::tap_shift(t) * 16),
              adds || i + chunk > 0 || t > Bands<L>::first_tap(0) ? 1 : 0);
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (i > 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release(released, Bands<L>::first_band(own, i));
      }
    }
    if (lane == 0) barrier::arrive(&s.turn[group == L::groups - 1 ? 0 : group + 1]);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(released, arrived);
#pragma unroll
    for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }

 private:
  // Frees bands `from` to `to` - 1, which the warp has read.
  __device__ __forceinline__ void release(int& from, int to) const {
#pragma unroll 1
    for (; from < to; ++from) {
      if (lane == 0) barrier::arrive(&s.x_empty[from]);
    }
  }
};

}  // namespace onepass::pingpong
