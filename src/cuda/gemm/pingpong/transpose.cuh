// Transposes 16-bit x from rows of channels to vectors of eight channels, on its way to the window.
#pragma once

#include "gemm/pingpong/shared.cuh"

namespace onepass::pingpong {

// A copy left [row][eight channels][raw_pitch]; the window is [eight channels][position][8].
template <class L>
struct Transpose {
  using Numbers = typename L::Numbers;
  using Geometry = typename L::Geometry;
  static constexpr int vector = 8;
  static_assert(L::Input::bytes == 2);
  // A step is four vectors of eight channels of a row: four 8 x 8 matrices.
  static constexpr int row_steps = (Numbers::raw_vectors + 3) / 4;
  static constexpr int steps = Numbers::copy_y * row_steps;
  static_assert(Numbers::window <= 1 << 16);

  // Of the first step, in bytes: where this lane's matrix row lies in a copy, and where it goes in the
  // window. Other steps are at constant distances.
  uint32 from;
  uint32 to;
  uint32 inside = 0;  // a bit for each step of a row: whether the lane's position is in the window

  // Where a tile's window begins in a row of x, rounded down to a vector.
  static __device__ __forceinline__ int first_of(const typename Geometry::Box& box) {
    return (box.first[2] + Geometry::low(2)) & ~(vector - 1);
  }

  // Copies begin at vectors of x, windows anywhere. The first and last positions of a copied row may lie
  // outside the window; they go to eight spare positions behind it.
  explicit __device__ __forceinline__ Transpose(int tile) {
    const typename Geometry::Box box(tile);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = lane - (box.first[2] + Geometry::low(2) - first_of(box));
    from = static_cast<uint32>(lane % 8 * Numbers::raw_pitch + lane / 8 * vector) * 2u;
    to = static_cast<uint32>(first * 16);
#pragma unroll
    for (int k = 0; k < row_steps; ++k) {
      const bool has =
          4 * k + lane / 8 < Numbers::raw_vectors && first + 32 * k >= 0 && first + 32 * k < Numbers::pitch;
      inside |= static_cast<uint32>(has) << k;
    }
  }

  // Eight channels of a copy's rows.
  struct Words {
    uint32 value[steps][4];
  };
  __device__ __forceinline__ void load(uint32 raw, Words& to) const {
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / row_steps;
      uint32(&word)[4] = to.value[i];
      asm volatile(
          "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
          : "r"(raw + from + static_cast<uint32>(row * 16 * Numbers::raw_pitch + (i - row * row_steps) * 64))
          : "memory");
    }
  }
  // To the window that begins at x, `shift` bytes on.
  __device__ __forceinline__ void store(const Words& words, uint32 x, uint32 shift) const {
    const uint32 begin = x + shift + to;
    const uint32 beside = x + spare + threadIdx.x % 8 * 16;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / row_steps;
      const int k = i - row * row_steps;
      const uint32 own = begin + static_cast<uint32>((row * Numbers::pitch + k * 32) * 16);
      const uint32(&word)[4] = words.value[i];
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       is_inside(k) || (inside >> k & 1u) != 0 ? own : beside),
                   "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                   : "memory");
    }
  }

 private:
  static constexpr uint32 spare = (Numbers::window - 8) * 16;
  // Whether all lanes of this step are in the window, wherever the row begins.
  static constexpr __device__ bool is_inside(int k) { return k > 0 && 32 * k + 31 < Numbers::pitch; }
};

}  // namespace onepass::pingpong
