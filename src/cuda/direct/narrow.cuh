// A convolution whose groups have few inputs, with the chain after it: any kernel, stride, padding, dilation,
// transposed or not, on CUDA cores.
//
//   y[n, o, q] = chain(bias[o] + sum over inputs c of the group, taps t:  w[o, c, t] x[n, c, i(q, t)])
//
// A block computes a tile: a box of cells times channels of some groups. A cell is one output position, or of
// a transposed convolution those of all classes along x (ThinAxis). It stages the input's window and the
// weights as f32, with zeros outside the input, in chunks of input channels. A thread holds `outputs` channels
// of `rows` x `positions` cells in registers. It loads the segment of a window's row once for all taps and
// cells of that row. The sums go through shared memory, so that x is read and y written in whole sectors in
// both layouts. Moves x once, apart from halos, and y once.
//
// Terms are added by input channel, then by tap, whatever the tile. Tiles so do not change the bits.
#pragma once

#include "direct/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

template <class Convolution, class TailOfBlock, class Numbers>
struct Narrow {
  using C = Convolution;
  using N = Numbers;
  using Tail = TailOfBlock;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  using Output = typename Tail::Output;
  using Parameters = NarrowParameters<Tail::parameters>;

  static constexpr int x_classes = static_cast<int>(C::classes(2));
  static constexpr int cells = N::positions * x_classes;  // outputs of a thread along x
  static constexpr int channels = N::groups * N::outputs * N::output_slots;
  static constexpr int group_outputs = N::outputs * N::output_slots;  // of a group in the tile
  static constexpr int box[3] = {N::slots_z, N::rows * N::slots_y, N::positions * N::slots_x};
  static constexpr int box_outputs = box[2] * x_classes;  // along x

  using Sums = float[N::outputs][N::rows][cells];

  const Parameters& p;
  unsigned char* shared;

  __device__ __forceinline__ float* window() const { return reinterpret_cast<float*>(shared); }
  __device__ __forceinline__ float* weights() const { return window() + N::window_floats; }
  __device__ __forceinline__ float* results() const { return window(); }  // after the last product

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

  // Neighbouring threads read a row `skew` elements apart: one more float after as many avoids bank conflicts.
  static constexpr __device__ int skewed(int x, int skew) { return skew > 0 ? x + x / skew : x; }

  // --- Staging ---

  // A row of vectors that lie together in memory: along x or, interleaved, the channels of a position. `Lanes`
  // threads copy it in `steps` steps, several rows at once.
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

  // A row of the window, in memory and in shared memory.
  struct WindowRow {
    int64 index = 0;
    int place = 0;
    bool in_range = false;

    __device__ __forceinline__ WindowRow(const Tile& tile, const int (&origin)[3], int first_input, int row) {
      Parts parts{static_cast<unsigned>(row)};
      const auto go_along = [&](int d, int at, int pitch) {
        const int position = origin[d] + at;
        in_range &= static_cast<unsigned>(position) < static_cast<unsigned>(C::input_size(d));
        index += position * C::input_stride(d + 2);
        place += at * pitch;
      };
      in_range = true;
      index = tile.n * C::input_stride(0) +
              (static_cast<int64>(tile.group) * C::in_channels + first_input) * C::input_stride(1);
      if constexpr (N::input_interleaved) go_along(2, parts.take(N::window_size_x), N::window_x);
      go_along(1, parts.take(N::window_size_y), N::window_y);
      go_along(0, parts.take(N::window_size_z), N::window_z);
      if constexpr (!N::input_interleaved) {
        const int c = parts.take(N::inputs);
        const int g = parts.take(N::groups);
        in_range &= tile.group + g < C::groups && first_input + c < C::in_channels;
        index += (g * C::in_channels + c) * C::input_stride(1);
        place += g * N::window_g + c * N::window_c;
      }
    }
  };

  // A vector of every row: its elements' places and whether the input has them.
  struct WindowVector {
    int64 index;
    int first;
    bool in_range;

    __device__ __forceinline__ WindowVector(const Tile& tile, const int (&origin)[3], int first_input, int i)
        : first(i * N::input_vector) {
      if constexpr (N::input_interleaved) {
        const int g = first / N::inputs;
        const int c = first % N::inputs;
        in_range = tile.group + g < C::groups && first_input + c < C::in_channels;
        index = (g * C::in_channels + c) * C::input_stride(1);
      } else {
        const int x = origin[2] + first;
        in_range = static_cast<unsigned>(x) < static_cast<unsigned>(C::input_size(2));
        index = x * C::input_stride(4);
      }
    }

    __device__ __forceinline__ int place(int k) const {
      const int at = first + k;
      if constexpr (!N::input_interleaved) return skewed(at, N::skew);
      return N::groups == 1 ? at : at / N::inputs * N::window_g + at % N::inputs * N::window_c;
    }
  };

  template <bool Aligned>
  __device__ __forceinline__ void stage_window(const Tile& tile, int first_input, float* to) const {
    constexpr int vector = N::input_vector;
    constexpr int vectors =
        (N::input_interleaved ? N::groups * N::inputs : N::window_size_x) / vector;
    constexpr int count = N::window_size_z * N::window_size_y *
                          (N::input_interleaved ? N::window_size_x : N::groups * N::inputs);
    using Copy = Rows<vectors, N::stage_lanes>;
    const int origin[3] = {tile.origin(0), tile.origin(1), tile.origin(2)};
    if (Copy::first() >= Copy::at_once) return;
#pragma unroll 1
    for (int first = Copy::first(); first < count; first += Copy::at_once * Copy::together) {
      Packed<Input, vector> x[Copy::together][Copy::steps];
#pragma unroll
      for (int u = 0; u < Copy::together; ++u) {
        const int i = first + u * Copy::at_once;
        const WindowRow row(tile, origin, first_input, i);
#pragma unroll
        for (int k = 0; k < Copy::steps; ++k) {
#pragma unroll
          for (uint32& word : x[u][k].word) word = 0;
          const WindowVector own(tile, origin, first_input, Copy::vector(k));
          if (i < count && Copy::has(k) && row.in_range && own.in_range)
            x[u][k].load(p.input, row.index + own.index, Aligned);
        }
      }
#pragma unroll
      for (int u = 0; u < Copy::together; ++u) {
        const int i = first + u * Copy::at_once;
        if (i >= count) break;
        float* const row = to + WindowRow(tile, origin, first_input, i).place;
#pragma unroll
        for (int k = 0; k < Copy::steps; ++k) {
          if (Copy::has(k)) put(x[u][k], WindowVector(tile, origin, first_input, Copy::vector(k)), row);
        }
      }
    }
  }

  static __device__ __forceinline__ void put(const Packed<Input, N::input_vector>& x, const WindowVector& at,
                                             float* row) {
    constexpr int vector = N::input_vector;
    float value[vector];
    x.unpack(value);
#pragma unroll
    for (int k = 0; k < vector; ++k) {
      if constexpr (C::rounds_to_tf32) value[k] = round_operand<C>(value[k]);
    }
    if constexpr (N::stages_vectors) {
      static_assert(vector == 4);
      *reinterpret_cast<float4*>(row + at.place(0)) = make_float4(value[0], value[1], value[2], value[3]);
    } else {
#pragma unroll
      for (int k = 0; k < vector; ++k) row[at.place(k)] = value[k];
    }
  }

  __device__ __forceinline__ void stage_window(const Tile& tile, int first_input, float* to) const {
    if (N::input_vector > 1 && reinterpret_cast<uint64>(p.input) % 16 == 0) {
      stage_window<true>(tile, first_input, to);
    } else {
      stage_window<false>(tile, first_input, to);
    }
  }

  __device__ __forceinline__ float weight(int group, int output, int input, int tap) const {
    const int64 row = C::transposed
                          ? (static_cast<int64>(group) * C::in_channels + input) * C::channels + output
                          : (static_cast<int64>(group) * C::channels + output) * C::in_channels + input;
    const float value = load_one<typename C::Weight>(p.parameter[0], row * C::taps + tap);
    return C::rounds_to_tf32 ? round_operand<C>(value) : value;
  }

  // [input][tap][group and output of the tile]; lanes follow the weights' own order. False where one is not
  // finite.
  __device__ __forceinline__ bool stage_weights(const Tile& tile, int first_input, float* to) const {
    bool are_finite = true;
    constexpr int count = channels * N::inputs * C::taps;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
      Parts parts{static_cast<unsigned>(i)};
      const auto take = [&](int of) { return parts.take(of); };
      const int t = take(C::taps);
      const int first = take(C::transposed ? group_outputs : N::inputs);
      const int second = take(C::transposed ? N::inputs : group_outputs);
      const int c = C::transposed ? second : first;
      const int o = C::transposed ? first : second;
      const auto g = static_cast<int>(parts.rest);
      const int group = tile.group + g;
      const int output = tile.output + o;
      const int input = first_input + c;
      float value = 0.0f;
      if (group < C::groups && output < C::channels && input < C::in_channels)
        value = weight(group, output, input, t);
      are_finite &= fabsf(value) <= 3.402823466e+38f;
      to[c * N::weight_c + t * N::weight_t + g * group_outputs + o] = value;
    }
    return are_finite;
  }

  // --- Products ---

  // Neighbours of shared memory, in vectors where they are aligned.
  template <int Count>
  static __device__ __forceinline__ void load_floats(const float* from, float (&to)[Count]) {
    constexpr int width = N::weight_t % 4 == 0 && Count % 4 == 0 ? 4 : N::weight_t % 2 == 0 && Count % 2 == 0 ? 2 : 1;
    if constexpr (width == 4) {
#pragma unroll
      for (int i = 0; i < Count; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(from + i);
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
      }
    } else if constexpr (width == 2) {
#pragma unroll
      for (int i = 0; i < Count; i += 2) {
        const float2 v = *reinterpret_cast<const float2*>(from + i);
        to[i] = v.x, to[i + 1] = v.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) to[i] = from[i];
    }
  }

  // What a thread's cells read of one row of the window.
  struct Segment {
    float value[N::segment];

    explicit __device__ __forceinline__ Segment(const float* row) {
#pragma unroll
      for (int k = 0; k < N::segment; ++k) value[k] = row[skewed(N::lead + k, N::skew) * N::window_x];
    }
  };

  // The taps of a row of the filter at `w`, for the cells of row `q`.
  static __device__ __forceinline__ void add_row(const Segment& x, const float* w, int q, Sums& sums) {
    constexpr auto step = static_cast<int>(C::step(2));
#pragma unroll
    for (int s = 0; s < x_classes; ++s) {
#pragma unroll
      for (int m = 0; m < N::most_taps_x; ++m) {
        if (m >= static_cast<int>(C::count(2, s))) continue;
        float weight[N::outputs];
        load_floats(w + static_cast<int>(C::first(2, s) + m * C::tap_step(2)) * N::weight_t, weight);
        const auto offset = static_cast<int>(C::base(2, s) + m * C::delta(2)) - N::lowest_x;
#pragma unroll
        for (int i = 0; i < N::positions; ++i) {
#pragma unroll
          for (int o = 0; o < N::outputs; ++o) {
            float& sum = sums[o][q][i * x_classes + s];
            sum = fmaf(weight[o], x.value[i * step + offset], sum);
          }
        }
      }
    }
  }

  // The terms of one input channel: `x` is where the thread's first cell begins in its window.
  static __device__ __forceinline__ void add_channel(const Tile& tile, const float* x, const float* w,
                                                     Sums& sums) {
    constexpr auto delta0 = static_cast<int>(C::delta(0));
    constexpr auto delta1 = static_cast<int>(C::delta(1));
    const auto count0 = static_cast<int>(C::count(0, tile.r[0]));
    const auto count1 = static_cast<int>(C::count(1, tile.r[1]));
    const auto tap_y = static_cast<int>(C::tap_stride(1)) * N::weight_t;
#pragma unroll 1
    for (int m0 = 0; m0 < count0; ++m0) {
      const float* plane = x + (delta0 < 0 ? (count0 - 1 - m0) * -delta0 : m0 * delta0) * N::window_z;
      const float* filter =
          w + static_cast<int>(C::first(0, tile.r[0]) + m0 * C::tap_step(0)) * static_cast<int>(C::tap_stride(0)) * N::weight_t;
      if constexpr (N::rows > 1) {
        // All taps of y are of one class. A row of the window is read once for all rows of cells.
        constexpr auto taps = static_cast<int>(C::count(1, 0));
        constexpr auto step = static_cast<int>(C::step(1));
        constexpr int distance = delta1 < 0 ? -delta1 : delta1;
        constexpr int reach = (N::rows - 1) * step + (taps - 1) * distance + 1;
#pragma unroll
        for (int i = 0; i < reach; ++i) {
          const int at = delta1 < 0 ? reach - 1 - i : i;  // so that taps are added in their order
          const Segment row(plane + at * N::window_y);
#pragma unroll
          for (int q = 0; q < N::rows; ++q) {
            const int from = at - q * step;
            if (from < 0 || from % distance != 0 || from / distance >= taps) continue;
            const int m1 = delta1 < 0 ? taps - 1 - from / distance : from / distance;
            add_row(row, filter + static_cast<int>(C::first(1, 0) + m1 * C::tap_step(1)) * tap_y, q, sums);
          }
        }
      } else {
#pragma unroll 1
        for (int m1 = 0; m1 < count1; ++m1) {
          const Segment row(plane + (delta1 < 0 ? (count1 - 1 - m1) * -delta1 : m1 * delta1) * N::window_y);
          add_row(row, filter + static_cast<int>(C::first(1, tile.r[1]) + m1 * C::tap_step(1)) * tap_y, 0, sums);
        }
      }
    }
  }

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
      for (int q = 0; q < N::rows; ++q) {
#pragma unroll
        for (int i = 0; i < cells; ++i) sums[o][q][i] = 0.0f;
      }
    }
  }

  // Long sums are made of parts, of `part_inputs` channels each.
  static __device__ __forceinline__ void fold(Sums& sums, Sums& part) {
#pragma unroll
    for (int o = 0; o < N::outputs; ++o) {
#pragma unroll
      for (int q = 0; q < N::rows; ++q) {
#pragma unroll
        for (int i = 0; i < cells; ++i) sums[o][q][i] += part[o][q][i];
      }
    }
    clear(part);
  }

  __device__ __forceinline__ void add_chunk(const Tile& tile, const Slot& slot, int first_input, Sums& sums,
                                            Sums& part) const {
    const float* x = window() + slot.group * N::window_g +
                     slot.at[0] * static_cast<int>(C::step(0)) * N::window_z +
                     slot.at[1] * static_cast<int>(C::step(1)) * N::window_y +
                     skewed(slot.at[2] * static_cast<int>(C::step(2)), N::skew) * N::window_x;
    const float* w = weights() + slot.group * group_outputs + slot.output;
    const int left = C::in_channels - first_input;
    const int count = left < N::inputs ? left : N::inputs;
#pragma unroll 1
    for (int c = 0; c < count; ++c) {
      if constexpr (N::part_inputs > 0) {
        add_channel(tile, x + c * N::window_c, w + c * N::weight_c, part);
        if ((first_input + c + 1) % N::part_inputs == 0) fold(sums, part);
      } else {
        add_channel(tile, x + c * N::window_c, w + c * N::weight_c, sums);
      }
    }
  }

  // --- Outputs ---

  __device__ __forceinline__ void keep_results(const Tile& tile, const Slot& slot, const Sums& sums) const {
    float* to = results() + (slot.group * group_outputs + slot.output) * N::result_c + slot.at[0] * N::result_z +
                slot.at[1] * N::result_y + skewed(slot.at[2] * x_classes, N::result_skew) * N::result_x;
#pragma unroll
    for (int o = 0; o < N::outputs; ++o) {
      const ResultChannel at(tile, slot.group * group_outputs + slot.output + o);
      const float added = at.in_range ? bias(at.channel) : 0.0f;
#pragma unroll
      for (int q = 0; q < N::rows; ++q) {
#pragma unroll
        for (int i = 0; i < cells; ++i)
          to[o * N::result_c + q * N::result_y + skewed(i, N::result_skew) * N::result_x] = sums[o][q][i] + added;
      }
    }
  }

  __device__ __forceinline__ float bias(int channel) const {
    if constexpr (C::has_bias) return load_one<typename C::Bias>(p.parameter[1], channel);
    return 0.0f;
  }

  // The same where a weight is not finite: zeros outside the input must not meet it. One by one.
  __device__ void keep_careful_results(const Tile& tile) const {
    constexpr int count = channels * box[0] * box[1] * box_outputs;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
      Parts parts{static_cast<unsigned>(i)};
      const int x = parts.take(box_outputs);
      const int y = parts.take(box[1]);
      const int z = parts.take(box[0]);
      const auto own = static_cast<int>(parts.rest);
      const int r[3] = {tile.r[0], tile.r[1], x % x_classes};
      const int cell[3] = {tile.cell[0] + z, tile.cell[1] + y, tile.cell[2] + x / x_classes};
      const ResultChannel at(tile, own);
      results()[own * N::result_c + z * N::result_z + y * N::result_y +
                skewed(x, N::result_skew) * N::result_x] =
          at.in_range ? careful_sum(tile.n, at.channel, r, cell) + bias(at.channel) : 0.0f;
    }
  }

  __device__ float careful_sum(int64 n, int channel, const int (&r)[3], const int (&cell)[3]) const {
    const int group = channel / static_cast<int>(C::channels);
    const int output = channel % static_cast<int>(C::channels);
    const auto position = [&](int d, int m) {
      return static_cast<int>(cell[d] * C::step(d) + C::base(d, r[d]) + m * C::delta(d));
    };
    const auto is_inside = [&](int d, int at) {
      return static_cast<unsigned>(at) < static_cast<unsigned>(C::input_size(d));
    };
    const auto tap = [&](int d, int m) {
      return static_cast<int>((C::first(d, r[d]) + m * C::tap_step(d)) * C::tap_stride(d));
    };
    float sum = 0.0f;
#pragma unroll 1
    for (int c = 0; c < C::in_channels; ++c) {
#pragma unroll 1
      for (int m0 = 0; m0 < C::count(0, r[0]); ++m0) {
#pragma unroll 1
        for (int m1 = 0; m1 < C::count(1, r[1]); ++m1) {
#pragma unroll 1
          for (int m2 = 0; m2 < C::count(2, r[2]); ++m2) {
            const int at[3] = {position(0, m0), position(1, m1), position(2, m2)};
            if (!is_inside(0, at[0]) || !is_inside(1, at[1]) || !is_inside(2, at[2])) continue;
            const int64 index = n * C::input_stride(0) +
                                (static_cast<int64>(group) * C::in_channels + c) * C::input_stride(1) +
                                at[0] * C::input_stride(2) + at[1] * C::input_stride(3) +
                                at[2] * C::input_stride(4);
            const float x = load_one<Input>(p.input, index);
            sum = fmaf(weight(group, output, c, tap(0, m0) + tap(1, m1) + tap(2, m2)),
                       C::rounds_to_tf32 ? round_operand<C>(x) : x, sum);
          }
        }
      }
    }
    return sum;
  }

  // What a chain's tensors are loaded by.
  struct Operands {
    const void* const* parameter;
    uint64 aligned;
  };

  // Whether vectors of the output, and of tensors that stages read, lie on 16 bytes.
  __device__ __forceinline__ bool are_aligned() const {
    auto bits = reinterpret_cast<uint64>(p.output);
#pragma unroll
    for (int i = 0; i < Tail::parameters; ++i) bits |= reinterpret_cast<uint64>(p.parameter[i]);
    return bits % 16 == 0;
  }

  // A row of the tile's results, in memory and in shared memory.
  struct ResultRow {
    int64 index = 0;
    int place = 0;
    int channel = 0;  // of the output, where the row has one
    bool in_range = true;

    __device__ __forceinline__ ResultRow(const Tile& tile, int row) {
      Parts parts{static_cast<unsigned>(row)};
      const auto go_along = [&](int d, int at, int q) {
        in_range &= q < static_cast<int>(C::output_size(d));
        index += q * C::stride(d + 2);
        place += at;
      };
      index = tile.n * C::stride(0);
      if constexpr (N::output_interleaved) {
        const int x = parts.take(box_outputs);
        go_along(2, skewed(x, N::result_skew) * N::result_x, tile.cell[2] * x_classes + x);
      }
      const int y = parts.take(box[1]);
      go_along(1, y * N::result_y, tile.r[1] + static_cast<int>(C::classes(1)) * (tile.cell[1] + y));
      const int z = parts.take(box[0]);
      go_along(0, z * N::result_z, tile.r[0] + static_cast<int>(C::classes(0)) * (tile.cell[0] + z));
      if constexpr (!N::output_interleaved) {
        const auto own = static_cast<int>(parts.rest);
        const ResultChannel at(tile, own);
        in_range &= at.in_range;
        channel = at.channel;
        index += channel * C::stride(1);
        place += own * N::result_c;
      }
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

  // A vector of every row of results.
  struct ResultVector {
    int64 index;
    int first;
    int channel = 0;
    bool in_range;

    __device__ __forceinline__ ResultVector(const Tile& tile, int i) : first(i * N::output_vector) {
      if constexpr (N::output_interleaved) {
        const ResultChannel at(tile, first);
        in_range = at.in_range;
        channel = at.channel;
        index = channel * C::stride(1);
      } else {
        const int q = tile.cell[2] * x_classes + first;
        in_range = q < static_cast<int>(C::output_size(2));
        index = q * C::stride(4);
      }
    }

    static __device__ __forceinline__ int place(int at) {
      return N::output_interleaved ? at * N::result_c : skewed(at, N::result_skew) * N::result_x;
    }
  };

  template <bool Aligned>
  __device__ __forceinline__ void store_results(const Tile& tile) const {
    constexpr int vector = N::output_vector;
    constexpr int vectors = (N::output_interleaved ? channels : box_outputs) / vector;
    constexpr int count = box[0] * box[1] * (N::output_interleaved ? box_outputs : channels);
    using Copy = Rows<vectors, N::store_lanes>;
    using Values = ChannelValues<After, N::output_interleaved ? vector : 1>;
    const Operands operands{p.parameter, Aligned ? ~uint64{0} : 0};
    if (Copy::first() >= Copy::at_once) return;
    Values values[N::output_interleaved ? Copy::steps : 1];
    if constexpr (N::output_interleaved) {
#pragma unroll
      for (int k = 0; k < Copy::steps; ++k) {
        const ResultVector own(tile, Copy::vector(k));
        if (Copy::has(k) && own.in_range) values[k].load(p, tile.n, own.channel);
      }
    }
#pragma unroll 1
    for (int i = Copy::first(); i < count; i += Copy::at_once) {
      const ResultRow row(tile, i);
      if (!row.in_range) continue;
      if constexpr (!N::output_interleaved) values[0].load(p, tile.n, row.channel);
      typename After::template Tensors<vector> tensors[Copy::steps];
#pragma unroll
      for (int k = 0; k < Copy::steps; ++k) {
        const ResultVector own(tile, Copy::vector(k));
        if (Copy::has(k) && own.in_range) tensors[k].load(operands, row.index + own.index);
      }
#pragma unroll
      for (int k = 0; k < Copy::steps; ++k) {
        const ResultVector own(tile, Copy::vector(k));
        if (!Copy::has(k) || !own.in_range) continue;
        float y[vector];
#pragma unroll
        for (int e = 0; e < vector; ++e) {
          const float h = results()[row.place + ResultVector::place(own.first + e)];
          y[e] = After::value(h, values[N::output_interleaved ? k : 0].value[N::output_interleaved ? e : 0],
                              tensors[k], e);
        }
        Packed<Output, vector> packed;
        packed.pack(y);
        packed.store(p.output, row.index + own.index, Aligned);
      }
    }
  }

  __device__ __forceinline__ void store_results(const Tile& tile) const {
    if (N::output_vector > 1 && are_aligned()) {
      store_results<true>(tile);
    } else {
      store_results<false>(tile);
    }
  }

  __device__ __forceinline__ void run() const {
    const Tile tile(blockIdx.x);
    const Slot slot;
    Sums sums, part;
    clear(sums);
    clear(part);
    bool are_finite = true;
#pragma unroll 1
    for (int first_input = 0; first_input < C::in_channels; first_input += N::inputs) {
      if (first_input > 0) __syncthreads();
      are_finite &= stage_weights(tile, first_input, weights());
      stage_window(tile, first_input, window());
      __syncthreads();
      if (slot.in_range) add_chunk(tile, slot, first_input, sums, part);
    }
    if constexpr (N::part_inputs > 0) fold(sums, part);
    if (__syncthreads_and(are_finite)) {
      if (slot.in_range) keep_results(tile, slot, sums);
    } else {
      keep_careful_results(tile);
    }
    __syncthreads();
    store_results(tile);
  }
};

}  // namespace onepass
