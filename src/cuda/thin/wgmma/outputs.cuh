// The epilogue of thin/wgmma.cuh: the chain on completed sums, and sums or moments of its values.
#pragma once

#include "thin/wgmma/products.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class Product>
struct ThinWgmma<C, Tail, Numbers, Product>::Outputs {
  using Operands = typename Products::Operands;

  const Block block;

  // Values since the last update of the moments: sums of distances from the mean of that time.
  struct Recent {
    static constexpr int most = 16;  // planes
    float sum[2][state_rows] = {};
    float squares[2][state_rows] = {};

    // After which rounds moments are updated: the first that completes an output, and then every `apart`
    // planes.
    static __device__ __forceinline__ bool is_over(int first_of_round) {
      constexpr int first = (taps0 - 1) / Products::round_planes * Products::round_planes;
      constexpr int apart = most / Products::round_planes * Products::round_planes;
      return first_of_round >= first && (first_of_round - first) % apart == 0;
    }
  };

  // A thread's sums of a plane: rows (r) from `First` on, one for each of its channels, in two lanes (e),
  // `Count` columns.
  template <int First, int Count, class State>
  __device__ __forceinline__ void take(const ApplyPass& pass, State (&state)[2], const Sums& sums, int d,
                                       int row, int column, const float (&unscale)[state_rows],
                                       const float (&bias)[state_rows], Recent& recent, bool) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int q1 = row + Products::first_row_of_lane(e);
      if (q1 >= C::output_size(1)) continue;
      float h[state_rows][Count];
      int offset[Count];
#pragma unroll
      for (int k = 0; k < Count; ++k) {
#pragma unroll
        for (int r = 0; r < state_rows; ++r)
          h[r][k] = Products::output_of(sums[4 * k + 2 * (First + r) + e], unscale[r], bias[r]);
        offset[k] = offset_of(d, q1, column + k);
      }
      pass.take(state[e], h, offset, All{});
    }
  }

  // Moments take distances from the mean so far, at first from the first value. Each value is read once and
  // none stays in a register. The mean moves little: the correction at an update is small beside the sum of
  // squares.
  template <int First, int Count, class State>
  __device__ __forceinline__ void take(const MomentsPass& pass, State (&state)[2], const Sums& sums, int d,
                                       int row, int column, const float (&unscale)[state_rows],
                                       const float (&bias)[state_rows], Recent& recent,
                                       bool may_be_first) const {
    using Before = typename Tail::Before;
    float sum[2][state_rows], squares[2][state_rows];
    const auto value_of = [&](float product, int e, int r, int k) {
      // A lane without a row reads values of the last row and drops them.
      const int q1 = row + Products::first_row_of_lane(e);
      typename Before::template Tensors<1> tensors;
      tensors.load(block.p,
                   element_index<C, Tail, Numbers>(
                       pass.n, state[e].slot[r],
                       offset_of(d, q1 < C::output_size(1) ? q1 : static_cast<int>(C::output_size(1)) - 1,
                                 column + k)));
      return Before::value(Products::output_of(product, unscale[r], bias[r]), state[e].before[r].value[0],
                           tensors, 0);
    };
    const auto value = [&](int e, int r, int k) {
      return value_of(sums[4 * k + 2 * (First + r) + e], e, r, k);
    };
    bool is_one[2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
      is_one[e] = Products::has_row_always(e) || row + Products::first_row_of_lane(e) < C::output_size(1);
    if (may_be_first) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int r = 0; r < state_rows; ++r) {
          // Computed again below, where it and the distance are one instruction.
          float product = sums[2 * (First + r) + e];
          asm volatile("" : "+f"(product));
          const float first = value_of(product, e, r, 0);
          state[e].mean[r] = select(is_one[e] && state[e].count == 0.0f, first, state[e].mean[r]);
        }
      }
    }
    // Some columns at a time: as many values as hide each other's latency.
    constexpr int at_once = 4 / state_rows;
#pragma unroll
    for (int first = 0; first < Count; first += at_once) {
      float distance[at_once][2][state_rows];
#pragma unroll
      for (int k = 0; k < at_once && first + k < Count; ++k) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int r = 0; r < state_rows; ++r) distance[k][e][r] = value(e, r, first + k) - state[e].mean[r];
        }
      }
#pragma unroll
      for (int k = 0; k < at_once && first + k < Count; ++k) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int r = 0; r < state_rows; ++r) {
            const float own = distance[k][e][r];
            sum[e][r] = first + k == 0 ? own : sum[e][r] + own;
            squares[e][r] = first + k == 0 ? own * own : fmaf(own, own, squares[e][r]);
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int r = 0; r < state_rows; ++r) {
        add_where(is_one[e], recent.sum[e][r], sum[e][r], e);
        add_where(is_one[e], recent.squares[e][r], squares[e][r], e);
      }
      add_where(is_one[e], state[e].count, Count, e);
    }
  }

  template <class State>
  __device__ __forceinline__ void bring_up_to_date(State (&state)[2], Recent& recent) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float count = state[e].count;
      const float per_value = count > 0.0f ? pointwise::reciprocal_fast(count) : 0.0f;
#pragma unroll
      for (int r = 0; r < state_rows; ++r) {
        const float moved = recent.sum[e][r] * per_value;
        state[e].mean[r] += moved;
        state[e].m2[r] += not_below_zero(fmaf(-recent.sum[e][r], moved, recent.squares[e][r]));
      }
    }
    recent = {};
  }

  // Never a branch: otherwise the four sums would wait for each other.
  static __device__ __forceinline__ float select(bool so, float a, float b) {
    float result;
    asm("{.reg .pred p; setp.ne.b32 p, %3, 0; selp.f32 %0, %1, %2, p;}"
        : "=f"(result)
        : "f"(a), "f"(b), "r"(static_cast<int>(so)));
    return result;
  }

  static __device__ __forceinline__ void add_where(bool so, float& sum, float value, int e) {
    sum = Products::has_row_always(e) ? sum + value : select(so, sum + value, sum);
  }

  // Rounding may leave a sum of squares below zero.
  static __device__ __forceinline__ float not_below_zero(float x) { return x < 0.0f ? 0.0f : x; }

  static __device__ __forceinline__ int offset_of(int d, int q1, int q2) {
    return d * static_cast<int>(C::stride(2)) + q1 * static_cast<int>(C::stride(3)) +
           q2 * static_cast<int>(C::stride(4));
  }

  // All tiles of a unit, `channel_tile` of its channels.
  template <class Pass, class State>
  __device__ __forceinline__ void consume(const Pass& pass, State (&state)[2], int channel_tile, Ring& ring,
                                          const float (&unscale)[state_rows],
                                          const float (&bias)[state_rows]) const {
    const int group = uniform(threadIdx.x / 128);
    const int warp = uniform(threadIdx.x / 32 % 4);
    // A warp without channels has zero weights and nothing to finish.
    const bool has_channels = channel_tile * channel_blocks * 16 + Products::channels_of(warp, 0) * 8 <
                              static_cast<int>(C::channels);
    constexpr int across = strips / tile_rows;  // strips side by side
    uint32 weights[2];                          // of the strips
    uint32 windows[2];
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const int strip = group * 2 + own;
      const int set = weight_sets == 1 ? 0 : weight_sets == strips ? strip : group % weight_sets;
      weights[own] = warpgroup::descriptor(barrier::shared_address(block.shared.weight[channel_tile][set]),
                                           weight_units);
      const int offset = (strip / across * step1 * row_units + strip % across * columns * step2 * pitch) * 16;
      windows[own] = warpgroup::descriptor(barrier::shared_address(block.shared.x[0][0]) + offset, 0);
    }
    const uint64 base_a =
        Products::base_of(weight_sets == 1 ? weights[0] : uniform(weights[0]), Products::upper_a);
    const uint64 base_b = Products::base_of(uniform(windows[0]), Products::upper_b);
    // A zero that the compiler does not know (the grid has one dimension): it would move a constant twice.
    const float zero = __uint_as_float(gridDim.y - 1);
    const float begin[2] = {begins_with_bias ? bias[0] : zero,
                            begins_with_bias ? bias[state_rows - 1] : zero};
    Recent recent;
    Sums first, second;
    int tile = 0;
    int first_of_round = 0;
    const auto turn_of = [&](int own, int plane) {
      return ((Products::round_planes == 1 ? first_of_round : 0) + plane + own * (taps0 / 2)) % taps0;
    };
    const auto operands_of = [&](int own, int plane) -> Operands {
      const uint32 turn = turn_of(own, plane);
      const uint32 turned = paired ? turn * static_cast<uint32>(sizeof(block.shared.weight[0][0][0]) / 16)
                                   : (taps0 - 1 - turn) * channel_blocks * 16;
      constexpr uint32 of_slot = input_parts * plane_units;
      if constexpr (Products::knows_slots) {
        // Distance from the first strip's to the second's.
        constexpr uint32 of_set = weight_sets == strips ? sizeof(block.shared.weight[0][0]) / 16 : 0;
        constexpr uint32 apart = across == 1 ? step1 * row_units : columns * step2 * pitch;
        // Two different ones: otherwise the compiler computes the common part of both strips separately.
        return {{own * of_set + turned, own * apart + plane * of_slot},
                own == 0 ? gridDim.y : gridDim.z,
                base_a,
                base_b};
      }
      return {
          {uniform(weights[own] + turned), uniform(windows[own] + (ring.count + plane) % planes * of_slot)},
          1,
          0,
          0};
    };
    // Finishes the outputs that a plane completes and begins the next ones in their place. A warp has its
    // first eight rows, its second or, not paired, both in the completed slot.
    const auto finish_plane = [&]<int own, int plane>(Sums& sums) {
      const int strip = group * 2 + own;
      const int row = tile / column_tiles * tile_rows + strip / across;
      const int column = tile % column_tiles * tile_columns + strip % across * columns;
      const int q = first_of_round + plane;
      const int d = first_plane() + q - (taps0 - 1);
      const bool is_output =
          (plane >= taps0 - 1 || q >= taps0 - 1) && (parts == 1 || d < C::output_size(0)) && row < lane_rows;
      const int ending = (turn_of(own, plane) + 1) % taps0;
      // The first output of a warp, and of a lane with rows, is in the first tile and one of the first two
      // rounds.
      const bool may_be_first = tile == first_tile() && first_of_round < 2 * taps0;
      const auto finish_rows = [&]<int r>() {
        if (paired && Products::round_planes > 1 && ending % 2 != r) return;  // known here
        const bool is_own = Products::plane_slot(warp, r) == ending;
        if (is_own && has_channels && is_output)
          take_columns<r>(pass, state, sums, d, row, column, unscale, bias, recent, may_be_first);
        if constexpr (!begins_always)
          Product::template begin_where<!paired || r == 0, !paired || r == 1>(sums, is_own, begin[0],
                                                                              begin[1]);
      };
      finish_rows.template operator()<0>();
      if constexpr (paired) finish_rows.template operator()<1>();
    };
    const auto wait_for = [&](int plane) {
      const Ring at{ring.count + plane};
      barrier::wait(&block.shared.full[Products::knows_slots ? plane : at.slot()],
                    Products::knows_slots ? ring.parity() : at.parity());
    };
    const auto leave = [&](int plane) {
      __syncwarp();
      if (threadIdx.x % 32 == 0)
        barrier::arrive(&block.shared.empty[Products::knows_slots ? plane : (ring.count + plane) % planes]);
    };
    // Adds a plane's partial sums, where the tensor cores must not add up more.
    const auto add = [&](Sums& sums, Sums& part) {
      Products::arrived(part);
#pragma unroll
      for (int i = 0; i < columns * 4; ++i) sums[i] += part[i];
    };
    // The strips take turns with `part`: products of the second are in flight while outputs of the first are
    // finished.
    Sums part;
    const auto multiply_in_parts = [&] {
      wait_for(0);
      Products::multiply_plane(part, operands_of(0, 0));
      const Operands next = operands_of(1, 0);
      warpgroup::wait<0>();
      add(first, part);
      Products::multiply_plane(part, next);
      finish_plane.template operator()<0, 0>(first);
      warpgroup::wait<0>();
      leave(0);
      add(second, part);
      finish_plane.template operator()<1, 0>(second);
      ring.count += 1;
    };
    const auto multiply_round = [&]<int count>() {
      if constexpr (promotes) return multiply_in_parts();
      wait_for(0);
      Products::multiply_planes(first, second, operands_of(0, 0), operands_of(1, 0));
      const auto go_on = [&]<int plane>() {
        constexpr bool is_last = plane == count - 1;
        // All four warps finish outputs at the same time, some of the first strip, the others of the second.
        warpgroup::wait<0>();
        Products::arrived(first);
        Products::arrived(second);
        leave(plane);
        Operands next_first, next_second;  // known when outputs are finished
        if constexpr (!is_last) next_first = operands_of(0, plane + 1);
        finish_plane.template operator()<0, plane>(first);
        if constexpr (!is_last) next_second = operands_of(1, plane + 1);
        finish_plane.template operator()<1, plane>(second);
        if constexpr (!is_last) {
          wait_for(plane + 1);
          Products::multiply_planes(first, second, next_first, next_second);
        }
      };
      go_on.template operator()<0>();
      if constexpr (count > 1) go_on.template operator()<1>();
      if constexpr (count > 2) go_on.template operator()<2>();
      if constexpr (count > 3) go_on.template operator()<3>();
      ring.count += count;
    };
    static_assert(Products::round_planes <= 4);
#pragma unroll 1
    for (tile = first_tile(); tile < first_tile() + part_tiles; ++tile) {
      if constexpr (!begins_always) {
#pragma unroll
        for (int i = 0; i < columns * 4; ++i) {
          first[i] = begin[i % 4 / 2];
          second[i] = begin[i % 4 / 2];
        }
      }
#pragma unroll 1
      for (first_of_round = 0; first_of_round + Products::round_planes <= window_planes;
           first_of_round += Products::round_planes) {
        multiply_round.template operator()<Products::round_planes>();
        if constexpr (is_same<Pass, MomentsPass>) {
          if (Recent::is_over(first_of_round)) bring_up_to_date(state, recent);
        }
      }
      if constexpr (window_planes % Products::round_planes != 0)
        multiply_round.template operator()<window_planes % Products::round_planes>();
    }
    if constexpr (is_same<Pass, MomentsPass>) bring_up_to_date(state, recent);
  }

  // The columns of the output that the strip has.
  template <int First, class Pass, class State>
  __device__ __forceinline__ void take_columns(const Pass& pass, State (&state)[2], const Sums& sums, int d,
                                               int row, int column, const float (&unscale)[state_rows],
                                               const float (&bias)[state_rows], Recent& recent,
                                               bool may_be_first) const {
    constexpr int left = static_cast<int>(C::output_size(2)) % columns;
    if (column + columns <= C::output_size(2)) {
      take<First, columns>(pass, state, sums, d, row, column, unscale, bias, recent, may_be_first);
    } else if (left > 0 && column < C::output_size(2)) {
      take<First, left == 0 ? columns : left>(pass, state, sums, d, row, column, unscale, bias, recent,
                                              may_be_first);
    }
  }
};

}  // namespace onepass
