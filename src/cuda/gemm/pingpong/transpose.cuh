// Transposes 16-bit x from rows of channels to vectors of eight channels, on its way to the window.
#pragma once

#include "gemm/pingpong/window_row.cuh"

namespace onepass::pingpong {

// A copy left [row][eight channels][raw_pitch]; the window is [eight channels][position][8].
template <class L>
struct Transpose {
  static_assert(L::Input::bytes == 2 && L::Numbers::window <= 1 << 16);
  // A step is four vectors of eight channels of a row: four 8 x 8 matrices.
  using Row = WindowRow<L, 8 * L::Numbers::raw_vectors>;
  static constexpr int steps = L::Numbers::copy_y * Row::steps;

  const Row window;
  uint32 from;  // of the first step: where this lane's matrix row lies in a copy, in bytes

  explicit __device__ __forceinline__ Transpose(int tile) : window(tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    from = static_cast<uint32>(lane % 8 * L::Numbers::raw_pitch + lane / 8 * 8) * 2u;
  }

  // Eight channels of a copy's rows.
  struct Words {
    uint32 value[steps][4];
  };
  __device__ __forceinline__ void load(uint32 raw, Words& to) const {
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / Row::steps;
      uint32(&word)[4] = to.value[i];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                   : "r"(raw + from +
                         static_cast<uint32>(row * 16 * L::Numbers::raw_pitch + (i - row * Row::steps) * 64))
                   : "memory");
    }
  }
  // To the window that begins at x, `shift` bytes on. Positions outside the window go to eight spare ones
  // behind it.
  __device__ __forceinline__ void store(const Words& words, uint32 x, uint32 shift) const {
    constexpr uint32 spare = (L::Numbers::window - 8) * 16;
    const uint32 begin = x + shift + window.to;
    const uint32 beside = x + spare + threadIdx.x % 8 * 16;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / Row::steps;
      const int k = i - row * Row::steps;
      const uint32(&word)[4] = words.value[i];
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       window.has(k) ? begin + Row::distance(row, k) : beside),
                   "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                   : "memory");
    }
  }
};

}  // namespace onepass::pingpong
