// The mainloop of gemm/wgmma.cuh: the products of a tile.
#pragma once

#include "gemm/gemm.cuh"
#include "gemm/product/wgmma.cuh"

namespace onepass {

// Rows of the sums are output channels, columns are positions.
template <class C, class Tail, class Numbers>
struct GemmMainloop {
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr int steps = Numbers::chunk_channels / 16;
  static constexpr int groups = Numbers::taps / Numbers::group_taps;  // of taps
  static constexpr int window_bytes = Geometry::window * Geometry::windows * 16;

  GemmShared<C, Tail, Numbers>& s;
  Ring<Numbers::x_stages> x;
  Ring<Numbers::weight_stages> weights;

  // The first warpgroup must not be two tiles ahead: the named barrier would merge two arrivals into one.
  static_assert(Numbers::stagger == 0 || Numbers::x_stages < Numbers::chunks + Numbers::stagger ||
                (!Numbers::weights_stay &&
                 Numbers::weight_stages < (Numbers::chunks + Numbers::stagger) * groups));

  // The second warpgroup begins `stagger` chunks after the first, so that one multiplies while the other runs
  // its epilogue. `beside` is called after each group of products is issued; it overlaps with them.
  template <class Beside>
  __device__ __forceinline__ void run(GemmSums<Numbers>& d, Beside&& beside) {
    if (Numbers::stagger > 0 && threadIdx.x / 128 == 1) gemm::wait_for_first();
    if constexpr (Numbers::parts == 1) {
      multiply(
          d, [] {}, beside);
    } else {
      GemmSums<Numbers> part;
#pragma unroll
      for (int i = 0; i < Numbers::columns / 2; ++i) d[i] = 0.0f;
      multiply(
          part,
          [&] {
#pragma unroll
            for (int i = 0; i < Numbers::columns / 2; ++i) d[i] += part[i];
          },
          beside);
    }
  }

 private:
  // All products. With split operands `take` is called after each group, to add its sums in f32.
  template <class Take, class Beside>
  __device__ __forceinline__ void multiply(GemmSums<Numbers>& d, Take&& take, Beside&& beside) {
    const int lane = threadIdx.x % 32;
    const int group = threadIdx.x / 128;
    const uint32 x_begin = barrier::shared_address(s.x[0]) +
                           (Numbers::groups_share_positions ? 0u : group * Numbers::columns * 16);
    const uint32 weights_begin =
        barrier::shared_address(s.weights[0]) + (Numbers::groups_share_positions ? group * 64 * 16 : 0u);
    int scale = 0;  // the first product overwrites the sums
    int x_before = -1, weights_before = -1;
    const auto release = [&] {
      if (lane == 0) {
        if (!Numbers::weights_stay && weights_before >= 0) barrier::arrive(&s.weights_empty[weights_before]);
        if (x_before >= 0) barrier::arrive(&s.x_empty[x_before]);
      }
    };
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      barrier::wait(&s.x_full[x.stage], x.round);
      const uint32 x_stage = x_begin + x.stage * Numbers::x_stage_bytes;
#pragma unroll 1
      for (int g = 0; g < groups; ++g) {
        // Weights that stay are loaded once: their barriers never leave the first phase.
        barrier::wait(&s.weights_full[weights.stage], Numbers::weights_stay ? 0u : weights.round);
        const uint32 w_stage = weights_begin + weights.stage * Numbers::weight_stage_bytes;
        if constexpr (Numbers::parts == 2) scale = 0;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int t = 0; t < Numbers::group_taps; ++t) {
          const uint32 shift =
              groups == 1 ? Geometry::tap_shift(t) * 16u : s.tap_shifts[g * Numbers::group_taps + t];
#pragma unroll
          for (int k = 0; k < steps; ++k) {
            // The products of second parts come first: they are small.
#pragma unroll
            for (int product = Numbers::parts == 2 ? 2 : 0; product >= 0; --product) {
              const int of_weights = product == 1 ? 1 : 0;
              const int of_x = product == 2 ? 1 : 0;
              Numbers::Product::run(
                  d,
                  wgmma::descriptor(
                      w_stage + ((t * Numbers::parts + of_weights) * steps + k) * Numbers::tile_channels * 32,
                      Numbers::tile_channels * 16),
                  wgmma::descriptor(x_stage + shift + (of_x * steps + k) * 2 * window_bytes, window_bytes),
                  scale);
              scale = 1;
            }
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if constexpr (Numbers::parts == 1) {
          beside();
          // The group before has finished: its stages are free.
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          release();
          weights_before = weights.stage;
          x_before = g == groups - 1 ? x.stage : -1;
        } else {
          wait_for_products(d);
          weights_before = weights.stage;
          x_before = g == groups - 1 ? x.stage : -1;
          release();
          take();
        }
        weights.next();
      }
      x.next();
      if (Numbers::stagger > 0 && chunk == Numbers::stagger - 1 && group == 0) gemm::allow_second();
    }
    if constexpr (Numbers::parts == 1) {
      wait_for_products(d);
      release();
    }
  }

  static __device__ __forceinline__ void wait_for_products(GemmSums<Numbers>& d) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < Numbers::columns / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }
};

}  // namespace onepass
