// What kernels that pack tensors over one flat index of all samples share.
#pragma once

#include "device/types.cuh"

namespace onepass {

// A position of the flat index as sample, plane, row and column.
template <class Numbers>
struct FlatPosition {
  uint32 n, z, y, x;

  explicit __device__ __forceinline__ FlatPosition(uint32 flat) {
    n = flat / static_cast<uint32>(Numbers::sample);
    const uint32 in_sample = flat - n * static_cast<uint32>(Numbers::sample);
    z = in_sample / static_cast<uint32>(Numbers::plane);
    const uint32 in_plane = in_sample - z * static_cast<uint32>(Numbers::plane);
    y = in_plane / static_cast<uint32>(Numbers::pitch);
    x = in_plane - y * static_cast<uint32>(Numbers::pitch);
  }
};

// Eight of the `channels` of a group at a position, from channel `first` at `at` on; zeros where there is
// none. `whole`: no octet has fewer.
template <class Type, int channels, bool whole, bool in_vectors>
__device__ __forceinline__ void load_octet(const void* tensor, int64 at, int64 channel_stride, int first,
                                           bool inside, float (&x)[8]) {
  if constexpr (in_vectors) {
    if (inside && first < channels) {
      Packed<Type, 8> vector;
      vector.load(tensor, at, true);
      vector.unpack(x);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = 0.0f;
    }
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const bool exists = inside && (whole || first + k < channels);
      x[k] = exists ? load_one<Type>(tensor, at + k * channel_stride) : 0.0f;
    }
  }
}

}  // namespace onepass
