// The flat index of all samples of the row "gemm_packed", its taps and its rows.
#pragma once

#include "gemm/flat_index.cuh"
#include "gemm/gemm.cuh"

namespace onepass {

template <class C, class Numbers>
struct PackedGemmGeometry {
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  // Of a class in one dimension.
  static constexpr __device__ int part_of_class(int d, int own) {
    for (int i = 2; i > d; --i) own /= static_cast<int>(C::classes(i));
    return own % static_cast<int>(C::classes(d));
  }
  static constexpr __device__ int count(int d, int own) {
    return static_cast<int>(C::count(d, part_of_class(d, own)));
  }
  static constexpr __device__ uint32 positions(int d, int own) {
    return static_cast<uint32>(C::positions(d, part_of_class(d, own)));
  }
  static constexpr __device__ int offset(int d, int m, int own) {
    return static_cast<int>(C::base(d, part_of_class(d, own)) + m * C::delta(d));
  }
  // Of tap `t` of a class.
  static constexpr __device__ int shift(int t, int own = 0) {
    const int k1 = count(1, own);
    const int k2 = count(2, own);
    return offset(0, t / (k1 * k2), own) * Numbers::plane + offset(1, t / k2 % k1, own) * Numbers::pitch +
           offset(2, t % k2, own);
  }
  // Taps of a class, and groups of them.
  static constexpr __device__ int class_taps(int own) {
    return count(0, own) * count(1, own) * count(2, own);
  }
  static constexpr __device__ int groups(int own) { return class_taps(own) / Numbers::group_taps; }
  // The least shift of a group of taps. A group is a whole row or plane of the kernel, or all of it.
  static constexpr __device__ int first_shift(int group, int own = 0) {
    const int first = group * Numbers::group_taps;
    const int last = first + Numbers::group_taps - 1;
    return shift(first, own) < shift(last, own) ? shift(first, own) : shift(last, own);
  }

  // Classes of a transposed convolution that read the same x are rows of the product, as in gemm/gemm.cuh.
  // Where channels of the values are neighbours, all channels of one class come before those of the next.
  // Classes that read different x are apart: a tile has rows of one class, and neighbouring tiles have the
  // same channels of the next.
  static constexpr bool apart = Numbers::classes_apart;
  static constexpr bool by_class = classes > 1 && Numbers::value_stride_c == 1;
  static constexpr int tile_channels = Numbers::tile_channels;
  // Tiles of rows of a group.
  static constexpr int group_tiles = Numbers::padded_channels / tile_channels / static_cast<int>(C::groups);
  // The class that all rows of a tile belong to; 0 where classes meet the same elements.
  static __device__ __forceinline__ int class_of_tile(int channel_tile) {
    if constexpr (!apart) return 0;
    return channel_tile % group_tiles % classes;
  }
  // Classes that are apart have different numbers of taps. A block takes them by turns: where the number of
  // blocks is a multiple of the number of classes, it would have tiles of one class alone.
  static __device__ __forceinline__ int in_turn(int channel_tile, int64 tile) {
    if constexpr (!apart) return channel_tile;
    const int own = channel_tile % classes;
    return channel_tile - own + static_cast<int>((own + tile) % classes);
  }
  // Channel and class of a row of the group.
  static __device__ __forceinline__ int channel_of(int row) {
    if constexpr (apart) return row / (tile_channels * classes) * tile_channels + row % tile_channels;
    return by_class ? row % static_cast<int>(C::channels) : row / classes;
  }
  static __device__ __forceinline__ int class_of(int row) {
    if constexpr (apart) return row / tile_channels % classes;
    return by_class ? row / static_cast<int>(C::channels) : row - row / classes * classes;
  }
  static constexpr int rows = apart ? Numbers::padded_channels / static_cast<int>(C::groups)
                                    : static_cast<int>(C::channels) * classes;
  using Rows = GroupedRows<C, Numbers::padded_channels, rows>;
  static __device__ __forceinline__ bool exists(int row) {
    if constexpr (apart) return channel_of(Rows::in_group(row)) < C::channels;
    return Rows::exists(row);
  }
  // Whether a row's class has so many taps.
  static __device__ __forceinline__ bool has_tap(int row, int t) {
    return !apart || t < class_taps(class_of(Rows::in_group(row)));
  }
  // Offset of the weight of an input channel and a tap of the row's class.
  static __device__ __forceinline__ int64 weight_index(int row, int c, int t) {
    return Rows::group(row) * group_weights<C> + weight_in_group(Rows::in_group(row), c, t);
  }
  static __device__ __forceinline__ int64 weight_in_group(int row, int c, int t) {
    if constexpr (!C::transposed) return (static_cast<int64>(row) * C::in_channels + c) * Numbers::taps + t;
    const int tap = gemm::tap_of_class<C>(class_of(row), t);
    return (static_cast<int64>(c) * C::channels + channel_of(row)) * C::taps + tap;
  }
  // The output channel that a row belongs to.
  static __device__ __forceinline__ int channel(int row) {
    return Rows::group(row) * static_cast<int>(C::channels) + channel_of(Rows::in_group(row));
  }
  // Offset of a row's values in a sample.
  static __device__ __forceinline__ int64 value_offset(int row) {
    const int channel = PackedGemmGeometry::channel(row);
    if constexpr (classes == 1) return static_cast<int64>(channel) * Numbers::value_stride_c;
    const int own = class_of(Rows::in_group(row));
    const int r1 = own / static_cast<int>(C::classes(2));
    const int r0 = r1 / static_cast<int>(C::classes(1));
    return static_cast<int64>(channel) * Numbers::value_stride_c + r0 * Numbers::value_stride0 +
           (r1 - r0 * static_cast<int>(C::classes(1))) * Numbers::value_stride1 +
           (own - r1 * static_cast<int>(C::classes(2))) * Numbers::value_stride2;
  }

  template <class Parameters>
  static __device__ __forceinline__ uint32 samples(const Parameters& p) {
    return static_cast<uint32>(p.batch) / static_cast<uint32>(C::groups);
  }
};

}  // namespace onepass
