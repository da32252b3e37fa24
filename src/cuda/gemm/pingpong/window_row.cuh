// Where the positions of a copied row of x go in the window of the ping-pong kernel.
#pragma once

#include "gemm/pingpong/shared.cuh"

namespace onepass::pingpong {

// Copies begin at vectors of x, windows anywhere: the first and last of a row's `positions` may lie outside
// the window. A lane has every 32nd position, one in each step.
template <class L, int positions>
struct WindowRow {
  static constexpr int steps = (positions + 31) / 32;

  uint32 to;          // where the lane's first position goes in the window, in bytes
  uint32 inside = 0;  // a bit for each step: whether the lane's position is in the window

  // Where a tile's window begins in a row of x, rounded down to a vector.
  static __device__ __forceinline__ int first_of(const typename L::Geometry::Box& box) {
    constexpr int vector = 16 / L::Input::bytes;
    return (box.first[2] + L::Geometry::low(2)) & ~(vector - 1);
  }

  explicit __device__ __forceinline__ WindowRow(int tile) {
    const typename L::Geometry::Box box(tile);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = lane - (box.first[2] + L::Geometry::low(2) - first_of(box));
    to = static_cast<uint32>(first * 16);
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      const bool has = 32 * k + lane < positions && first + 32 * k >= 0 && first + 32 * k < L::Numbers::pitch;
      inside |= static_cast<uint32>(has) << k;
    }
  }

  // Whether the lane's position of a step is in the window. In a step between others all lanes are, wherever
  // the row begins.
  __device__ __forceinline__ bool has(int k) const {
    return (k > 0 && 32 * k + 31 < L::Numbers::pitch) || (inside >> k & 1u) != 0;
  }
  // From the lane's first position to that of a step of a copied row, in bytes.
  static constexpr __device__ uint32 distance(int row, int k) {
    return static_cast<uint32>((row * L::Numbers::pitch + k * 32) * 16);
  }
};

}  // namespace onepass::pingpong
