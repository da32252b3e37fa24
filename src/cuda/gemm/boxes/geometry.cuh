// The boxes of positions of the row "gemm_boxes", their windows of x, and the rows of a product in them.
#pragma once

#include "gemm/packed/geometry.cuh"

namespace onepass {

// A tile is a box of output positions, of one sample or of several. A window is what a group of taps meets of
// x for it, with the channels of a chunk side by side. Taps of the first `split` dimensions have windows of
// their own; the others are shifts within one window.
template <class C, class Numbers>
struct BoxGeometry {
  static constexpr int split = Numbers::split;

  static constexpr __device__ int count(int d) { return static_cast<int>(C::count(d, 0)); }
  static constexpr __device__ int offset(int d, int m) {
    return static_cast<int>(C::base(d, 0) + m * C::delta(d));
  }
  static constexpr __device__ int low(int d) {
    return C::delta(d) < 0 ? offset(d, count(d) - 1) : offset(d, 0);
  }
  static constexpr __device__ int box(int d) {
    return d == 0 ? Numbers::box_z : d == 1 ? Numbers::box_y : Numbers::box_x;
  }
  static constexpr __device__ int window(int d) {
    return d == 0 ? Numbers::window_z : d == 1 ? Numbers::window_y : Numbers::window_x;
  }
  static constexpr int row = Numbers::window_x;  // positions of a window
  static constexpr int plane = row * Numbers::window_y;
  static constexpr int volume = plane * Numbers::window_z;  // of a sample
  static constexpr int positions = volume * Numbers::box_n;

  // --- Taps ---
  // The tap of a dimension that all of a group share.
  static __device__ __forceinline__ int group_tap(int d, int group) {
    if (d >= split) return 0;
    if (d == split - 1) return group % count(d);
    if (d == split - 2) return group / count(d + 1) % count(d);
    return group / (count(d + 1) * count(d + 2));
  }
  // Where x of a group of taps begins, from the box's first position times the stride on.
  static __device__ __forceinline__ int group_offset(int d, int group) {
    return d < split ? offset(d, 0) + group_tap(d, group) * static_cast<int>(C::delta(d)) : low(d);
  }
  // By how many positions of the window a tap of a group is shifted.
  static constexpr __device__ int shift(int t) {
    const int m2 = split > 2 ? 0 : t % count(2);
    const int t1 = split > 2 ? t : t / count(2);
    const int m1 = split > 1 ? 0 : t1 % count(1);
    const int m0 = split > 0 ? 0 : t1 / count(1);
    return (split > 0 ? 0 : (offset(0, m0) - low(0)) * plane) +
           (split > 1 ? 0 : (offset(1, m1) - low(1)) * row) + (split > 2 ? 0 : offset(2, m2) - low(2));
  }

  // --- Rows of a product: 64 positions, of which eight are neighbours ---
  // From eight to eight: either neighbours again, or the next row of a box that is eight positions wide.
  static constexpr int step = Numbers::patches ? row : 8;
  // The first position of the product's rows in the window.
  static __device__ __forceinline__ int first_place(int product) {
    if constexpr (!Numbers::patches) return product * 64;
    const int r = product * 8;
    const int q = r / Numbers::box_y;
    const int n = q / Numbers::box_z;
    return ((n * Numbers::window_z + q - n * Numbers::box_z) * Numbers::window_y + r - q * Numbers::box_y) *
           row;
  }

  // --- A tile ---
  struct Tile {
    int n, first[3];

    explicit __device__ __forceinline__ Tile(uint32 index) {
      const uint32 y = index / Numbers::boxes_x;
      const uint32 z = y / Numbers::boxes_y;
      const uint32 of_samples = z / Numbers::boxes_z;
      first[2] = static_cast<int>(index - y * Numbers::boxes_x) * Numbers::box_x;
      first[1] = static_cast<int>(y - z * Numbers::boxes_y) * Numbers::box_y;
      first[0] = static_cast<int>(z - of_samples * Numbers::boxes_z) * Numbers::box_z;
      n = static_cast<int>(of_samples) * Numbers::box_n;
    }
  };
  // The output of a place in the window: its sample, and its offset there; -1: nowhere.
  struct Target {
    int n, offset;

    __device__ __forceinline__ Target(const Tile& tile, int place, int samples) {
      const int own = place / volume;
      const int in_volume = place - own * volume;
      const int z = in_volume / plane;
      const int in_plane = in_volume - z * plane;
      const int y = in_plane / row;
      const int x = in_plane - y * row;
      const int o0 = tile.first[0] + z, o1 = tile.first[1] + y, o2 = tile.first[2] + x;
      n = tile.n + own;
      const bool inside = own < Numbers::box_n && n < samples && z < Numbers::box_z && y < Numbers::box_y &&
                          x < Numbers::box_x && o0 < static_cast<int>(C::positions(0, 0)) &&
                          o1 < static_cast<int>(C::positions(1, 0)) &&
                          o2 < static_cast<int>(C::positions(2, 0));
      offset = inside ? static_cast<int>(o0 * (Numbers::value_stride0 * C::classes(0)) +
                                         o1 * (Numbers::value_stride1 * C::classes(1)) +
                                         o2 * (Numbers::value_stride2 * C::classes(2)))
                      : -1;
    }
  };
};

// Where packed weights lie: [tile of channels][chunk][tap][eight input channels][output channel][8].
template <class Numbers>
struct BoxPlaces {
  static __device__ __forceinline__ int64 place(int tile, int chunk, int tap, int half) {
    constexpr int pieces = Numbers::chunk_channels / 16;
    const int64 step = (static_cast<int64>(tile) * Numbers::chunks + chunk / pieces) * Numbers::taps + tap;
    return (step * pieces + chunk % pieces) * 2 + half;
  }
};

}  // namespace onepass
