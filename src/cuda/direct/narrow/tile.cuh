// What the pieces of narrow.cuh share: the block's tile, a thread's part of it, and how rows of vectors are
// copied. The pieces are nested classes, each defined in its own file.
#pragma once

#include "direct/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct NarrowTypes {
  struct Staging;   // staging.cuh
  struct Products;  // products.cuh
  struct Results;   // results.cuh

  using Parameters = NarrowParameters<Tail::parameters>;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  using Output = typename Tail::Output;

  static constexpr int x_classes = static_cast<int>(C::classes(2));
  static constexpr int cells = N::positions * x_classes;  // outputs of a thread along x
  static constexpr int channels = N::groups * N::outputs * N::output_slots;
  static constexpr int group_outputs = N::outputs * N::output_slots;  // of a group in the tile
  static constexpr int box[3] = {N::slots_z, N::rows* N::slots_y, N::positions* N::slots_x};
  static constexpr int box_outputs = box[2] * x_classes;  // along x

  // Of a thread.
  using Sums = float[N::outputs][N::rows][cells];

  // A count that is taken apart, the fastest running part first.
  struct Parts {
    unsigned rest;

    __device__ __forceinline__ int take(int count) {
      const auto of = static_cast<unsigned>(count);
      const unsigned quotient = rest / of;
      const auto own = static_cast<int>(rest - quotient * of);
      rest = quotient;
      return own;
    }
  };

  // What a block computes.
  struct Tile {
    int64 n;
    int group;   // its first one
    int output;  // its first channel in each group
    int r[2];    // classes of z and y
    int cell[3];

    explicit __device__ __forceinline__ Tile(unsigned index) {
      Parts parts{index};
      const auto take = [&](int count) { return parts.take(count); };
      // Tiles that share their input are neighbours: channels of a group, classes, then the box.
      output = take(N::output_tiles) * group_outputs;
      r[1] = take(static_cast<int>(C::classes(1)));
      r[0] = take(static_cast<int>(C::classes(0)));
      // Channels of a position that several tiles share are one run of memory where they lie together.
      if constexpr (N::input_interleaved) group = take(N::group_tiles) * N::groups;
      cell[2] = take(N::tiles_x) * box[2];
      cell[1] = take(N::tiles_y) * box[1];
      cell[0] = take(N::tiles_z) * box[0];
      if constexpr (!N::input_interleaved) group = take(N::group_tiles) * N::groups;
      n = static_cast<int64>(parts.rest);
    }

    // The first input that the window has.
    __device__ __forceinline__ int origin(int d) const {
      const int first = cell[d] * static_cast<int>(C::step(d));
      if (d == 2) return first + N::first_x;
      const int at = r[d];
      const auto count = static_cast<int>(C::count(d, at));
      const auto delta = static_cast<int>(C::delta(d));
      return first + static_cast<int>(C::base(d, at)) + (delta < 0 && count > 0 ? (count - 1) * delta : 0);
    }
  };

  // Where a thread's outputs are in the tile.
  struct Slot {
    int group, output;
    int at[3];
    bool in_range;

    __device__ __forceinline__ Slot() {
      Parts parts{threadIdx.x};
      const auto take = [&](int count) { return parts.take(count); };
      in_range = threadIdx.x < static_cast<unsigned>(N::slots);
      if constexpr (N::input_interleaved) take_channels(take);
      at[2] = take(N::slots_x) * N::positions;
      at[1] = take(N::slots_y) * N::rows;
      at[0] = take(N::slots_z);
      if constexpr (!N::input_interleaved) take_channels(take);
    }

   private:
    template <class Take>
    __device__ __forceinline__ void take_channels(const Take& take) {
      output = take(N::output_slots) * N::outputs;
      group = take(N::groups);
    }
  };

  // Which of the output's channels one of the tile is.
  struct ResultChannel {
    int channel;
    bool in_range;

    __device__ __forceinline__ ResultChannel(const Tile& tile, int own) {
      const int group = tile.group + own / group_outputs;
      const int output = tile.output + own % group_outputs;
      channel = group * static_cast<int>(C::channels) + output;
      in_range = group < C::groups && output < C::channels;
    }
  };

  static constexpr float largest_float = 3.402823466e+38f;

  // Neighbouring threads read a row `skew` elements apart: one more float after each avoids bank conflicts.
  static constexpr __device__ int skewed(int x, int skew) { return skew > 0 ? x + x / skew : x; }

  // A row of vectors that lie together in memory: along x or, interleaved, the channels of a position.
  // `Lanes` threads copy it in `steps` steps, several rows at once.
  template <int Vectors, int Lanes>
  struct Rows {
    static constexpr int steps = (Vectors + Lanes - 1) / Lanes;
    static constexpr int at_once = N::threads / Lanes;
    // Rows that a thread takes together: eight loads are in flight.
    static constexpr int together = steps >= 8 ? 1 : 8 / steps;

    static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x) / Lanes; }
    static __device__ __forceinline__ int vector(int step) {
      return static_cast<int>(threadIdx.x) % Lanes + step * Lanes;
    }
    static __device__ __forceinline__ bool has(int step) {
      return Vectors % Lanes == 0 || step + 1 < steps || vector(step) < Vectors;
    }
  };
};

}  // namespace onepass
