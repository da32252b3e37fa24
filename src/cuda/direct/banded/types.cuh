// What the pieces of banded.cuh share: those of narrow.cuh, and which segments a warp has. The pieces are
// nested classes, each defined in its own file.
#pragma once

#include "device/mma.cuh"
#include "direct/narrow/tile.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct BandedTypes {
  struct Window;    // window.cuh
  struct Bands;     // bands.cuh
  struct Products;  // products.cuh
  struct Store;     // store.cuh
  struct LateStore;

  using Narrow = NarrowTypes<C, Tail, N>;
  using Parameters = typename Narrow::Parameters;
  using Input = typename Narrow::Input;
  using Parts = typename Narrow::Parts;
  using Results = typename Narrow::Results;
  using Tile = typename Narrow::Tile;
  using Product = conditional<is_same<Input, f16>, mma::F16, mma::Bf16>;

  static constexpr int x_classes = Narrow::x_classes;
  static constexpr int chunk = 8;  // inputs of 16 bytes
  static_assert(N::positions == 8 && Input::bytes == 2);

  // Four words from a byte on, of eight.
  static __device__ __forceinline__ void cut_vector(const uint32 (&word)[8], int by, uint32 (&to)[4]) {
    uint32 moved[7];
#pragma unroll
    for (int k = 0; k < 6; ++k) moved[k] = by & 8 ? word[k + 2] : word[k];
    moved[6] = word[6];
#pragma unroll
    for (int k = 0; k < 5; ++k) moved[k] = by & 4 ? moved[k + 1] : moved[k];
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = by & 2 ? __byte_perm(moved[k], moved[k + 1], 0x5432) : moved[k];
  }

  // Of a warp: a product's sums for each channel, row and class.
  struct Sums {
    float at[N::outputs][N::rows][x_classes][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
        for (int q = 0; q < N::rows; ++q) {
#pragma unroll
          for (int s = 0; s < x_classes; ++s) {
#pragma unroll
            for (float& sum : at[o][q][s]) sum = 0.0f;
          }
        }
      }
    }
  };

  // Where a segment is in the tile, in cells. Segments of a box: along x, then y, then z.
  struct Segment {
    static constexpr int count = N::slots_x * N::slots_y * N::slots_z;
    int at[3];
    bool in_range;

    explicit __device__ __forceinline__ Segment(int index) {
      in_range = index < count;
      Parts parts{static_cast<unsigned>(in_range ? index : 0)};
      at[2] = parts.take(N::slots_x) * N::positions;
      at[1] = parts.take(N::slots_y) * N::rows;
      at[0] = static_cast<int>(parts.rest);
    }
  };

  // What a warp computes at once: 16 segments of some channels of a group.
  struct Item {
    static constexpr int of_channels = (Segment::count + 15) / 16;
    static constexpr int count = N::groups * N::output_slots * of_channels;
    int group, output;
    int first;  // segment
    bool in_range;

    explicit __device__ __forceinline__ Item(int index) {
      Parts parts{static_cast<unsigned>(index)};
      first = parts.take(of_channels) * 16;
      output = parts.take(N::output_slots) * N::outputs;
      group = static_cast<int>(parts.rest);
      in_range = index < count;
    }
  };
};

}  // namespace onepass
