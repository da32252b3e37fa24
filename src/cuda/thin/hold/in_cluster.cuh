// HoldInCluster: values wait for the norm in the shared memory of a cluster. The row "thin_resident": x is
// read once, y is written once, and nothing else is in memory.
//
//   x -> convolution -> before-chain -> held in shared memory -> norm -> after-chain -> y
//
// A *unit* is the channels of a sample that are whole slabs and whole products (16 channels each), at most
// all of them. A cluster of `blocks` blocks has a unit, each block a *part*: a box of cells, `part_z` planes
// by `part_y` rows of tiles (of one row: `part_x` tiles). A warp computes tiles of the part and leaves values
// in `held` as f32, [channel][output plane][rows of the part]. Each such run has the 16-byte phase of where
// it goes (channels that lie after space need none). Every block merges the moments of all rows of tiles,
// which lie in the blocks' shared memory, in one order: bits do not depend on how many blocks there are. Then
// it goes over its runs, a vector of 16 bytes a lane.
//
// A cluster takes one sample after the other, of as few sets of channels as possible. The first windows of
// the next sample arrive while sums are exchanged and outputs are stored.
#pragma once

#include "device/barrier.cuh"
#include "thin/hold/cluster_layout.cuh"
#include "thin/mma/careful.cuh"
#include "thin/mma/moments.cuh"
#include "thin/mma/window.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::InCluster {
  using Parameters = P;
  using Part = typename Cluster::Part;
  using Shared = typename Cluster::Shared;

  const Warp warp;
  Shared& all;
  const Weights weights{warp};
  const Window window{warp};
  const Products products{warp};
  const TileMoments moments{warp};

  // --- Values of a tile go to where they are held ---
  // An item's outputs of one class of z. `to`: the lane's first output in the tile's first row.
  template <Way way, int rz>
  __device__ __forceinline__ void keep_item(Distances& own, const Fragments& w, const Held<rz>& held,
                                            const Operands<Before>& operands, const Tile& tile, int y,
                                            int column, float* const (&to)[halves],
                                            const bool (&in_range)[halves]) const {
    const int first = y * classes_y * out_x + column * spans_x * 8 * classes_x;
    products.for_each_sum(
        w, held, tile, y, column, [&](auto ry, auto half, auto rx, auto span, float* pair, bool exists) {
          Chains::template before<way, Chains::swish_terms(rz, ry, rx)>(pair[0], pair[1], operands.row[half]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Chains::compute_here(pair[i]);
            if (!exists || Products::ends(products.cell_of(tile, column, span), i, rx)) continue;
            own.add(half, distance_from(pair[i], own.pivot[half]));
            if (in_range[half])
              to[half][first + (span / spans_x * classes_y + ry) * out_x +
                       (span % spans_x * 8 + i) * classes_x + rx] = pair[i];
          }
        });
  }

  template <Way way>
  __device__ __forceinline__ void keep(const Part& part, const Tile& tile, Fragments& w) const {
    const int items = Products::items_of(Products::rows_of(tile));
    const float count = lanes_sum<4>(static_cast<float>(moments.count_of(tile)));
    const int own_channels = Cluster::channels_from(warp.first_channel);
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) weights.load_weights(w, m);
      Operands<Before> operands;
      operands.load(warp.p, tile.n, warp.first_channel / 16 + m, warp.quad);
      Distances own;
      moments.template begin<way>(own, w, products.columns_of(w, 0, 0), operands);
      for_constant<classes_z>([&](auto rz_) {
        constexpr int rz = decltype(rz_)::value;
        if (!Products::has_plane(tile, rz)) return;
        float* to[halves];
        bool in_range[halves];
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          const int channel = m * 16 + row_channel(half, warp.quad);
          in_range[half] = (Cluster::unit_channels % 16 == 0 && channels % Cluster::unit_channels == 0) ||
                           channel < own_channels;
          to[half] = Cluster::run_of(warp.p, all, part, tile.n, warp.first_channel,
                                     in_range[half] ? channel : 0, (tile.z - part.z) * classes_z + rz) +
                     (tile.y - part.y) * classes_y * out_x + (tile.x - part.x + 2 * warp.in_quad) * classes_x;
        }
        const Held<rz> held = weights.template hold_weights<rz>(w);
#pragma unroll 1
        for (int item = 0; item < items; ++item)
          keep_item<way, rz>(own, w, held, operands, tile, item / columns * spans_y, item % columns, to,
                             in_range);
      });
      moments.store_moments(own, m, count);
    }
  }

  // The same for a tile that is computed carefully.
  static __device__ __noinline__ void keep_carefully(const Parameters& p, Shared& all, WarpShared& area,
                                                     const Part part, const Tile tile, int first) {
    const int own_channels = Cluster::channels_from(first);
#pragma unroll 1
    for (int channel = 0; channel < own_channels; ++channel) {
      Moments moments;
      Careful::for_each_output(tile, [&](int z, int y, int x) {
        const float value = Careful::value(p, tile.n, first + channel, z, y, x);
        Cluster::run_of(p, all, part, tile.n, first, channel,
                        z - part.z * classes_z)[(y - part.y * classes_y) * out_x + x - part.x * classes_x] =
            value;
        moments.merge(1.0f, value, 0.0f);
      });
      Careful::store_moments(area, channel, moments);
    }
  }

  // --- Statistics: channels of a tile, groups, tiles of a strip, strips of the unit, in an order that does
  // not depend on the parts ---
  __device__ __forceinline__ void merge_channels(int slot, int parity) const {
    __syncwarp();
#pragma unroll 1
    for (int group = warp.lane; group < Cluster::unit_groups; group += 32) {
      Moments moments;
#pragma unroll 1
      for (int i = 0; i < Cluster::group_channels; ++i) {
        const float* from = warp.area.moments[group * Cluster::group_channels + i];
        moments.merge(from[0], from[1], from[2]);
      }
      if constexpr (Cluster::strip_tiles == 1) {
        all.strips[parity][slot][group] = float4{moments.count, moments.mean, moments.m2, 0.0f};
      } else {
        float* to = all.tiles[slot][group];
        to[0] = moments.count;
        to[1] = moments.mean;
        to[2] = moments.m2;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void merge_tiles(int parity) const {
    if constexpr (Cluster::strip_tiles > 1) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < Cluster::part_strips * Cluster::unit_groups; i += threads) {
        const int strip = i / Cluster::unit_groups, group = i % Cluster::unit_groups;
        Moments moments;
#pragma unroll 1
        for (int x = 0; x < Cluster::strip_tiles; ++x) {
          const float* from = all.tiles[strip * Cluster::strip_tiles + x][group];
          moments.merge(from[0], from[1], from[2]);
        }
        all.strips[parity][strip][group] = float4{moments.count, moments.mean, moments.m2, 0.0f};
      }
    }
  }

  // Moments of a strip and group in another block of the cluster.
  static __device__ __forceinline__ float4 load_of(const float4* own, int block) {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster::blocks > 1) return barrier::load_of_block(own, block);
#endif
    return *own;
  }

  __device__ __forceinline__ void merge_strips(int64 n, int parity) const {
    wait_for_cluster();
    constexpr float elements = static_cast<float>(Cluster::group_channels * Tail::spatial);
    const int own_groups = Cluster::channels_from(warp.first_channel) / Cluster::group_channels;
#pragma unroll 1
    for (int group = threadIdx.x / 32; group < own_groups; group += warps) {
      Moments own;
#pragma unroll 4
      for (int i = warp.lane; i < Cluster::all_strips; i += 32) {
        constexpr int of_row = Cluster::by_row ? 1 : Cluster::tiles_x,
                      of_part = Cluster::by_row ? 1 : Cluster::part_x;
        const int z = i / (Cluster::tiles_y * of_row), y = i / of_row % Cluster::tiles_y, x = i % of_row;
        const int block =
            (z / Cluster::part_z * Cluster::parts_y + y / Cluster::part_y) * Cluster::parts_x + x / of_part;
        const int strip =
            (z % Cluster::part_z * Cluster::part_y + y % Cluster::part_y) * of_part + x % of_part;
        const float4 v = load_of(&all.strips[parity][strip][group], block);
        own.merge(v.x, v.y, v.z);
      }
      float mean, m2;
      team_moments<32, threads>(own, elements, nullptr, mean, m2);
      const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
      if (warp.lane == 0 && warp.p.statistics != nullptr && blockIdx.x % Cluster::blocks == 0) {
        float* to = warp.p.statistics + 2 * (n * (channels / Cluster::group_channels) +
                                             warp.first_channel / Cluster::group_channels + group);
        to[0] = mean;
        to[1] = rstd;
      }
#pragma unroll 1
      for (int i = warp.lane; i < Cluster::group_channels; i += 32) {
        const int channel = group * Cluster::group_channels + i;
        const float scale = all.affine[channel][0] * norm_factor<Tail>(rstd, mean, m2);
        all.norm[channel][0] = scale;
        all.norm[channel][1] = fmaf(-mean, scale, all.affine[channel][1]);
      }
    }
    __syncthreads();
  }

  // Waits for all threads of all blocks; their writes are then visible.
  static __device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster::blocks > 1) {
      barrier::cluster_sync();
      return;
    }
#endif
    __syncthreads();
  }

  // --- Outputs: what is held, through the norm and the after-chain ---
  static constexpr int power_of_two(int least) {
    int power = 1;
    while (power < least && power < 32) power *= 2;
    return power;
  }

  // Channels before space: some lanes for each run, a vector a lane.
  __device__ __forceinline__ void finish_runs(const Part& part, int64 n) const {
    constexpr int team = power_of_two((Cluster::most_rows * Cluster::most_of_row + 2 * width - 2) / width);
    constexpr int vector_bytes = width * Output::bytes;
    static_assert(vector_bytes == 16);
    const int runs = Cluster::channels_from(warp.first_channel) * part.planes;
    const int own = threadIdx.x % team;
#pragma unroll 1
    for (int run = threadIdx.x / team; run < runs; run += threads / team) {
      const int channel = run / part.planes;
      const int plane = run - channel * part.planes;
      const float scale = all.norm[channel][0], shift = all.norm[channel][1];
      ChannelValues<After, 1> operands;
      operands.load(warp.p, n, warp.first_channel + channel);
      const int64 index = Cluster::run_index(part, n, warp.first_channel + channel, plane);
      const int before = Cluster::phase(warp.p, index);
      const float* from = all.held + channel * Cluster::held_pitch + plane * Cluster::run_pitch;
#pragma unroll 2
      for (int i = own * width; i < before + part.length; i += team * width) {
        float value[width];
#pragma unroll
        for (int k = 0; k < width; k += 4) {
          const float4 v = *reinterpret_cast<const float4*>(from + i + k);
          value[k] = v.x, value[k + 1] = v.y, value[k + 2] = v.z, value[k + 3] = v.w;
        }
        const int64 first = index - before + i;
        if (i >= before && i + width <= before + part.length) {
          typename After::template Tensors<width> tensors;
          tensors.load(warp.p, first);
#pragma unroll
          for (int k = 0; k < width; ++k)
            value[k] = After::value(fmaf(value[k], scale, shift), operands.value[0], tensors, k);
          Packed<Output, width> packed;
          packed.pack(value);
          packed.store(warp.p.output, first, true);
        } else {
#pragma unroll
          for (int k = 0; k < width; ++k) {
            if (i + k < before || i + k >= before + part.length) continue;
            typename After::template Tensors<1> tensors;
            tensors.load(warp.p, first + k);
            store_one<Output>(warp.p.output, first + k,
                              After::value(fmaf(value[k], scale, shift), operands.value[0], tensors, 0));
          }
        }
      }
    }
  }

  // Channels after space: a thread has `piece` neighbouring channels, the same at every position.
  template <bool aligned>
  __device__ __forceinline__ void finish_positions(const Part& part, int64 n) const {
    constexpr int piece = Numbers::output_piece;
    static_assert(piece == 1 ||
                  (piece == width && channels % width == 0 && Cluster::unit_channels % width == 0));
    const int pieces = Cluster::channels_from(warp.first_channel) / piece;
    const int at_once = threads / pieces;  // positions
    const int channel = static_cast<int>(threadIdx.x) % pieces * piece;
    const int own = static_cast<int>(threadIdx.x) / pieces;
    if (own >= at_once) return;
    ChannelValues<After, piece> operands;
    operands.load(warp.p, n, warp.first_channel + channel);
    float scale[piece], shift[piece];
#pragma unroll
    for (int k = 0; k < piece; ++k) scale[k] = all.norm[channel + k][0], shift[k] = all.norm[channel + k][1];
#pragma unroll 1
    for (int plane = 0; plane < part.planes; ++plane) {
      const int64 index = Cluster::run_index(part, n, warp.first_channel + channel, plane);
      const float* from = all.held + channel * Cluster::held_pitch + plane * Cluster::run_pitch;
#pragma unroll 2
      for (int i = own; i < part.length; i += at_once) {
        const int64 at = index + static_cast<int64>(i) * C::stride(4);
        typename After::template Tensors<piece> tensors;
        tensors.load(warp.p, at);
        float value[piece];
#pragma unroll
        for (int k = 0; k < piece; ++k)
          value[k] = After::value(fmaf(from[k * Cluster::held_pitch + i], scale[k], shift[k]),
                                  operands.value[k], tensors, k);
        Packed<Output, piece> packed;
        packed.pack(value);
        packed.store(warp.p.output, at, aligned);
      }
    }
  }

  __device__ __forceinline__ void finish(const Part& part, int64 n) const {
    if constexpr (!Cluster::channels_last) {
      finish_runs(part, n);
    } else if (reinterpret_cast<uint64>(warp.p.output) % 16 == 0) {
      finish_positions<true>(part, n);
    } else {
      finish_positions<false>(part, n);
    }
  }

  // --- Work ---
  // The block's part of samples `first` to `last`, exclusive.
  __device__ __forceinline__ void run_samples(int64 first, int64 last) const {
    for (int i = threadIdx.x; i < Cluster::channels_from(warp.first_channel); i += threads) {
      all.affine[i][0] = Tail::weight(warp.p, warp.first_channel + i);
      all.affine[i][1] = Tail::bias(warp.p, warp.first_channel + i);
    }
    weights.share_weights_at_once();
    window.clear();
    __syncthreads();
    const Part part(static_cast<int>(blockIdx.x) % Cluster::blocks);
    const int first_slot = part.from(threadIdx.x / 32);
    float* place = warp.area.x;
    if (first_slot < Cluster::slots) window.send_for(part.tile(first, first_slot), place);
    Fragments w;
    Limits limits;
    bool has_weights = false;
    int parity = 0;
#pragma unroll 1
    for (int64 n = first; n < last; ++n) {
#pragma unroll 1
      for (int slot = first_slot, next_slot; slot < Cluster::slots; slot = next_slot) {
        // Loaded again after a careful tile: registers are not saved across its calls.
        if (!has_weights) limits = weights.input_limits(w);
        const Tile tile = part.tile(n, slot);
        const Way way = window.take(tile, limits, place);
        w.window = place;
        if (windows > 1) place = warp.area.x + (window_words - (place - warp.area.x));
        next_slot = part.from(slot + warps);
        const int64 next = next_slot < Cluster::slots ? n : n + 1;
        const Tile next_tile = part.tile(next, next_slot < Cluster::slots ? next_slot : first_slot);
        if (prefetches && next < last) window.send_for(next_tile, place);
        if (Chains::narrows && way == narrow) {
          keep<narrow>(part, tile, w);
        } else if (way != careful) {
          keep<wide>(part, tile, w);
        }
        __syncwarp();
        if (!prefetches && next < last) window.send_for(next_tile, place);
        if (way == careful) keep_carefully(warp.p, all, warp.area, part, tile, warp.first_channel);
        merge_channels(slot, parity);
        has_weights = !in_registers || way != careful;
      }
      merge_tiles(parity);
      merge_strips(n, parity);
      finish(part, n);
      __syncthreads();  // held values are stored
      parity ^= 1;
    }
    wait_for_cluster();  // other blocks may still read this one's moments
  }

  // Units are numbered with samples running fastest. Each cluster has consecutive units.
  static __device__ __forceinline__ void run(const Parameters& p, unsigned char* bytes) {
    auto& shared = *reinterpret_cast<Shared*>(bytes);
    const int64 units = p.batch * Cluster::sets;
    const int64 clusters = gridDim.x / Cluster::blocks, cluster = blockIdx.x / Cluster::blocks;
    const int64 last = units * (cluster + 1) / clusters;
#pragma unroll 1
    for (int64 unit = units * cluster / clusters; unit < last;) {
      const int64 set = unit / p.batch;
      const int64 end = (set + 1) * p.batch < last ? (set + 1) * p.batch : last;
      InCluster{{p, shared.mma, static_cast<int>(set) * Cluster::unit_channels}, shared}.run_samples(
          unit - set * p.batch, end - set * p.batch);
      unit = end;
    }
  }
};

template <class C, class Tail, class Numbers>
using HoldInCluster = typename ThinMma<C, Tail, Numbers, ThinClusterParameters<Tail::parameters>>::InCluster;

}  // namespace onepass
