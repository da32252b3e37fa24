// A thin convolution and its chains and norm in one launch, by tensor cores, each output computed twice.
//
//   pass 1   x -> convolution -> before-chain -> moments of a tile; the last tile of a sample merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y
//
// A *cell* is one output position of every class (thin.h). A tile is `tile_y` rows of `tile_x` cells of a
// plane, and the work of one warp: its window of x lies in shared memory, channel by channel. A product has
// M = 16 output channels, N = 8 neighbouring cells and K = twice a *group* of four terms, of each class only
// its own taps; 16 output channels of the whole tile come before the next 16. A lane then holds neighbours of
// a row in all its classes: rows are put together in shared memory, with the 16-byte phase of where they go,
// and stored as vectors; where four neighbouring lanes have whole sectors of a row, or eight have those of a
// position (channels after space), they store them at once.
// Warps never wait for each other but where a sample's statistics are due. The agent is made of pieces, each
// a file: thin_mma_layout.cuh, _chains, _weights, _window, _products, _moments (pass 1) and _outputs (pass
// 2).
//
// Work is taken by ticket: pass 1 of one tile, then pass 2 of the tile `lag` tickets before, so that stores
// run beside arithmetic at all times. Moves x twice (the second time from the second-level cache), y once.
//
// Products of tf32 operands are exact. Operands of 16 bits are tf32 numbers; f32 ones are rounded to it in
// that mode, and else split into two, which leaves 2^-22 of a term. Tiles with an element that is not finite,
// or so large that what follows might overflow, are summed term by term instead ("careful").
#pragma once

#include "thin/mma/outputs.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinMma : ThinMmaOutputs<C, Tail, Numbers> {
  using Base = ThinMmaOutputs<C, Tail, Numbers>;
  using Base::area;
  using Base::Base;
  using Base::careful;
  using Base::clear_window;
  using Base::groups;
  using Base::in_registers;
  using Base::input_limits;
  using Base::lane;
  using Base::measure_carefully;
  using Base::narrow;
  using Base::narrows;
  using Base::p;
  using Base::prefetches;
  using Base::s;
  using Base::send_for_window;
  using Base::share_weights;
  using Base::take_window;
  using Base::threads;
  using Base::warps;
  using Base::wide;
  using Base::window_words;
  using Base::windows;
  using Base::write_carefully;
  using typename Base::Limits;
  using typename Base::Tile;
  using typename Base::Way;
  using typename Base::Weights;

  // --- Statistics: of the channels to those of the groups, of 32 tiles to those of a set, of the sets to
  // those of the sample, each by the warp that comes last. One after the other, loads would be what a
  // sample's second pass waits for. ---
  static constexpr int tiles_of_set = 32;
  static constexpr int sets = (Numbers::tiles + tiles_of_set - 1) / tiles_of_set;

  __device__ __forceinline__ float* part_of(int64 n, int index) const {
    return p.parts + (n * Numbers::tiles + index) * groups * 3;
  }

  // Whether this warp is the last of `count` to arrive.
  __device__ __forceinline__ bool arrives_last(uint32* counter, uint32 count) const {
    __syncwarp();
    uint32 before = 0;
    if (lane == 0) before = count_up(counter);
    return __shfl_sync(0xffffffffu, before, 0) == count - 1;
  }

  // body(group, elements, mean, M2) of the parts that lie `step` tiles apart.
  template <int step, class Body>
  __device__ __forceinline__ void merge_parts(int64 n, int first, int count, Body&& body) const {
    constexpr int at_once = groups < 4 ? groups : 4;
#pragma unroll 1
    for (int group = 0; group < groups; group += at_once) {
      Moments all[at_once];
#pragma unroll 2
      for (int i = lane; i < count; i += 32) {
        const float* from = part_of(n, first + i * step) + group * 3;
        float part[at_once][3];
#pragma unroll
        for (int k = 0; k < at_once * 3; ++k)
          part[k / 3][k % 3] = group + k / 3 < groups ? load_shared_by_blocks(from + k) : 0.0f;
#pragma unroll
        for (int k = 0; k < at_once; ++k) all[k].merge(part[k][0], part[k][1], part[k][2]);
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const float elements = lanes_sum<32>(all[k].count);
        float mean, m2;
        team_moments<32, threads>(all[k], elements, nullptr, mean, m2);
        if (group + k < groups) body(group + k, elements, mean, m2);
      }
    }
  }

  __device__ __forceinline__ void merge(const Tile& tile) const {
    __syncwarp();
    for (int group = lane; group < groups; group += 32) {
      Moments all;
#pragma unroll 1
      for (int i = 0; i < Tail::group_channels; ++i) {
        const float* from = area.moments[group * Tail::group_channels + i];
        all.merge(from[0], from[1], from[2]);
      }
      float* to = part_of(tile.n, tile.index) + group * 3;
      to[0] = all.count;
      to[1] = all.mean;
      to[2] = all.m2;
    }
    const int first = tile.index / tiles_of_set * tiles_of_set;
    const int left = Numbers::tiles - first;
    const int count = left < tiles_of_set ? left : tiles_of_set;
    if (!arrives_last(p.guard + tile.n * sets + tile.index / tiles_of_set, count)) return;
    uint32* counters = p.control + 4 + tile.n * 4;
    if constexpr (sets > 1) {
      merge_parts<1>(tile.n, first, count, [&](int group, float elements, float mean, float m2) {
        if (lane == 0) {
          float* to = part_of(tile.n, first) + group * 3;
          to[0] = elements;
          to[1] = mean;
          to[2] = m2;
        }
      });
      if (!arrives_last(counters, sets)) return;
    }
    merge_parts<(sets > 1 ? tiles_of_set : 1)>(
        tile.n, 0, sets > 1 ? sets : count, [&](int group, float, float mean, float m2) {
          constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
          if (lane == 0) {
            const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
            float* to = p.statistics + 2 * (tile.n * groups + group);
            to[0] = mean;
            to[1] = rstd;
            // For pass 2, where the first part was: all lanes have read it.
            float* norm = part_of(tile.n, 0) + group * 3;
            norm[0] = mean;
            norm[1] = norm_factor<Tail>(rstd, mean, m2);
          }
        });
    if (lane == 0) release(counters + 2, 1u);  // it wrote them all itself
  }

  // --- Work ---
  // The passes of a warp, one after the other: of a ticket the first pass of one tile and the second of the
  // tile `lag` before, each where there is such a tile.
  struct Pass {
    int64 ticket;
    bool is_second;
  };

  // The next ticket, in lane 0. A block's warps take `neighbours` of them, whose rows and windows lie beside
  // each other; where there are few, all multiprocessors have some. Where there are many (`any_block`) those
  // behind the first of each warp go to whichever is free: it takes longer to ask all multiprocessors, but
  // none is left with more than others. What a ticket waits for has lower ones: those of this block are taken
  // before it, those of others are or will be.
  __device__ __forceinline__ uint32 draw(uint32 neighbours, bool any_block) const {
    if (lane != 0) return 0;
    const uint32 turn = atomicAdd(&s.drawn, 1u);
    if (any_block && turn >= warps) return gridDim.x * warps + atomicAdd(p.control, 1u);
    return (turn / neighbours * gridDim.x + blockIdx.x) * neighbours + turn % neighbours;
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) s.drawn = 0;
    share_weights();
    clear_window();
    __syncthreads();
    const int64 tiles = p.batch * Numbers::tiles;
    const int64 lag = Tail::has_norm ? p.wave_units * Numbers::tiles : 0;
    const auto first_pass = [&](uint32 drawn) {
      const uint32 ticket = __shfl_sync(0xffffffffu, drawn, 0);
      return Pass{ticket, !Tail::has_norm || ticket >= tiles};
    };
    const auto tile_of = [&](const Pass& pass) {
      return Tile(pass.is_second ? pass.ticket - lag : pass.ticket);
    };
    const int64 of_block = (tiles + lag) / gridDim.x;
    const uint32 neighbours = of_block < 1 ? 1 : of_block < warps ? static_cast<uint32>(of_block) : warps;
    const bool any_block = of_block >= 4 * warps;
    Pass pass = first_pass(draw(neighbours, any_block));
    if (pass.ticket >= tiles + lag) return;
    float* window = area.x;
    send_for_window(tile_of(pass), window);
    Weights w;
    Limits limits;
    bool has_weights = false;
#pragma unroll 1
    while (true) {
      // Anew after a tile that needs care: they are not kept in memory over the calls there.
      if (!has_weights) limits = input_limits(w);
      const Tile tile = tile_of(pass);
      if (Tail::has_norm && pass.is_second) {
        if (lane == 0) wait_for(p.control + 4 + tile.n * 4 + 2, 1u);
        __syncwarp();
      }
      const bool stays = !pass.is_second && pass.ticket >= lag;
      const uint32 drawn = stays ? 0 : draw(neighbours, any_block);
      const Way way = take_window(tile, limits, window);
      const Pass next = stays ? Pass{pass.ticket, true} : first_pass(drawn);
      const bool ends = next.ticket >= tiles + lag;
      w.window = window;
      if (windows > 1) window = area.x + (window_words - (window - area.x));
      if (prefetches && !ends) send_for_window(tile_of(next), window);
      if (narrows && way == narrow) {
        if (pass.is_second) {
          this->template write<narrow>(tile, w);
        } else {
          this->template measure<narrow>(tile, w);
        }
      } else if (way != careful) {
        if (pass.is_second) {
          this->template write<wide>(tile, w);
        } else {
          this->template measure<wide>(tile, w);
        }
      }
      __syncwarp();
      if (!prefetches && !ends) send_for_window(tile_of(next), window);
      if (pass.is_second) {
        if (way == careful) write_carefully(p, tile);
      } else {
        if (way == careful) measure_carefully(p, area, tile);
        merge(tile);
      }
      has_weights = !in_registers || way != careful;
      if (ends) return;
      pass = next;
    }
  }
};

}  // namespace onepass
