// HoldByRecomputing: no value waits for the norm; every output is computed twice. The row "thin_mma".
//
//   pass 1   x -> convolution -> before-chain -> moments of a tile; the last tile of a sample merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y
//
// A ticket is pass 1 of one tile, then pass 2 of the tile `lag` tickets before, so that stores run beside
// arithmetic at all times. Moves x twice (the second time from the second-level cache), y once.
#pragma once

#include "thin/mma/careful.cuh"
#include "thin/mma/moments.cuh"
#include "thin/mma/outputs.cuh"
#include "thin/mma/statistics.cuh"
#include "thin/mma/tickets.cuh"
#include "thin/mma/window.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Recompute {
  using Parameters = P;
  const Warp warp;
  const Weights weights{warp};
  const Outputs outputs{warp};

  static __device__ __forceinline__ void run(const Parameters& p, unsigned char* bytes) {
    Recompute{{p, *reinterpret_cast<Shared*>(bytes)}}.run();
  }

  // --- Pass 2: values through the norm and the after-chain ---
  struct Normalised {
    Operands<Before> before;
    Operands<After> after;
    // The norm as one multiply-add.
    struct {
      float scale = 1.0f, shift = 0.0f;
    } norm[halves];

    // Of a lane's channels from 16 m on.
    __device__ __forceinline__ void load_norm(const Parameters& p, int64 n, int m, int quad) {
      if constexpr (Tail::has_norm) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          const int channel = m * 16 + row_channel(half, quad);
          const int existing = channel < channels ? channel : 0;
          // Statistics leaves mean and factor of a slab where its first part was.
          const float* slab = p.parts + (n * Numbers::tiles * groups + existing / Tail::group_channels) * 3;
          const int own = Tail::channel(n, existing);
          norm[half].scale = Tail::weight(p, own) * load_shared_by_blocks(slab + 1);
          norm[half].shift = fmaf(-load_shared_by_blocks(slab), norm[half].scale, Tail::bias(p, own));
        }
      }
    }

    // Where values go: strides of rows and channels.
    static constexpr int row_stride = out_x;
    static constexpr int64 channel_stride = Tail::spatial;
    static __device__ __forceinline__ int64 index(int channel, int z, int y, int x) {
      return output_index(0, channel, z, y, x);
    }
    static __device__ __forceinline__ char* sample(const Parameters& p, int64 n) {
      return static_cast<char*>(p.output) + n * C::stride(0) * Output::bytes;
    }
    template <Way way, int rz, int ry>
    __device__ __forceinline__ void begin(const Sums&) {}
    __device__ __forceinline__ float finish(int half, float x, bool) const {
      if constexpr (Tail::has_norm) x = fmaf(x, norm[half].scale, norm[half].shift);
      return Chains::template apply<After>(x, after.row[half]);
    }
    template <class Pieces>
    static __device__ __forceinline__ void store_piece(const Pieces& pieces, void* to, int index,
                                                       bool aligned) {
      pieces.store(to, index, aligned);
    }
    // Not read again soon: evict first.
    template <class Vector>
    static __device__ __forceinline__ void store(void* to, Vector value) {
      __stcs(static_cast<Vector*>(to), value);
    }
  };

  template <Way way>
  __device__ __forceinline__ void write(const Tile& tile, Fragments& w) const {
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) weights.load_weights(w, m);
      Normalised values;
      values.before.load(warp.p, tile.n, m, warp.quad);
      values.after.load(warp.p, tile.n, m, warp.quad);
      values.load_norm(warp.p, tile.n, m, warp.quad);
      outputs.template write<way>(tile, w, values, m);
    }
  }

  static __device__ __noinline__ void write_carefully(const Parameters& p, const Tile tile) {
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      ChannelValues<After, 1> after;
      after.load(p, tile.n, channel);
      ChannelNorm<Tail> norm;
      norm.load(p, tile.n, channel);
      Careful::for_each_stored(Normalised::sample(p, tile.n), tile, channel, [&](int z, int y, int x) {
        const float value = norm.apply(Careful::value(p, tile.n, channel, z, y, x));
        store_one<Output>(p.output, output_index(tile.n, channel, z, y, x),
                          Chains::template apply<After>(value, after));
      });
    }
  }

  // A pass of a ticket: pass 1 of its tile, or pass 2 of the tile `lag` before, each where there is such a
  // tile.
  struct Pass {
    int64 ticket;
    bool is_second;
  };

  __device__ __forceinline__ void run() const {
    const Window window{warp};
    const TileMoments moments{warp};
    const Statistics statistics{warp};
    Tickets::prepare(warp, weights, window);
    const int64 tiles = warp.p.batch * Numbers::tiles;
    const int64 lag = Tail::has_norm ? warp.p.lag * Numbers::tiles : 0;
    const auto first_pass = [&](uint32 drawn) {
      const uint32 ticket = __shfl_sync(0xffffffffu, drawn, 0);
      return Pass{ticket, !Tail::has_norm || ticket >= tiles};
    };
    const auto tile_of = [&](const Pass& pass) {
      return Tile(pass.is_second ? pass.ticket - lag : pass.ticket);
    };
    const Tickets tickets{warp, tiles + lag};
    Pass pass = first_pass(tickets.draw());
    if (pass.ticket >= tiles + lag) return;
    float* place = warp.area.x;
    window.send_for(tile_of(pass), place);
    Fragments w;
    Limits limits;
    bool has_weights = false;
#pragma unroll 1
    while (true) {
      // Loaded again after a careful tile: registers are not saved across its calls.
      if (!has_weights) limits = weights.input_limits(w);
      const Tile tile = tile_of(pass);
      if (Tail::has_norm && pass.is_second) {
        if (warp.lane == 0) wait_for(warp.p.control + 4 + tile.n * 4 + 2, 1u);
        __syncwarp();
      }
      const bool stays = !pass.is_second && pass.ticket >= lag;
      const uint32 drawn = stays ? 0 : tickets.draw();
      const Way way = window.take(tile, limits, place);
      const Pass next = stays ? Pass{pass.ticket, true} : first_pass(drawn);
      const bool ends = next.ticket >= tiles + lag;
      w.window = place;
      if (windows > 1) place = warp.area.x + (window_words - (place - warp.area.x));
      if (prefetches && !ends) window.send_for(tile_of(next), place);
      if (Chains::narrows && way == narrow) {
        if (pass.is_second) {
          write<narrow>(tile, w);
        } else {
          moments.template measure<narrow>(tile, w);
        }
      } else if (way != careful) {
        if (pass.is_second) {
          write<wide>(tile, w);
        } else {
          moments.template measure<wide>(tile, w);
        }
      }
      __syncwarp();
      if (!prefetches && !ends) window.send_for(tile_of(next), place);
      if (pass.is_second) {
        if (way == careful) write_carefully(warp.p, tile);
      } else {
        if (way == careful) Careful::measure(warp.p, warp.area, tile);
        statistics.merge(tile);
      }
      has_weights = !in_registers || way != careful;
      if (ends) return;
      pass = next;
    }
  }
};

template <class C, class Tail, class Numbers>
using HoldByRecomputing = typename ThinMma<C, Tail, Numbers, ThinMmaParameters<Tail::parameters>>::Recompute;

}  // namespace onepass
