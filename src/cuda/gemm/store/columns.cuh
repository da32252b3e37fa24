// The columns of a tile that a consumer thread of gemm/wgmma.cuh has, and where they lie in the output.
#pragma once

#include "gemm/gemm.cuh"

namespace onepass {

// A thread has every fourth pair of columns: column i is i / 2 * 8 + i % 2 after the first. `offsets` are
// those of the tile's columns in a channel. They are computed where the flat index is the output's own.
template <class Geometry, int Columns, bool contiguous = Geometry::contiguous>
struct GemmColumns {
  const int* own;
  uint32 inside[(Columns + 31) / 32] = {};  // a bit for each that has an output

  __device__ __forceinline__ GemmColumns(const int* offsets, int, int column) : own(offsets + column) {
#pragma unroll
    for (int i = 0; i < Columns; i += 2) {
      const int2 pair = *reinterpret_cast<const int2*>(own + i / 2 * 8);
      inside[i / 32] |= (static_cast<uint32>(pair.x >= 0) | static_cast<uint32>(pair.y >= 0) << 1)
                        << (i % 32);
    }
  }
  __device__ __forceinline__ bool has(int i) const { return inside[i / 32] >> (i % 32) & 1u; }
  // Only of a column that has an output.
  __device__ __forceinline__ int offset(int i) const { return own[i / 2 * 8 + i % 2]; }
  __device__ __forceinline__ int count() const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < (Columns + 31) / 32; ++i) sum += __popc(inside[i]);
    return sum;
  }
};
template <class Geometry, int Columns>
struct GemmColumns<Geometry, Columns, true> {
  int first;
  int left;

  __device__ __forceinline__ GemmColumns(const int*, int tile_position, int column)
      : first(tile_position + column), left(Geometry::positions - first) {}
  __device__ __forceinline__ bool has(int i) const { return left > i / 2 * 8 + i % 2; }
  __device__ __forceinline__ int offset(int i) const { return first + i / 2 * 8 + i % 2; }
  __device__ __forceinline__ int count() const {
    const int whole = left <= 0 ? 0 : left / 8 * 2 + (left % 8 < 2 ? left % 8 : 2);
    return whole < Columns ? whole : Columns;
  }
};

// Of a tile of gemm/wgmma.cuh.
template <class C, class Numbers>
using GemmTileColumns = GemmColumns<GemmGeometry<C, Numbers>, Numbers::columns / 4>;

}  // namespace onepass
