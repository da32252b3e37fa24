// Where things lie in the kernel of the row "gemm_mma": geometry, shared memory, and the threads of a block.
#pragma once

#include "device/mma.cuh"
#include "gemm/gemm.cuh"

namespace onepass {

// The largest magnitude that splits in two parts of tf32.
constexpr float most_split = 0x1.ffep127f;

// A convolution whose vectors hold the channels of `span` neighbouring taps along x, as the mainloop sees it:
// `span` times the channels, and as many fewer taps so much further apart. Channel `tap * all + c` of it is
// channel c of `all`, met by a neighbouring tap.
template <class Convolution, int span>
struct SpannedConvolution : Convolution {
  using Whole = Convolution;
  using C = Convolution;
  static constexpr int64 in_channels = C::in_channels * span;
  static constexpr __device__ int64 delta(int d) { return d == 2 ? C::delta(d) * span : C::delta(d); }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 2 ? (C::count(d, r) + span - 1) / span : C::count(d, r);
  }
};

template <class C, class Numbers>
struct GemmMmaGeometry {
  // Classes of a transposed convolution that read the same x are rows of one product, row
  // `channel * row_classes + class`. Other classes are tiles of their own.
  static constexpr int all_classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr int row_classes = Numbers::merges_classes ? all_classes : 1;
  static constexpr int classes = Numbers::merges_classes ? 1 : all_classes;
  static constexpr int rows = static_cast<int>(C::channels) * row_classes;

  static __device__ __forceinline__ int64 sample_offset(int64 n) {
    return origin<C>(n, Numbers::stride(0), Numbers::stride(1), static_cast<int>(C::channels));
  }
  // Offset of a row's outputs in a sample.
  static __device__ __forceinline__ int64 row_offset(int row) {
    if constexpr (row_classes == 1) return row * Numbers::stride(1);
    const int channel = row / row_classes;
    const ThinClass<C> own(row - channel * row_classes);
    int64 offset = channel * Numbers::stride(1);
#pragma unroll
    for (int d = 0; d < 3; ++d) offset += own.r[d] * Numbers::stride(d + 2);
    return offset;
  }

  // Entries of a dimension of the window: `width` entries are a step of the convolution apart, and the next
  // `width` begin `unit` further.
  static __device__ __forceinline__ int place(int d, int entry) {
    const int run = entry / Numbers::width(d);
    return (entry - run * Numbers::width(d)) * static_cast<int>(C::step(d)) + run * Numbers::unit(d);
  }
  static constexpr __device__ int spread(int d) {
    return static_cast<int>(C::delta(d) < 0 ? -C::delta(d) : C::delta(d));
  }
  // Distance of tap `m` from the first entry of the window.
  static __device__ __forceinline__ int tap_shift(const ThinClass<C>& own, int d, int m) {
    const int index = C::delta(d) < 0 ? own.count[d] - 1 - m : m;
    if (Numbers::compact(d)) return index * Numbers::width(d);
    const int distance = index * spread(d);
    const int step = static_cast<int>(C::step(d));
    return distance % step * Numbers::width(d) + distance / step;
  }
  // First input of the window of a box that begins at output 0.
  static __device__ __forceinline__ int low(const ThinClass<C>& own, int d) {
    return own.base[d] - (C::delta(d) < 0 ? (own.count[d] - 1) * spread(d) : 0);
  }
  // From an entry of the window to the next: a vector of channels, or an element of each channel's plane.
  static constexpr int place_bytes = Numbers::copied_run > 0 ? 2 : 16;
  static constexpr int window = Numbers::entries(0) * Numbers::entries(1) * Numbers::entries(2);

  // A joint is a tap, or two taps that fill products together: all vectors of the first, then those of the
  // second. Where taps are odd, the last joint has one of zeros.
  static __device__ __forceinline__ int joints(int taps) {
    return (taps + Numbers::joint_taps - 1) / Numbers::joint_taps;
  }
  // Joints of all classes before `index`.
  static __device__ __forceinline__ int joints_before(int index) {
    int all = 0;
    for (int i = 0; i < index; ++i) {
      const ThinClass<C> own(i);
      all += joints(own.count[0] * own.count[1] * own.count[2]);
    }
    return all;
  }
};

// How a block's threads have the outputs of a tile: as its sums, or where taps are rows of the product
// (gemm/mma/row_taps.cuh), in fragments of their own.
template <class Numbers>
struct GemmMmaAddedOutputs : Numbers {
  static constexpr int row_tiles = Numbers::output_row_tiles;
  static constexpr int column_tiles = Numbers::output_column_tiles;
  static constexpr int tile_positions = Numbers::output_positions;
  static constexpr int team = Numbers::output_team;
};
template <class Numbers>
using GemmMmaOutputs = conditional<(Numbers::row_taps > 1), GemmMmaAddedOutputs<Numbers>, Numbers>;

template <class C, class Tail, class Numbers>
struct alignas(16) GemmMmaShared {
  static constexpr int warps = Numbers::threads / 32;
  // 32 columns, padded so that pairs of four rows, and 16 rows of a column, lie in different banks.
  static constexpr int value_pitch = 40;
  struct Rings {
    uint4 x[Numbers::windows][Numbers::parts][Numbers::vectors][Numbers::window_pitch];
    uint4 weights[Numbers::stages][Numbers::group_joints][Numbers::parts]
                 [Numbers::joint_taps * Numbers::vectors][Numbers::tile_rows];
  };
  // After the mainloop.
  struct Finish {
    float4 rows[Numbers::warps_n][Numbers::tile_rows];  // moments
    float values[warps][16][value_pitch];               // staged outputs
  };
  // Between the two, where taps are rows. Pairs of four rows lie in different banks.
  static constexpr bool adds = Numbers::row_taps > 1;
  struct Added {
    float products[adds ? C::channels * Numbers::row_taps : 1][adds ? Numbers::tile_positions + 8 : 1];
    float outputs[adds ? C::channels : 1][adds ? Numbers::output_positions + 8 : 1];
  };
  union {
    Rings rings;
    Added added;
    Finish finish;
  };
  // Offsets of the window's entries in a channel of x, -1: outside. Where an entry has several taps of x they
  // are those of its row, and `columns` is where its first tap lies.
  int sources[Numbers::window_pitch];
  int columns[Numbers::span > 1 ? Numbers::window_pitch : 1];
  int targets[Numbers::output_positions];  // offsets of the tile's outputs in a channel, -1: outside
  int tap_shifts[Numbers::most_joints * Numbers::joint_taps];  // in bytes
};

// The tile of a block. Consecutive blocks read the same x, and write the outputs of all classes of a box.
template <class C, class Numbers>
struct GemmMmaItem {
  int64 n;
  int class_index;
  int channel_tile;
  int position_tile;

  __device__ __forceinline__ explicit GemmMmaItem(uint32 index) {
    constexpr uint32 of_box = GemmMmaGeometry<C, Numbers>::classes * Numbers::channel_tiles;
    constexpr uint32 of_sample = of_box * Numbers::position_tiles;
    const uint32 sample = index / of_sample;
    uint32 rest = index - sample * of_sample;
    n = sample;
    position_tile = static_cast<int>(rest / of_box);
    rest -= static_cast<uint32>(position_tile) * of_box;
    class_index = static_cast<int>(rest / Numbers::channel_tiles);
    channel_tile = static_cast<int>(rest) - class_index * Numbers::channel_tiles;
  }
};

// A thread's sums of a tile.
template <class Numbers>
using GemmMmaSums = float[Numbers::row_tiles][Numbers::column_tiles][4];

// A thread of a block, with sums of a product or with outputs of a tile.
template <class C, class Tail, class Numbers>
struct GemmMmaBlock {
  const GemmMmaParameters<Tail::parameters>& p;
  GemmMmaShared<C, Tail, typename Numbers::OfKernel>& s;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  // The warp's first row and column in the tile.
  const int first_row = warp / Numbers::warps_n * (16 * Numbers::row_tiles);
  static constexpr int team = Numbers::team;
  const int first_column = warp % Numbers::warps_n * (2 * team * Numbers::column_tiles);

  // A thread of a product has rows lane / 4 + 8 h of each 16, and two of each eight columns. In general a
  // team of lanes shares a row, and each has two neighbours of its columns.
  static constexpr int half_rows = 32 / team;
  __device__ __forceinline__ int row(int i, int h) const {
    return first_row + i * 16 + lane / team + half_rows * h;
  }
  __device__ __forceinline__ int column(int j) const {
    return first_column + j / 2 * (2 * team) + 2 * (lane % team) + j % 2;
  }
};

}  // namespace onepass
