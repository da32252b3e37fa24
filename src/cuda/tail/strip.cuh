// How kernels cut a tensor with channels after space that hold strips of it on the chip.
//
// A unit is a strip of a sample: `strip` neighbouring channels that are whole slabs, at every position. A
// cluster of `blocks` blocks has it, each block a range of positions. A thread has one vector of `width`
// channels at every `lanes`-th position of its block.
#pragma once

#include "device/types.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct Strip {
  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int vectors = Numbers::vectors;  // of a thread
  static constexpr int blocks = Numbers::blocks;    // of the cluster
  static constexpr int strip = Numbers::strip;
  static constexpr int strips = Tail::channels / strip;
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int share = (spatial + blocks - 1) / blocks;  // positions of a block

  // A warp has `warp_columns` neighbouring vectors of some positions, a set of warps all of the strip.
  static constexpr int columns = strip / width;
  static constexpr int warp_columns = Numbers::warp_columns;
  static constexpr int warp_positions = 32 / warp_columns;
  static constexpr int set_warps = columns / warp_columns;
  static constexpr int sets = threads / 32 / set_warps;
  static constexpr int lanes = sets * warp_positions;  // positions that the block has at a time
  static_assert(set_warps * warp_columns * width == strip && sets * set_warps * 32 == threads);
  static_assert(vectors * lanes >= share && (vectors - 1) * lanes < share);

  // A vector's channels of one slab: `piece` of them beside each other, whatever the vector.
  static constexpr int common(int a, int b) { return b == 0 ? a : common(b, a % b); }
  static constexpr int rows = Tail::group_channels;
  static constexpr int piece = common(width, rows);
  static constexpr int pieces = width / piece;      // of a vector
  static constexpr int slab_pieces = rows / piece;  // at a position
  static constexpr int slabs = strip / rows;
  static_assert(slabs * rows == strip);

  // Copies are waited for in chunks: the first are summed while others arrive.
  static constexpr int chunks = vectors < 4 ? vectors : 4;
  static constexpr int chunk = (vectors + chunks - 1) / chunks;

  // What of a unit this thread has.
  struct Place {
    int block;
    int64 n;
    int channel;    // of the sample: the vector's first
    int column;     // of the strip: which vector
    int set;        // of warps
    int positions;  // of the block
    int mine;       // vectors of this thread
    int64 index;    // of the first one

    __device__ __forceinline__ Place(int64 unit, int of_cluster) : block(of_cluster) {
      n = unit / strips;
      const int warp = threadIdx.x / 32;
      const int lane = threadIdx.x % 32;
      column = warp % set_warps * warp_columns + lane % warp_columns;
      set = warp / set_warps;
      channel = static_cast<int>(unit % strips) * strip + column * width;
      const int first = block * share;
      const int left = spatial - first;
      positions = left < 0 ? 0 : left < share ? left : share;
      const int own = set * warp_positions + lane / warp_columns;
      mine = positions > own ? (positions - own + lanes - 1) / lanes : 0;
      index = (n * spatial + first + own) * Tail::channels + channel;
    }
    __device__ __forceinline__ int64 index_of(int i) const {
      return index + static_cast<int64>(i) * (lanes * Tail::channels);
    }
  };

  // One vector of `Bytes` bytes from memory to shared memory, asynchronously; both lie on its bytes, up
  // to 16.
  template <int Bytes>
  static __device__ __forceinline__ void copy(uint32 to, const char* from) {
    if constexpr (Bytes % 16 == 0) {
#pragma unroll
      for (int b = 0; b < Bytes; b += 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + b), "l"(from + b) : "memory");
      }
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes) : "memory");
    }
  }
  static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // What this thread has asked for in chunk `c` and before is there.
  template <int c>
  static __device__ __forceinline__ void wait_for_chunk() {
    asm volatile("cp.async.wait_group %0;" ::"n"(chunks - 1 - c) : "memory");
  }

  // The sum over the lanes of a warp that have the same channels, in each of them.
  static __device__ __forceinline__ float column_sum(float value) {
#pragma unroll
    for (int offset = 16; offset >= warp_columns; offset /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
  }
  // Whether this lane leaves what `column_sum` has given.
  static __device__ __forceinline__ bool leaves() { return threadIdx.x % 32 < warp_columns; }

  // f(slab, lane, in range) by `team` neighbouring lanes for each slab. All threads call it equally often.
  template <int team, class F>
  static __device__ __forceinline__ void for_each_slab(F&& f) {
    constexpr int teams = threads / team;
#pragma unroll 1
    for (int begin = 0; begin < slabs; begin += teams) {
      const int slab = begin + static_cast<int>(threadIdx.x) / team;
      f(slab < slabs ? slab : 0, static_cast<int>(threadIdx.x % team), slab < slabs);
    }
  }

  static constexpr int slab_parts = sets * slab_pieces;
  // Lanes that merge a slab's parts: as many as there are for all slabs at once.
  static constexpr int merge_team() {
    int team = 1;
    while (team < 32 && team < slab_parts && 2 * team * slabs <= threads) team *= 2;
    return team;
  }
};

}  // namespace onepass
