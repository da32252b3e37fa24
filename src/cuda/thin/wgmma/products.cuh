// The mainloop of thin/wgmma.cuh: products of a plane, and where their operands and sums lie.
#pragma once

#include "thin/wgmma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class Product>
struct ThinWgmma<C, Tail, Numbers, Product>::Products {
  // --- Rows of the accumulators: eight of a warp (r = 0), then eight more ---
  static __device__ __forceinline__ int plane_slot(int warp, int r) {
    if (!paired) return warp / channel_blocks;
    return taps0 == 2 ? r : warp / 2 * 2 + r;
  }
  // The warp's eight channels, in eights of the tile.
  static __device__ __forceinline__ int channels_of(int warp, int r) {
    if (!paired) return warp % channel_blocks * 2 + r;
    return taps0 == 2 ? warp : warp % 2;
  }
  static __device__ __forceinline__ bool is_used(int warp, int r) {
    return plane_slot(warp, r) < taps0 && channels_of(warp, r) < 2 * channel_blocks;
  }

  // Planes that are unrolled: a round of the slots, so that the completed slot of each plane is a constant.
  // Partial sums that begin with every plane are not unrolled: the compiler takes other registers each time
  // and serialises products.
  static constexpr int round_planes = promotes ? 1 : taps0;
  // Whether a round begins at the ring's first slot: operand addresses of a plane are then constants.
  static constexpr bool knows_slots = round_planes == planes && window_planes % planes == 0;

  // --- Consumers ---
  static __device__ __forceinline__ float output_of(float sum, float unscale, float bias) {
    return begins_with_bias ? sum : fmaf(sum, unscale, bias);
  }

  static __device__ __forceinline__ int lane_of(int e) { return threadIdx.x % 4 * 2 + e; }
  static __device__ __forceinline__ int sample_of_lane(int e) { return lane_of(e) / row_groups; }
  static __device__ __forceinline__ int first_row_of_lane(int e) {
    return lane_of(e) % row_groups * lane_rows;
  }

  // Whether every thread's lane `e` has a row, whatever the strip.
  static constexpr __device__ bool has_row_always(int e) {
    return row_groups == 1 ? lane_rows <= C::output_size(1)
                           : (row_groups - 2 + e) * lane_rows + lane_rows <= C::output_size(1);
  }

  // Where core `core` of output position 0 lies, in units.
  static constexpr __device__ int core_offset(int core) {
    return (core / (groups1 * groups2) * starts + core / groups2 % groups1 * core_rows * delta1) * row_units +
           core % groups2 * core_columns * delta2 * pitch;
  }

  static constexpr int products = weight_parts + input_parts - 1;  // of two cores

  static constexpr uint32 upper_a = 8;
  static constexpr uint32 upper_b = pitch * step2;

  // The lower halves of the descriptors of A and B.
  struct Places {
    uint32 a, b;
  };
  // Operands of a plane's first product. Where slots are known, `at` is relative to the strips' `base`.
  struct Operands {
    Places at;
    uint32 one;
    uint64 base_a, base_b;
  };

  // Offset of the operands of a plane's product `i` from those of its first.
  static constexpr __device__ Places behind(int i) {
    const int core = 2 * (i / products);
    const int part = i % products;  // of the weights, then of the input
    const int distance = core + 1 < cores ? core_offset(core + 1) - core_offset(core) : 0;
    return {static_cast<uint32>(i / products * weight_parts + (part == 1 && weight_parts == 2 ? 1 : 0)) * 2 *
                weight_units,
            static_cast<uint32>(core_offset(core) | distance << 16) + (part == 2 ? plane_units : 0)};
  }

  // Product `i` of a strip's plane. The compiler does not know that a partial sum begins from zero: otherwise
  // it takes other registers each time and serialises products.
  static __device__ __forceinline__ void multiply(Sums& sums, const Operands& begin, int i) {
    const bool accumulates = promotes ? gridDim.y > 1 : !begins_always;
    const uint32 a = begin.at.a + behind(i).a;
    const uint32 b = begin.at.b + behind(i).b;
    if constexpr (knows_slots) {
      Product::multiply(sums, moved(begin.base_a, begin.one, a), moved(begin.base_b, begin.one, b),
                        i > 0 || accumulates);
    } else {
      Product::multiply(sums, warpgroup::wide(a, upper_a), warpgroup::wide(b, upper_b), i > 0 || accumulates);
    }
  }

  // base + distance as one instruction for both halves. `one` is 1, which the compiler does not know: it
  // would make four instructions. It would shift by a power of two, so that 3 is added to every distance and
  // taken from `base_of`.
  static constexpr uint32 more = 3;
  static __device__ __forceinline__ uint64 moved(uint64 base, uint32 one, uint32 distance) {
    uint64 result;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(one), "r"(distance + more), "l"(base));
    return result;
  }
  static __device__ __forceinline__ uint64 base_of(uint32 lower, uint32 upper) {
    return warpgroup::wide(lower, upper) - more;
  }

  // All products of a strip's plane, as one group in flight.
  static __device__ __forceinline__ void multiply_plane(Sums& sums, const Operands& begin) {
    warpgroup::fence();
#pragma unroll
    for (int i = 0; i < steps * products; ++i) multiply(sums, begin, i);
    warpgroup::commit();
  }
  // Products of two strips by turns: a product waits for the one before with the same sums.
  static __device__ __forceinline__ void multiply_planes(Sums& first, Sums& second,
                                                         const Operands& begin_first,
                                                         const Operands& begin_second) {
    warpgroup::fence();
#pragma unroll
    for (int i = 0; i < steps * products; ++i) {
      multiply(first, begin_first, i);
      multiply(second, begin_second, i);
    }
    warpgroup::commit();
  }

  // Tells the compiler that products have written the sums.
  static __device__ __forceinline__ void arrived(Sums& sums) {
#pragma unroll
    for (int i = 0; i < columns * 4; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  }
};

}  // namespace onepass
