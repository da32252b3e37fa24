// The sizes of the ping-pong kernel, and what one of its threads has of a tile.
#pragma once

#include "gemm/gemm.cuh"

namespace onepass::pingpong {

constexpr int converting_warps = 4;
constexpr int mergers = 1;  // blocks without a tile, which merge moments

// The pieces of the kernel are templates of this one type.
template <class C, class Tail, class Numbers>
struct Layout : KernelTypes<C, Tail, Numbers> {
  using Parameters = PingpongParameters<Tail::parameters>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Input = typename Tail::Input;
  using Output = typename Tail::Output;

  static constexpr int groups = Numbers::groups;  // consumer warpgroups
  static constexpr int consumers = 128 * groups;
  static constexpr int threads = consumers + converting_warps * 32;
  static constexpr int columns = Numbers::columns;  // positions of a warpgroup
  static constexpr int sums = columns / 2;          // accumulators of a thread
  static constexpr int pairs = columns / 8;         // of neighbouring columns, in each row of a thread
  static constexpr int rows = Geometry::rows;       // output channels
  static constexpr int group_rows = Tail::group_channels;
  static constexpr int slabs = Tail::channels / Tail::group_channels;  // of a sample
  static constexpr int position_tiles = Numbers::position_tiles;
  static constexpr bool is_f32 = Output::bytes == 4;
  static_assert(groups == 3 && pairs <= 64);
  static_assert(16 % group_rows == 0 && Geometry::classes == 1);

  // A product has 64 rows; those beyond `rows` only fill it.
  static __device__ __forceinline__ bool has_row(int row) { return rows % 64 == 0 || row < rows; }
  static __device__ __forceinline__ int channel_of(int row) { return has_row(row) ? row : 0; }

  // Samples in flight: the blocks with tiles have one tile each.
  static __device__ __forceinline__ int samples() {
    return (static_cast<int>(gridDim.x) - mergers) / position_tiles;
  }
  static __device__ __forceinline__ bool is_merger() {
    return blockIdx.x >= static_cast<uint32>(samples() * position_tiles);
  }
  // A block has the same tile of every sample that it works on.
  static __device__ __forceinline__ int tile_of_block() {
    return static_cast<int>(blockIdx.x % static_cast<uint32>(position_tiles));
  }
  static __device__ __forceinline__ int first_sample() {
    return static_cast<int>(blockIdx.x / static_cast<uint32>(position_tiles));
  }
  // The same, read again at each call. This saves a register.
  static __device__ __forceinline__ int reload_tile_of_block() {
    uint32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return static_cast<int>(block % position_tiles);
  }
};

// Returns 0; the compiler does not know it and moves no code past this point. Values that were computed too
// early would not fit in registers. The clock is read and masked with threadIdx.y, which is always 0.
__device__ __forceinline__ uint32 opaque_zero() {
  uint32 now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  return now & threadIdx.y;
}

// A consumer thread. It has two rows of a product and every fourth pair of columns in each. The sum of pair
// j, row h and element e is number j * 4 + h * 2 + e.
struct Thread {
  uint32 index;
  int lane = static_cast<int>(index % 32u);
  int warp = static_cast<int>(index / 32u);
  int group = static_cast<int>(index / 128u);

  // Reads the thread's index again. Values derived from it would otherwise stay in registers.
  static __device__ __forceinline__ Thread reload() {
    uint32 own;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(own));
    return {own};
  }

  __device__ __forceinline__ int row(int h) const {
    return static_cast<int>(index % 128u / 32u * 16u + index % 32u / 4u) + 8 * h;
  }
  // The first of the warp's 16 rows.
  __device__ __forceinline__ int first_row() const { return static_cast<int>(index % 128u / 32u * 16u); }
};

}  // namespace onepass::pingpong
