// Rounds f32 x to f16 on its way to the window, and keeps its largest magnitude.
#pragma once

#include "gemm/pingpong/window_row.cuh"

namespace onepass::pingpong {

// As Transpose: a copy left [row][eight channels][raw_pitch]. A lane has one position. It loads the eight
// channels one by one and stores them at once.
template <class L>
struct Round {
  static_assert(L::Input::bytes == 4);
  // A step is 32 positions of a row.
  using Row = WindowRow<L, L::Numbers::raw_pitch>;
  static constexpr int steps = L::Numbers::copy_y * Row::steps;

  const Row window;
  float largest = 0.0f;  // magnitude of a tile's elements; NaN where there is one

  explicit __device__ __forceinline__ Round(int tile) : window(tile) {}

  struct Words {
    uint32 value[steps][4];
  };
  // Lanes without an element in the last step load that of the first.
  __device__ __forceinline__ void load(uint32 raw, Words& to) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 own = raw + 4 * lane;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / Row::steps;
      const int k = i - row * Row::steps;
      const bool has =
          32 * k + 31 < L::Numbers::raw_pitch || 32 * k + static_cast<int>(lane) < L::Numbers::raw_pitch;
      const uint32 from = has ? own + 128 * k : own;
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(x[c])
                     : "r"(from + static_cast<uint32>((row * 8 + c) * L::Numbers::raw_pitch * 4))
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
    const uint32 begin = x + shift + window.to;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / Row::steps;
      const int k = i - row * Row::steps;
      const uint32(&word)[4] = words.value[i];
      if (window.has(k)) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(begin + Row::distance(row, k)),
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
};

}  // namespace onepass::pingpong
