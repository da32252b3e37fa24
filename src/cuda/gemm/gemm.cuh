// What the kernels of wide convolutions share: the flat index of positions, the order of tiles, shared memory
// of gemm/wgmma.cuh, barriers.
#pragma once

#include "device/barrier.cuh"
#include "device/ring.cuh"
#include "gemm/parameters.cuh"
#include "thin/thin.cuh"

namespace onepass {

// The rows of a product with those that only fill a tile, `padded` of all groups of channels: the `rows` of
// each group begin a tile.
template <class C, int padded, int rows>
struct GroupedRows {
  static constexpr int of_group = padded / static_cast<int>(C::groups);
  static __device__ __forceinline__ int group(int row) { return C::groups == 1 ? 0 : row / of_group; }
  static __device__ __forceinline__ int in_group(int row) { return row - group(row) * of_group; }
  static __device__ __forceinline__ bool exists(int row) { return in_group(row) < rows; }
};

// The flat index: pitches, where taps lie, and which window of x a tile stages.
template <class C, class Numbers>
struct GemmGeometry {
  // Of stride s, every s-th position of x from a phase on is a window by itself: tap m is `offset` positions
  // of phase `phase` further.
  static constexpr __device__ int step(int d) { return static_cast<int>(C::step(d)); }
  static constexpr __device__ int place(int d, int m) {
    return static_cast<int>(C::base(d, 0) + m * C::delta(d));
  }
  static constexpr __device__ int offset(int d, int m) { return (place(d, m) - phase(d, m)) / step(d); }
  static constexpr __device__ int phase(int d, int m) { return (place(d, m) % step(d) + step(d)) % step(d); }
  static constexpr __device__ int low(int d) {
    return C::delta(d) < 0 ? offset(d, static_cast<int>(C::count(d, 0)) - 1) : offset(d, 0);
  }
  // Which of the phases that taps meet it is.
  static constexpr __device__ int phase_index(int d, int m) {
    int before = 0;
    for (int i = 0; i < Numbers::phases(d); ++i) before += Numbers::phase(d, i) < phase(d, m) ? 1 : 0;
    return before;
  }
  // A transposed convolution of stride s is s convolutions (classes), each with every s-th output. Here they
  // read the same x, so that the classes of a channel are rows of one product: row `channel * classes +
  // class`. A position has one output of each class.
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr int rows = static_cast<int>(C::channels) * classes;
  static constexpr __device__ int outputs(int d) { return static_cast<int>(C::positions(d, 0)); }
  static constexpr __device__ int64 output_stride(int d) { return C::stride(d + 2) * C::classes(d); }
  // Where a row's outputs begin in a sample.
  static __device__ __forceinline__ int64 row_offset(int row) {
    if constexpr (classes == 1) return row * C::stride(1);
    const int channel = row / classes;
    const int own = row - channel * classes;
    const int r1 = own / static_cast<int>(C::classes(2));
    const int r0 = r1 / static_cast<int>(C::classes(1));
    return channel * C::stride(1) + r0 * C::stride(2) +
           (r1 - r0 * static_cast<int>(C::classes(1))) * C::stride(3) +
           (own - r1 * static_cast<int>(C::classes(2))) * C::stride(4);
  }
  static constexpr bool has_stride = C::step(0) * C::step(1) * C::step(2) > 1;
  static constexpr int pitch = Numbers::pitch;  // positions of a row
  static constexpr int plane = Numbers::plane;  // of a plane
  static constexpr int positions = Numbers::positions;
  // The flat index is the output's own.
  static constexpr bool contiguous =
      !Numbers::boxed && classes == 1 && pitch == static_cast<int>(C::output_size(2)) &&
      plane == pitch * static_cast<int>(C::output_size(1)) && C::stride(4) == 1 && C::stride(3) == pitch &&
      (C::output_size(0) == 1 || C::stride(2) == plane);
  // Windows of this many neighbours: one; one for each tap of the first dimension; or of the first two.
  static constexpr int split = Numbers::window_split;
  static constexpr int window = Numbers::window;
  static constexpr int windows = Numbers::windows;

  // Where the first position of a window lies from the tile's.
  static __device__ __forceinline__ int window_shift(int w) {
    if constexpr (has_stride) return low(0) * plane + low(1) * pitch + low(2);
    const int m0 = split == 0 ? 0 : split == 1 ? w : w / static_cast<int>(C::count(1, 0));
    const int m1 = split == 2 ? w - m0 * static_cast<int>(C::count(1, 0)) : 0;
    return (split == 0 ? low(0) : offset(0, m0)) * plane + (split == 2 ? offset(1, m1) : low(1)) * pitch +
           low(2);
  }
  // Where the tile's first position lies in its windows at a tap.
  static constexpr __device__ int tap_shift(int t) {
    const int k1 = static_cast<int>(C::count(1, 0));
    const int k2 = static_cast<int>(C::count(2, 0));
    const int m0 = t / (k1 * k2);
    const int m1 = t / k2 % k1;
    const int m2 = t % k2;
    if (has_stride) {
      const int w = (phase_index(0, m0) * Numbers::phases(1) + phase_index(1, m1)) * Numbers::phases(2) +
                    phase_index(2, m2);
      return w * window + (offset(0, m0) - low(0)) * plane + (offset(1, m1) - low(1)) * pitch +
             offset(2, m2) - low(2);
    }
    const int z = split == 0 ? (offset(0, m0) - low(0)) * plane : split == 1 ? m0 * window : m0 * k1 * window;
    const int y = split == 2 ? m1 * window : (offset(1, m1) - low(1)) * pitch;
    return z + y + offset(2, m2) - low(2);
  }
  // --- A tile ---
  // Either `tile_positions` neighbours of the sample's index; or a box of outputs that has an index of its
  // own, whose pitches are those of the box's window. Boxes meet less of x where rows are long.
  struct Box {
    int first[3];  // output

    explicit __device__ __forceinline__ Box(int tile) {
      const int y = tile / Numbers::boxes_x;
      const int z = y / Numbers::boxes_y;
      first[0] = z * Numbers::box_z;
      first[1] = (y - z * Numbers::boxes_y) * Numbers::box_y;
      first[2] = (tile - y * Numbers::boxes_x) * Numbers::box_x;
    }
  };
  static constexpr int rows_of_plane = plane / pitch;
  // Runs of neighbours that a tile's window has in a dense channel of x: of a box one for each row.
  static constexpr int runs = Numbers::boxed ? window / pitch : windows;

  // Which of them a place in the windows belongs to.
  static __device__ __forceinline__ int run_of(int place) {
    if constexpr (Numbers::boxed) return place / pitch;
    return windows == 1 ? 0 : place / window;
  }
  // Where x of a place in the windows lies in a channel; -1 where there is none.
  static __device__ __forceinline__ int source(int tile, int place) {
    if constexpr (Numbers::boxed) {
      const Box box(tile);
      const int row = place / pitch;
      const int z = row / rows_of_plane;
      const int i0 = box.first[0] + z + low(0);
      const int i1 = box.first[1] + row - z * rows_of_plane + low(1);
      const int i2 = box.first[2] + place - row * pitch + low(2);
      const bool inside = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                          static_cast<unsigned>(i1) < static_cast<unsigned>(C::input_size(1)) &&
                          static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2));
      return inside ? static_cast<int>(i0 * C::input_stride(2) + i1 * C::input_stride(3) +
                                       i2 * C::input_stride(4))
                    : -1;
    }
    const int w = run_of(place);
    return input_offset(tile * Numbers::tile_positions + window_shift(w) + place - w * window, w);
  }
  // The elements of a dense channel that a run has: from, and to before which.
  static __device__ __forceinline__ void extent(int tile, int run, int& from, int& to) {
    if constexpr (Numbers::boxed) {
      constexpr int rows = static_cast<int>(C::input_size(1));
      constexpr int columns = static_cast<int>(C::input_size(2));
      const Box box(tile);
      const int z = run / rows_of_plane;
      const int i0 = box.first[0] + z + low(0);
      const int i1 = box.first[1] + run - z * rows_of_plane + low(1);
      const int i2 = box.first[2] + low(2);
      const bool inside = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                          static_cast<unsigned>(i1) < rows;
      const int begin = i2 < 0 ? 0 : i2 < columns ? i2 : columns;
      const int end = i2 + pitch < 0 ? 0 : i2 + pitch < columns ? i2 + pitch : columns;
      from = inside ? (i0 * rows + i1) * columns + begin : 0;
      to = inside ? (i0 * rows + i1) * columns + end : 0;
    } else {
      const int begin = tile * Numbers::tile_positions + window_shift(run);
      from = input_from(begin);
      to = input_from(begin + window);
    }
  }
  // Where the output of the tile's i-th position lies in a channel; -1 where there is none.
  static __device__ __forceinline__ int target(int tile, int i) {
    if constexpr (Numbers::boxed) {
      const Box box(tile);
      const int row = i / pitch;
      const int z = row / rows_of_plane;
      const int y = row - z * rows_of_plane;
      const int x = i - row * pitch;
      const int o0 = box.first[0] + z;
      const int o1 = box.first[1] + y;
      const int o2 = box.first[2] + x;
      const bool inside = z < Numbers::box_z && y < Numbers::box_y && x < Numbers::box_x && o0 < outputs(0) &&
                          o1 < outputs(1) && o2 < outputs(2);
      return inside ? static_cast<int>(o0 * output_stride(0) + o1 * output_stride(1) + o2 * output_stride(2))
                    : -1;
    }
    return output_offset(tile * Numbers::tile_positions + i);
  }

 private:
  // Where x of a flat position of window w lies in a channel; -1 where there is none.
  static __device__ __forceinline__ int input_offset(int flat, int w) {
    // Not negative: planes before the first are counted from further back.
    constexpr int back = low(0) < 0 ? 2 - low(0) : 2;
    const auto shifted = static_cast<unsigned>(flat + back * plane);
    const unsigned z = shifted / static_cast<unsigned>(plane);
    const unsigned in_plane = shifted - z * static_cast<unsigned>(plane);
    const unsigned y = in_plane / static_cast<unsigned>(pitch);
    const unsigned x = in_plane - y * static_cast<unsigned>(pitch);
    if constexpr (has_stride) {
      const int w1 = w / Numbers::phases(2);
      const int i0 = (static_cast<int>(z) - back) * step(0) +
                     static_cast<int>(Numbers::phase(0, w1 / Numbers::phases(1)));
      const int i1 =
          static_cast<int>(y) * step(1) + static_cast<int>(Numbers::phase(1, w1 % Numbers::phases(1)));
      const int i2 =
          static_cast<int>(x) * step(2) + static_cast<int>(Numbers::phase(2, w % Numbers::phases(2)));
      const bool inside = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                          i1 < static_cast<int>(C::input_size(1)) && i2 < static_cast<int>(C::input_size(2));
      return inside ? static_cast<int>(i0 * C::input_stride(2) + i1 * C::input_stride(3) +
                                       i2 * C::input_stride(4))
                    : -1;
    }
    const bool inside = z - back < static_cast<unsigned>(C::input_size(0)) &&
                        y < static_cast<unsigned>(C::input_size(1)) &&
                        x < static_cast<unsigned>(C::input_size(2));
    return inside ? static_cast<int>((z - back) * C::input_stride(2) + y * C::input_stride(3) +
                                     x * C::input_stride(4))
                  : -1;
  }
  // Where x of the first position at or after `flat` that has one lies in a dense channel.
  static __device__ __forceinline__ int input_from(int flat) {
    constexpr int back = low(0) < 0 ? 2 - low(0) : 2;
    constexpr int rows = static_cast<int>(C::input_size(1));
    constexpr int columns = static_cast<int>(C::input_size(2));
    const auto shifted = static_cast<unsigned>(flat + back * plane);
    const unsigned plane_index = shifted / static_cast<unsigned>(plane);
    const unsigned in_plane = shifted - plane_index * static_cast<unsigned>(plane);
    const int y = static_cast<int>(in_plane / static_cast<unsigned>(pitch));
    const int x = static_cast<int>(in_plane) - y * pitch;
    const int z = static_cast<int>(plane_index) - back;
    if (z < 0) return 0;
    if (z >= static_cast<int>(C::input_size(0))) return static_cast<int>(C::input_size(0)) * rows * columns;
    if (y >= rows) return (z + 1) * rows * columns;
    return (z * rows + y) * columns + (x < columns ? x : columns);
  }
  // Where the output of a flat position lies in a channel; -1 where there is none.
  static __device__ __forceinline__ int output_offset(int flat) {
    if constexpr (contiguous) return flat < positions ? flat : -1;
    const auto whole = static_cast<unsigned>(flat);
    const unsigned z = whole / static_cast<unsigned>(plane);
    const unsigned in_plane = whole - z * static_cast<unsigned>(plane);
    const unsigned y = in_plane / static_cast<unsigned>(pitch);
    const unsigned x = in_plane - y * static_cast<unsigned>(pitch);
    const bool inside = z < static_cast<unsigned>(outputs(0)) && y < static_cast<unsigned>(outputs(1)) &&
                        x < static_cast<unsigned>(outputs(2));
    return inside ? static_cast<int>(z * output_stride(0) + y * output_stride(1) + x * output_stride(2)) : -1;
  }
};

// A work item of a block: one tile of a unit, in one of the passes.
template <class Tail, class Numbers>
struct GemmItem {
  static constexpr int unit_tiles = Numbers::unit_channel_tiles * Numbers::position_tiles;
  static constexpr int units_of_sample = Numbers::channel_tiles / Numbers::unit_channel_tiles;
  static constexpr int sample_tiles = Numbers::channel_tiles * Numbers::position_tiles;
  // Both passes compute values.
  static constexpr bool twice = Tail::has_norm && !Numbers::held && !Numbers::stored;
  using Items = Schedule<twice ? unit_tiles : 0, twice && Tail::mean_follows_norm ? 0 : unit_tiles>;

  bool is_first;
  int64 unit;
  int64 n;
  int channel_tile;
  int position_tile;

  static __device__ __forceinline__ int64 count(int64 batch, int64 wave_units) {
    const int64 units = batch * units_of_sample;
    return twice ? Items::tickets(units, wave_units) : units * unit_tiles;
  }

  __device__ __forceinline__ GemmItem(int64 index, int64 wave_units) {
    int tile;
    is_first = Numbers::stored;
    if constexpr (Numbers::stored || !Tail::has_norm) {
      // Nobody waits for a unit: tiles that read the same window run together.
      n = static_cast<int64>(static_cast<uint32>(index) / static_cast<uint32>(sample_tiles));
      tile = static_cast<int>(index - n * sample_tiles);
      position_tile = tile / Numbers::channel_tiles;
      channel_tile = tile - position_tile * Numbers::channel_tiles;
      unit = n * units_of_sample + channel_tile / Numbers::unit_channel_tiles;
      return;
    } else if constexpr (twice) {
      const Items item(index, wave_units);
      is_first = item.is_first;
      unit = item.unit;
      tile = item.tile;
    } else {
      unit = static_cast<int64>(static_cast<uint32>(index) / static_cast<uint32>(unit_tiles));
      tile = static_cast<int>(static_cast<uint32>(index) % static_cast<uint32>(unit_tiles));
    }
    n = static_cast<int64>(static_cast<uint32>(unit) / static_cast<uint32>(units_of_sample));
    const int of_sample = static_cast<int>(unit - n * units_of_sample);
    position_tile = tile / Numbers::unit_channel_tiles;
    channel_tile =
        of_sample * Numbers::unit_channel_tiles + (tile - position_tile * Numbers::unit_channel_tiles);
  }
};

// A consumer thread's sums of a tile.
template <class Numbers>
using GemmSums = float[Numbers::columns / 2];

// The shared memory of a block.
template <class C, class Tail, class Numbers>
struct alignas(128) GemmShared {
  static constexpr int slabs = Numbers::tile_channels;  // the most that a tile has channels of
  static constexpr int agents = Numbers::apart ? 2 : 1;
  // 32 columns, and as many more that pairs of four rows lie in different banks.
  static constexpr int value_pitch = 40;
  // Of each warp: eight rows on their way to memory, or all 16 until the next tile is multiplied.
  static constexpr bool keeps_values = Numbers::late_vectors > 0;
  static constexpr int value_bytes = keeps_values ? 16 * Numbers::late_pitch : 8 * value_pitch * 4;
  static constexpr int offset_count = GemmGeometry<C, Numbers>::contiguous ? 2 : Numbers::tile_positions;

  alignas(128) unsigned char x[Numbers::x_stages][Numbers::x_stage_bytes];
  alignas(128) unsigned char weights[Numbers::weight_stages][Numbers::weight_stage_bytes];
  alignas(128) unsigned char raw[Numbers::raw_slots][Numbers::raw_slot_bytes];  // x as it comes
  alignas(16) unsigned char values[8][value_bytes];
  // Moments of the rows of each warpgroup, where they have a place of their own.
  float4 own_rows[keeps_values ? 1 : 2 * 64];
  alignas(8) int offsets[offset_count];  // where positions of the tile lie in a channel, -1: nowhere
  float2 statistics[agents][slabs];
  uint64 x_full[Numbers::x_stages];
  uint64 x_empty[Numbers::x_stages];
  uint64 weights_full[Numbers::weight_stages];
  uint64 weights_empty[Numbers::weight_stages];
  uint64 raw_full[Numbers::raw_slots];
  uint64 raw_empty[Numbers::raw_slots];
  uint32 tap_shifts[Numbers::taps];  // in bytes
  uint32 last[2];

  // Rows of a warp, before their values.
  __device__ __forceinline__ float4& rows(int group, int row) {
    if constexpr (keeps_values) {
      return reinterpret_cast<float4*>(values[group * 4 + row / 16])[row % 16];
    } else {
      return own_rows[group * 64 + row];
    }
  }
  __device__ __forceinline__ float (&stage(int warp))[8][value_pitch] {
    return *reinterpret_cast<float(*)[8][value_pitch]>(values[warp]);
  }
};

namespace gemm {

constexpr int consumer_threads = 256;
constexpr int consumer_warps = 8;
constexpr int staging_warps = 4;
constexpr int converting_warps = 3;  // of those, where x comes by copies

// Split operands are multiplied by this: the second part of an element of 1 is then far from f16's least
// numbers, and one of 4,000 fits.
constexpr float split_scale = 16.0f;
// Where they are rounded instead, magnitudes below 2^-14 lose bits. With sums of 40,000 terms and a norm that
// could show, and samples were computed again: conv3d(640,24,k=5) with a norm took 164 ms for 1.4. So they
// are multiplied too; an element of 16,000 fits.
constexpr float rounded_scale = 4.0f;
template <class Numbers>
constexpr float x_scale = Numbers::parts == 2 ? split_scale
                          : Numbers::scales_x ? rounded_scale
                                              : 1.0f;

// Between the two warpgroups of consumers alone.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// A named barrier of 256 threads: the second warpgroup's products wait for the first.
__device__ __forceinline__ void wait_for_first() { asm volatile("bar.sync 2, 256;" ::: "memory"); }
__device__ __forceinline__ void allow_second() { asm volatile("bar.arrive 2, 256;" ::: "memory"); }
// Between the threads of one warpgroup.
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
}

// A warpgroup waits for the other one to hand its turn over.
__device__ __forceinline__ void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(5 + group) : "memory");
}
__device__ __forceinline__ void hand_over_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(6 - group) : "memory");
}

__device__ __forceinline__ float largest_of(float largest, float x) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(largest), "f"(fabsf(x)));
  return result;
}

// The power of two that takes a positive magnitude, given by its bits, to [2^13, 2^14), as far as it and its
// inverse are normal numbers.
__device__ __forceinline__ float operand_scale(uint32 bits) {
  int exponent = 13 - (static_cast<int>(bits >> 23) - 127);
  exponent = exponent > 120 ? 120 : exponent < -120 ? -120 : exponent;
  return __uint_as_float(static_cast<uint32>(127 + exponent) << 23);
}

// The tap of the whole kernel that is tap `t` of a class of a transposed convolution.
template <class C>
__device__ __forceinline__ int tap_of_class(int own, int t) {
  int tap = 0;
  int step = 1;
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    const int of_dimension = static_cast<int>(C::classes(d));
    const int count = static_cast<int>(C::count(d, own % of_dimension));
    tap += step * static_cast<int>(C::first(d, own % of_dimension) + t % count * C::tap_step(d));
    step *= static_cast<int>(C::kernel(d));
    own /= of_dimension;
    t /= count;
  }
  return tap;
}

// By a warp: whether a stage of a ring that went round so often is free.
__device__ __forceinline__ bool has_room(uint64* empty, uint32 round) {
  uint32 is_free;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(is_free)
      : "r"(barrier::shared_address(empty)), "r"(round ^ 1u)
      : "memory");
  return __shfl_sync(0xffffffffu, is_free, 0) != 0;
}

// Marks a sample to be computed again.
template <class Parameters>
__device__ __forceinline__ void mark_sample(const Parameters& p, int64 n) {
  p.only[n] = 1;
  atomicMax(p.only + p.batch, static_cast<uint32>(redo_some));
}

// Marks a sample whose values overflow or underflow f16. A magnitude below 2^-14 loses up to 2^-25. After a
// norm, which multiplies by `scale`, the effect must not show beside values of the order of 1; without a norm
// it must not show beside the rounding of the largest value.
template <class Tail, class Numbers, class Parameters>
__device__ __forceinline__ void judge(const Parameters& p, int64 n, float largest, float scale) {
  constexpr float limit = 65504.0f;
  bool redo = !(largest <= limit);
  if (largest > 0.0f) {
    constexpr bool splits = Numbers::parts == 2;
    if constexpr (Tail::has_norm) {
      const float lost = 0x1p-25f / x_scale<Numbers> * __ldcg(p.scales + Numbers::padded_channels) *
                         Numbers::steepness * scale;
      redo |= !(lost <= (splits ? 1e-6f : 1e-5f));
    } else {
      redo |= largest < (splits ? 0x1p-7f * split_scale : 0x1p-4f);
    }
  }
  if (redo) mark_sample(p, n);
}
template <class Tail, class Numbers, class Parameters>
__device__ __forceinline__ void judge(const Parameters& p, int64 n, float scale) {
  judge<Tail, Numbers>(p, n, __uint_as_float(__ldcg(p.guard + n)), scale);
}

// By one thread of a launch: marks all samples where packing found a weight that is not finite. The mark lies
// with the packed weights, behind the largest sum of magnitudes, since these may be kept for many calls.
template <class Numbers, class Parameters>
__device__ __forceinline__ void mark_by_weights(const Parameters& p) {
  const uint32 mark = __float_as_uint(__ldcg(p.scales + Numbers::padded_channels + 1));
  if (mark != redo_none) atomicMax(p.only + p.batch, mark);
}

// Adds one to a counter of the launch, as count_up, without reading it.
__device__ __forceinline__ void arrive(uint32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace gemm

}  // namespace onepass
