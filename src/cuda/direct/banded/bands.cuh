// Weights of banded.cuh: for each channel, input and row of the filter the taps of x with zeros around them.
#pragma once

#include "direct/banded/types.cuh"
#include "direct/narrow/staging.cuh"

namespace onepass {

// A row has B[i][j] at i - (j - 7) step. It lies twice, the second time one element earlier: the pairs that a
// lane loads begin at a word in one of them.
template <class C, class Tail, class N>
struct BandedTypes<C, Tail, N>::Bands {
  static constexpr auto step = static_cast<int>(C::step(2));
  static constexpr int words = (7 * step + 16 * N::products_x + 1) / 2;  // of a row, once
  static constexpr auto rows = static_cast<int>(C::kernel(0) * C::kernel(1)) * x_classes;
  static constexpr int of_input = rows * 2 * words;
  static constexpr int of_channel = N::inputs * of_input;

  const Parameters& p;
  uint32* bands;

  // Where a lane's words of a row are: of inputs 2 (lane % 4) and the next one, for output lane / 4.
  static __device__ __forceinline__ int lane_word() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int element = 2 * (lane % 4) + (7 - lane / 4) * step;
    return element / 2 + element % 2 * words;
  }

  __device__ __forceinline__ void clear() const {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < Narrow::channels * of_channel; i += N::threads)
      bands[i] = 0;
  }

  __device__ __forceinline__ void stage(const Tile& tile, int first_input) const {
    auto* const elements = reinterpret_cast<uint16*>(bands);
    const typename Narrow::Staging weights{p};
    weights.for_each_weight(tile, first_input, [&](int channel, int c, int tap, float value) {
      const auto bits = static_cast<uint16>(Input::pack(value, 0.0f));
      const auto along = [&](int d) {
        return tap / static_cast<int>(C::tap_stride(d)) % static_cast<int>(C::kernel(d));
      };
      const int x = along(2);
      const int of_filter = along(0) * static_cast<int>(C::kernel(1)) + along(1);
#pragma unroll
      for (int s = 0; s < x_classes; ++s) {
        constexpr auto apart = static_cast<int>(C::tap_step(2));
        const int behind = x - static_cast<int>(C::first(2, s));
        if (behind < 0 || behind % apart != 0 || behind / apart >= static_cast<int>(C::count(2, s))) continue;
        const int at = static_cast<int>(C::base(2, s)) + behind / apart * static_cast<int>(C::delta(2)) -
                       N::first_x + 7 * step;
        uint16* const row =
            elements + 2 * (channel * of_channel + c * of_input + (of_filter * x_classes + s) * 2 * words);
        row[at] = bits;
        if (at > 0) row[2 * words + at - 1] = bits;
      }
    });
  }
};

}  // namespace onepass
