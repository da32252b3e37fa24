// The boxes of positions of the row "gemm_boxes", their windows of x, and the rows of a product in them.
#pragma once

#include "gemm/packed/geometry.cuh"

namespace onepass {

// What lies side by side where values go: whole vectors of channels, channels, or positions; or sums alone
// leave.
enum class BoxesStored { vectors, channels, positions, sums };

// A tile is a box of output positions, of one sample or of several. A window is what a group of taps meets of
// x for it, with the channels of a chunk side by side. Taps of the first `split` dimensions have windows of
// their own; the others are shifts within one window. Where classes of a transposed convolution are apart, a
// tile is of one of them, and windows are as large as the largest class needs.
template <class C, class Numbers>
struct BoxGeometry {
  static constexpr int split = Numbers::split;

  using Class = ThinClass<C>;

  static constexpr __device__ int count(int d) { return static_cast<int>(C::count(d, 0)); }
  // How many positions behind the first of a window a dimension's tap lies, of `count` taps.
  static constexpr __device__ int behind(int d, int m, int count) {
    return static_cast<int>(C::delta(d) < 0 ? (m + 1 - count) * C::delta(d) : m * C::delta(d));
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
  // Taps of a class in a group, and groups; none where it has no taps.
  static __device__ __forceinline__ int group_taps(const Class& own) {
    int taps = 1;
#pragma unroll
    for (int d = split; d < 3; ++d) taps *= own.count[d];
    return taps;
  }
  static __device__ __forceinline__ int groups(const Class& own) {
    int count = group_taps(own) > 0 ? 1 : 0;
#pragma unroll
    for (int d = 0; d < split; ++d) count *= own.count[d];
    return count;
  }
  // The tap of a dimension that all of a group share.
  static __device__ __forceinline__ int group_tap(int d, int group, const Class& own) {
    if (d == split - 1) return group % own.count[d];
    if (d == split - 2) return group / own.count[d + 1] % own.count[d];
    return group / (own.count[1] * own.count[2]);
  }
  // Where x of a group of taps begins, from the box's first position times the stride on.
  static __device__ __forceinline__ int group_offset(int d, int group, const Class& own) {
    const int delta = static_cast<int>(C::delta(d));
    if (d < split) return own.base[d] + group_tap(d, group, own) * delta;
    return own.base[d] + (delta < 0 ? (own.count[d] - 1) * delta : 0);
  }
  // By how many positions of the window a tap of a group is shifted.
  static constexpr __device__ int shift(int t) { return shift_of(t, count(0), count(1), count(2)); }
  static __device__ __forceinline__ int shift(int t, const Class& own) {
    return shift_of(t, own.count[0], own.count[1], own.count[2]);
  }

  // --- Rows of a product: 64 positions, of which eight are neighbours ---
  // From eight to eight: either neighbours again, or the next row of a box that is eight positions wide.
  static constexpr int step = Numbers::patches ? row : 8;
  // The window's position of a product's row.
  static __device__ __forceinline__ int place(int product, int row_of_product) {
    return first_place(product) + row_of_product / 8 * step + row_of_product % 8;
  }
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
  // The output of a place in the window: its sample, and its offset there in a class; -1: nowhere.
  struct Target {
    int n, offset;
  };
  static __device__ __forceinline__ Target target(const Tile& tile, int place, int samples, int class_index) {
    const Class of_class(class_index);
    const int own = place / volume;
    const int in_volume = place - own * volume;
    const int z = in_volume / plane;
    const int in_plane = in_volume - z * plane;
    const int y = in_plane / row;
    const int x = in_plane - y * row;
    const int o0 = tile.first[0] + z, o1 = tile.first[1] + y, o2 = tile.first[2] + x;
    const int n = tile.n + own;
    const bool inside = own < Numbers::box_n && n < samples && z < Numbers::box_z && y < Numbers::box_y &&
                        x < Numbers::box_x && o0 < of_class.positions[0] && o1 < of_class.positions[1] &&
                        o2 < of_class.positions[2];
    return {n, inside ? static_cast<int>(o0 * (Numbers::value_stride0 * C::classes(0)) +
                                         o1 * (Numbers::value_stride1 * C::classes(1)) +
                                         o2 * (Numbers::value_stride2 * C::classes(2)))
                      : -1};
  }

 private:
  static constexpr __device__ int shift_of(int t, int count0, int count1, int count2) {
    const int m2 = split > 2 ? 0 : t % count2;
    const int t1 = split > 2 ? t : t / count2;
    const int m1 = split > 1 ? 0 : t1 % count1;
    const int m0 = split > 0 ? 0 : t1 / count1;
    return (split > 0 ? 0 : behind(0, m0, count0) * plane) + (split > 1 ? 0 : behind(1, m1, count1) * row) +
           (split > 2 ? 0 : behind(2, m2, count2));
  }
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
