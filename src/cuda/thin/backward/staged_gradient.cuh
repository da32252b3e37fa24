// dy of a warp's chunks on its way through shared memory.
#pragma once

#include "device/barrier.cuh"
#include "thin/backward/tile.cuh"

namespace onepass {

// A warp's columns of dy are contiguous in memory, one row for each channel, while a lane holds few elements
// of two rows. Copies of the next chunk run while a chunk is processed. Rows of odd channels have their
// halves swapped: lanes of two channels read different banks.
template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::StagedGradient {
  const Thread thread;

  static constexpr bool stages = Numbers::stages_gradient;
  static constexpr int staged_columns = 32;
  static_assert(!stages || (row_tiles == 1 && chunk_rows == 1 && spans * 8 * classes_x == staged_columns &&
                            C::stride(4) == 1 && !Tail::has_mean && Tail::OutputGradient::bytes == 4));
  static __device__ __forceinline__ int staged_column(int channel, int column) {
    return channel * staged_columns + (column ^ (channel % 2 * 16));
  }

  // Starts the copies of an item of the tile.
  __device__ __forceinline__ void start(const Tile& tile, int item, int buffer) const {
    const int first_class = item / chunks * classes_x;
    const Chunk chunk(tile, item % chunks, ThinClass<C>(first_class), thread);
    const int column = chunk.first_cell * classes_x + thread.lane;
    const bool valid = chunk.has_row(0) && column < static_cast<int>(C::output_size(2));
    const float* from = static_cast<const float*>(thread.p.output_gradient);
    if (valid) {
      from += tile.n * C::stride(0) + (chunk.q[0] * static_cast<int>(C::stride(2)) +
                                       chunk.q[1] * static_cast<int>(C::stride(3)) + column);
    }
    float* to = thread.s.passes.staged[thread.warp][buffer];
    const uint32 even = barrier::shared_address(to + staged_column(0, thread.lane));
    const uint32 odd = barrier::shared_address(to + staged_column(1, thread.lane));
#pragma unroll
    for (int c = 0; c < channels; ++c) {
      copy_word((c % 2 == 0 ? even : odd) + c / 2 * (2 * staged_columns * 4), from + c * C::stride(1), valid);
    }
    start_none();
  }
  // Four bytes, or zeros.
  static __device__ __forceinline__ void copy_word(uint32 to, const float* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
  }

  __device__ __forceinline__ void read(const float* staged, float (&g)[classes_x][chunk_tiles][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < chunk_tiles; ++t) {
        struct alignas(8 * classes_x <= 16 ? 8 * classes_x : 16) Run {
          float of[2 * classes_x];
        };
        const Run run = *reinterpret_cast<const Run*>(
            staged + staged_column(half * 8 + thread.quad, (t * 8 + 2 * thread.in_quad) * classes_x));
#pragma unroll
        for (int i = 0; i < 2 * classes_x; ++i) g[i % classes_x][t][half * 2 + i / classes_x] = run.of[i];
      }
    }
  }

  // Waits for the copies of this item. Those of the next one may be in flight.
  static __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
  }
  // Stands for the copies of an item that does not exist.
  static __device__ __forceinline__ void start_none() { asm volatile("cp.async.commit_group;" ::: "memory"); }
};

}  // namespace onepass
