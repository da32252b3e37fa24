// Rounds f32 x to f16 on its way to the window, and keeps its largest magnitude.
#pragma once

#include "gemm/pingpong/shared.cuh"

namespace onepass::pingpong {

// As Transpose: a copy left [row][eight channels][raw_pitch]. A lane has one position. It loads the eight
// channels one by one and stores them at once.
template <class L>
struct Round {
  using Numbers = typename L::Numbers;
  using Geometry = typename L::Geometry;
  static constexpr int vector = 4;
  static_assert(L::Input::bytes == 4);
  // A step is 32 positions of a row.
  static constexpr int row_steps = (Numbers::raw_pitch + 31) / 32;
  static constexpr int steps = Numbers::copy_y * row_steps;

  uint32 to;             // where the lane's first position goes in the window, in bytes
  uint32 inside = 0;     // a bit for each step of a row: whether the lane's position is in the window
  float largest = 0.0f;  // magnitude of a tile's elements; NaN where there is one

  static __device__ __forceinline__ int first_of(const typename Geometry::Box& box) {
    return (box.first[2] + Geometry::low(2)) & ~(vector - 1);
  }

  explicit __device__ __forceinline__ Round(int tile) {
    const typename Geometry::Box box(tile);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = lane - (box.first[2] + Geometry::low(2) - first_of(box));
    to = static_cast<uint32>(first * 16);
#pragma unroll
    for (int k = 0; k < row_steps; ++k) {
      const bool has =
          32 * k + lane < Numbers::raw_pitch && first + 32 * k >= 0 && first + 32 * k < Numbers::pitch;
      inside |= static_cast<uint32>(has) << k;
    }
  }

  struct Words {
    uint32 value[steps][4];
  };
  // Lanes without an element in the last step load that of the first.
  __device__ __forceinline__ void load(uint32 raw, Words& to) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 own = raw + 4 * lane;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / row_steps;
      const int k = i - row * row_steps;
      const bool has =
          32 * k + 31 < Numbers::raw_pitch || 32 * k + static_cast<int>(lane) < Numbers::raw_pitch;
      const uint32 from = has ? own + 128 * k : own;
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(x[c])
                     : "r"(from + static_cast<uint32>((row * 8 + c) * Numbers::raw_pitch * 4))
                     : "memory");
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) to.value[i][c] = pack_operands<typename L::C, f16>(x[2 * c], x[2 * c + 1]);
        // As a tree: a chain of maxima would be eight dependent instructions.
#pragma unroll
      for (int apart = 4; apart > 0; apart /= 2) {
#pragma unroll
        for (int c = 0; c < apart; ++c) x[c] = gemm::largest_of(fabsf(x[c]), x[c + apart]);
      }
      largest = gemm::largest_of(largest, x[0]);
    }
  }
  // To the window that begins at x, `shift` bytes on.
  __device__ __forceinline__ void store(const Words& words, uint32 x, uint32 shift) const {
    const uint32 begin = x + shift + to;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / row_steps;
      const int k = i - row * row_steps;
      const uint32(&word)[4] = words.value[i];
      if (is_inside(k) || (inside >> k & 1u) != 0) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                         begin + static_cast<uint32>((row * Numbers::pitch + k * 32) * 16)),
                     "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
      }
    }
  }

  // The bits of the warp's largest magnitude of a tile; resets it for the next tile.
  __device__ __forceinline__ uint32 take_largest() {
    // Bits of magnitudes are ordered as the magnitudes are, and NaN is above infinity.
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    largest = 0.0f;
    return bits;
  }

 private:
  // Whether all lanes of this step are in the window, wherever the row begins.
  static constexpr __device__ bool is_inside(int k) { return k > 0 && 32 * k + 31 < Numbers::pitch; }
};

}  // namespace onepass::pingpong
