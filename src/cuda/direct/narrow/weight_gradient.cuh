// dweight of narrow_backward.cuh: parts of the sums over positions, from staged boxes of u and v.
#pragma once

#include "device/reduce.cuh"
#include "direct/backward_parameters.cuh"
#include "direct/narrow/staging.cuh"

namespace onepass {

// The tensor at the convolution's outputs as one that is staged: a window of it is the box itself.
template <class C>
struct NarrowOutputSide {
  static constexpr bool rounds_to_tf32 = false;  // rounded where it is multiplied: dbias is of dy itself
  static constexpr bool ties_away = false;
  static constexpr int groups = C::groups;
  static constexpr int in_channels = C::channels;
  static constexpr __device__ int64 input_size(int d) { return C::output_size(d); }
  static constexpr __device__ int64 input_stride(int d) { return C::stride(d); }
  static constexpr __device__ int64 classes(int) { return 1; }
  static constexpr __device__ int64 step(int) { return 1; }
  static constexpr __device__ int64 delta(int) { return 1; }
  static constexpr __device__ int64 base(int, int) { return 0; }
  static constexpr __device__ int64 count(int, int) { return 1; }
};

// A block has some channels of u and v of some groups, and adds a part of all boxes. A thread has `u` x `v`
// channels and `taps_z` x `taps_y` rows of taps, and a share of the box's positions, its lane. `N` has the
// numbers of v's window and of the tile, `O` those of u's box.
template <class C, class Tail, class N, class O>
struct NarrowWeightGradient {
  using Parameters = NarrowWeightGradientParameters;
  using V = NarrowTypes<C, Tail, N>;
  using U = NarrowTypes<NarrowOutputSide<C>, Tail, O>;
  using Parts = typename V::Parts;

  static constexpr auto taps_x = static_cast<int>(C::kernel(2));
  static constexpr int lanes = N::lanes_z * N::lanes_y * N::lanes_x;
  static constexpr int items = N::groups * N::u_slots * N::v_slots * N::tap_slots_z * N::tap_slots_y;
  static constexpr int weight_sums = N::u * N::v * N::taps_z * N::taps_y * taps_x;
  static constexpr int all_sums = weight_sums + (N::sums_bias ? N::u : 0);

  const Parameters& p;
  unsigned char* shared;

  // Which sums a thread has: its first channels in the tile and its first taps.
  struct Item {
    int group, u, v, tap_z, tap_y;

    explicit __device__ __forceinline__ Item(int index) {
      Parts parts{static_cast<unsigned>(index)};
      u = parts.take(N::u_slots) * N::u;
      v = parts.take(N::v_slots) * N::v;
      group = parts.take(N::groups);
      tap_y = parts.take(N::tap_slots_y) * N::taps_y;
      tap_z = static_cast<int>(parts.rest) * N::taps_z;
    }

    // The last slot begins earlier where taps do not divide; its first taps are the one's before.
    static __device__ __forceinline__ int begin(int tap, int d, int own) {
      const int last = static_cast<int>(C::kernel(d)) - own;
      return tap < last ? tap : last;
    }
    __device__ __forceinline__ int begin_z() const { return begin(tap_z, 0, N::taps_z); }
    __device__ __forceinline__ int begin_y() const { return begin(tap_y, 1, N::taps_y); }
  };

  struct Slot {
    int lane, item;
    bool in_range;

    __device__ __forceinline__ Slot() {
      Parts parts{threadIdx.x};
      in_range = threadIdx.x < static_cast<unsigned>(N::slots);
      if constexpr (N::input_interleaved) {
        item = parts.take(items);
        lane = static_cast<int>(parts.rest);
      } else {
        lane = parts.take(lanes);
        item = static_cast<int>(parts.rest);
      }
    }
  };

  struct Sums {
    float weight[N::u][N::v][N::taps_z][N::taps_y][taps_x];
    float bias[N::u];

    // The `k`th of them, the bias behind the weights; `k` is a constant after unrolling.
    __device__ __forceinline__ float& at(int k) {
      if (k >= weight_sums) return bias[k - weight_sums];
      const int rows = k / taps_x;
      return weight[rows / (N::taps_y * N::taps_z * N::v)][rows / (N::taps_y * N::taps_z) % N::v]
                   [rows / N::taps_y % N::taps_z][rows % N::taps_y][k % taps_x];
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int k = 0; k < all_sums; ++k) at(k) = 0.0f;
    }
    __device__ __forceinline__ void take(Sums& part) {
#pragma unroll
      for (int k = 0; k < all_sums; ++k) at(k) += part.at(k);
      part.clear();
    }
  };

  // Rows of u that a thread multiplies together.
  struct Positions {
    float value[N::u][N::step_rows][N::positions];

    __device__ __forceinline__ Positions(const float* from, Sums& sums) {
#pragma unroll
      for (int o = 0; o < N::u; ++o) {
        float sum = 0.0f;  // apart: a shorter chain
#pragma unroll
        for (int q = 0; q < N::step_rows; ++q) {
#pragma unroll
          for (int i = 0; i < N::positions; ++i) {
            const float y = from[o * O::window_c + q * O::window_y + V::skewed(i, O::skew) * O::window_x];
            sum += y;
            value[o][q][i] = C::rounds_to_tf32 ? round_operand<C>(y) : y;
          }
        }
        if constexpr (N::sums_bias) sums.bias[o] += sum;
      }
    }
  };

  // A row of v with a row of u: all taps of x.
  static __device__ __forceinline__ void add_row(const float (&x)[N::segment], const Positions& u, int q,
                                                 int v, int tap_z, int tap_y, Sums& sums) {
    constexpr auto step = static_cast<int>(C::step(2));
    constexpr auto delta = static_cast<int>(C::delta(2));
#pragma unroll
    for (int i = 0; i < N::positions; ++i) {
#pragma unroll
      for (int o = 0; o < N::u; ++o) {
#pragma unroll
        for (int m = 0; m < taps_x; ++m) {
          float& sum = sums.weight[o][v][tap_z][tap_y][m];
          sum = fmaf(u.value[o][q][i], x[i * step + m * delta], sum);
        }
      }
    }
  }

  static __device__ __forceinline__ void add_rows(const float* from, const Positions& u, Sums& sums) {
    constexpr auto step = static_cast<int>(C::step(1));
    constexpr auto delta = static_cast<int>(C::delta(1));
    constexpr int reach = (N::step_rows - 1) * step + (N::taps_y - 1) * delta + 1;
#pragma unroll
    for (int v = 0; v < N::v; ++v) {
#pragma unroll
      for (int t = 0; t < N::taps_z; ++t) {
#pragma unroll
        for (int i = 0; i < reach; ++i) {
          const float* const row =
              from + v * N::window_c + t * static_cast<int>(C::delta(0)) * N::window_z + i * N::window_y;
          float x[N::segment];
#pragma unroll
          for (int k = 0; k < N::segment; ++k) x[k] = row[V::skewed(N::lead + k, N::skew) * N::window_x];
#pragma unroll
          for (int q = 0; q < N::step_rows; ++q) {
            const int distance = i - q * step;
            if (distance < 0 || distance % delta != 0 || distance / delta >= N::taps_y) continue;
            add_row(x, u, q, v, t, distance / delta, sums);
          }
        }
      }
    }
  }

  // A thread's share of a box.
  static __device__ __forceinline__ void add_box(const float* window, const float* box, const Slot& slot,
                                                 Sums& sums) {
    const Item item(slot.item);
    Parts parts{static_cast<unsigned>(slot.lane)};
    const int x = parts.take(N::lanes_x) * N::positions;
    const int slot_y = parts.take(N::lanes_y) * N::step_rows;
    const auto slot_z = static_cast<int>(parts.rest);
    const float* const v = window + item.group * N::window_g + item.v * N::window_c +
                           item.begin_z() * static_cast<int>(C::delta(0)) * N::window_z +
                           item.begin_y() * static_cast<int>(C::delta(1)) * N::window_y +
                           V::skewed(x * static_cast<int>(C::step(2)), N::skew) * N::window_x;
    const float* const u =
        box + item.group * O::window_g + item.u * O::window_c + V::skewed(x, O::skew) * O::window_x;
#pragma unroll 1
    for (int k = 0; k < N::loops_z * N::loops_y; ++k) {
      const int z = k / N::loops_y * N::lanes_z + slot_z;
      const int y = k % N::loops_y * (N::lanes_y * N::step_rows) + slot_y;
      const Positions own(u + z * O::window_z + y * O::window_y, sums);
      add_rows(
          v + z * static_cast<int>(C::step(0)) * N::window_z + y * static_cast<int>(C::step(1)) * N::window_y,
          own, sums);
    }
  }

  // What the block adds.
  struct Tile {
    int u, v, group;  // the first of each
    int64 part;

    __device__ __forceinline__ Tile() {
      Parts parts{blockIdx.x};
      u = parts.take(N::u_tiles) * (N::u_slots * N::u);
      v = parts.take(N::v_tiles) * (N::v_slots * N::v);
      group = parts.take(N::weight_group_tiles) * N::groups;
      part = static_cast<int64>(parts.rest);
    }
  };

  __device__ __forceinline__ void store(const Tile& tile, int k, int index, float sum) const {
    const Item item(index);
    const int group = tile.group + item.group;
    if (group >= C::groups) return;
    if (k >= weight_sums) {
      const int u = tile.u + item.u + k - weight_sums;
      if (u >= C::channels || tile.v + item.v + item.tap_z + item.tap_y > 0) return;
      p.bias_parts[tile.part * (static_cast<int64>(C::groups) * C::channels) + group * C::channels + u] = sum;
      return;
    }
    Parts parts{static_cast<unsigned>(k)};
    const int tap_x = parts.take(taps_x);
    const int tap_y = item.begin_y() + parts.take(N::taps_y);
    const int tap_z = item.begin_z() + parts.take(N::taps_z);
    const int v = tile.v + item.v + parts.take(N::v);
    const int u = tile.u + item.u + static_cast<int>(parts.rest);
    if (u >= C::channels || v >= C::in_channels || tap_y < item.tap_y || tap_z < item.tap_z) return;
    const int64 row = (static_cast<int64>(group) * C::channels + u) * C::in_channels + v;
    const auto tap = static_cast<int>(tap_z * C::tap_stride(0) + tap_y * C::tap_stride(1) + tap_x);
    p.parts[tile.part * N::weights + row * C::taps + tap] = sum;
  }

  // Adds the lanes' sums: neighbouring lanes by shuffles, then the rest through shared memory.
  __device__ __forceinline__ void finish(const Tile& tile, const Slot& slot, Sums& sums,
                                         float* scratch) const {
    constexpr int ways = lanes / N::tree;
#pragma unroll
    for (int first = 0; first < all_sums; first += N::batch) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < N::batch; ++k) {
        if (first + k >= all_sums) continue;
        const float sum = lanes_sum<N::tree>(sums.at(first + k));
        if (slot.in_range && slot.lane % N::tree == 0)
          scratch[(k * items + slot.item) * ways + slot.lane / N::tree] = sum;
      }
      __syncthreads();
      const int count = (all_sums - first < N::batch ? all_sums - first : N::batch) * items;
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
        float sum = 0.0f;
#pragma unroll 4
        for (int way = 0; way < ways; ++way) sum += scratch[i * ways + way];
        store(tile, first + i / items, i % items, sum);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    auto* const window = reinterpret_cast<float*>(shared);
    float* const box = window + N::window_floats;
    typename V::Parameters of_v{};
    typename U::Parameters of_u{};
    of_v.input = p.v;
    of_u.input = p.u;
    const typename V::Staging stage_v{of_v};
    const typename U::Staging stage_u{of_u};
    const Tile tile;
    const Slot slot;
    Sums sums, part;
    sums.clear();
    part.clear();
    const int64 begin = tile.part * p.part_chunks;
    const int64 end = begin + p.part_chunks < p.chunks ? begin + p.part_chunks : p.chunks;
    int added = 0;
#pragma unroll 1
    for (int64 chunk = begin; chunk < end; ++chunk) {
      if (chunk > begin) __syncthreads();
      typename V::Tile at_v(static_cast<unsigned>(chunk));
      typename U::Tile at_u(static_cast<unsigned>(chunk));
      at_v.group = at_u.group = tile.group;
      stage_v.stage_window(at_v, tile.v, window);
      stage_u.stage_window(at_u, tile.u, box);
      __syncthreads();
      if (slot.in_range) add_box(window, box, slot, part);
      if (++added == N::fold_chunks) {
        sums.take(part);
        added = 0;
      }
    }
    sums.take(part);
    finish(tile, slot, sums, window);
  }
};

}  // namespace onepass
