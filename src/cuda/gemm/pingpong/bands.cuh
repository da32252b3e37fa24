// Bands: rows of a tile's window that are staged and released together.
#pragma once

#include "gemm/pingpong/layout.cuh"

namespace onepass::pingpong {

// A warpgroup computes some rows of the box and reads only some rows of the window. The window is staged in
// bands of rows with all channels, from the top. The next tile's first rows arrive when the first warpgroup
// has multiplied; they do not wait for the last one.
template <class L>
struct Bands {
  static constexpr int rows = L::Numbers::band_copies * L::Numbers::copy_y;  // of a band
  static constexpr int count = L::Numbers::bands;
  static constexpr int last_row =
      (L::Numbers::box_z - 1) * L::Geometry::rows_of_plane + L::Numbers::box_y - 1;

  // The first and the last row of the box that a warpgroup computes.
  static constexpr __device__ int first_of(int group) {
    const int row = group * L::columns / L::Numbers::pitch;
    return row < last_row ? row : last_row;
  }
  static constexpr __device__ int last_of(int group) {
    const int row = ((group + 1) * L::columns - 1) / L::Numbers::pitch;
    return row < last_row ? row : last_row;
  }

  // Taps by rows of the kernel, from the top of the window: the first tap of row i, and its depth in window
  // rows.
  static constexpr int taps_of_row = static_cast<int>(L::C::count(2, 0));
  static constexpr int tap_rows = L::Numbers::taps / taps_of_row;
  static constexpr __device__ int tap_of(int d, int i) {
    return L::C::delta(d) < 0 ? static_cast<int>(L::C::count(d, 0)) - 1 - i : i;
  }
  static constexpr __device__ int first_tap(int i) {
    const int high = static_cast<int>(L::C::count(1, 0));
    return (tap_of(0, i / high) * high + tap_of(1, i % high)) * taps_of_row;
  }
  static constexpr __device__ int depth(int i) {
    const int high = static_cast<int>(L::C::count(1, 0));
    return (L::Geometry::offset(0, tap_of(0, i / high)) - L::Geometry::low(0)) * L::Geometry::rows_of_plane +
           L::Geometry::offset(1, tap_of(1, i % high)) - L::Geometry::low(1);
  }

  // The first and the last band that a warpgroup reads at a row of taps.
  static constexpr __device__ int first_band(int group, int i) { return (first_of(group) + depth(i)) / rows; }
  static constexpr __device__ int last_band(int group, int i) { return (last_of(group) + depth(i)) / rows; }
  // Warpgroups that read a band.
  static constexpr __device__ int readers(int band) {
    int count = 0;
    for (int g = 0; g < L::groups; ++g)
      count += first_band(g, 0) <= band && band <= last_band(g, tap_rows - 1) ? 1 : 0;
    return count;
  }
  // Copies of eight channels. The last band may have fewer.
  static constexpr int copies = 2 * L::Numbers::chunks * L::Numbers::band_copies;
  static constexpr __device__ int copies_of(int band) {
    const int left = 2 * L::Numbers::chunks * L::Numbers::copies - band * copies;
    return left < copies ? left : copies;
  }
  static constexpr __device__ int least_copies() { return copies_of(count - 1); }
};

}  // namespace onepass::pingpong
