// The flat index of all samples of the row "gemm_packed", its taps and its rows.
#pragma once

#include "gemm/flat_index.cuh"
#include "gemm/gemm.cuh"

namespace onepass {

template <class C, class Numbers>
struct PackedGemmGeometry {
  static constexpr __device__ int offset(int d, int m) {
    return static_cast<int>(C::base(d, 0) + m * C::delta(d));
  }
  static constexpr __device__ int shift(int t) {
    const int k1 = static_cast<int>(C::count(1, 0));
    const int k2 = static_cast<int>(C::count(2, 0));
    return offset(0, t / (k1 * k2)) * Numbers::plane + offset(1, t / k2 % k1) * Numbers::pitch +
           offset(2, t % k2);
  }
  // The least shift of a group of taps. A group is a whole row or plane of the kernel, or all of it.
  static constexpr __device__ int first_shift(int group) {
    const int first = group * Numbers::group_taps;
    const int last = first + Numbers::group_taps - 1;
    return shift(first) < shift(last) ? shift(first) : shift(last);
  }

  // Classes of a transposed convolution that read the same x are rows of the product, as in gemm/gemm.cuh.
  // Where channels of the values are neighbours, all channels of one class come before those of the next.
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr bool by_class = classes > 1 && Numbers::value_stride_c == 1;
  // Channel and class of a row of the group.
  static __device__ __forceinline__ int channel_of(int row) {
    return by_class ? row % static_cast<int>(C::channels) : row / classes;
  }
  static __device__ __forceinline__ int class_of(int row) {
    return by_class ? row / static_cast<int>(C::channels) : row - row / classes * classes;
  }
  static constexpr int rows = static_cast<int>(C::channels) * classes;
  using Rows = GroupedRows<C, Numbers::padded_channels, rows>;
  static __device__ __forceinline__ bool exists(int row) { return Rows::exists(row); }
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
