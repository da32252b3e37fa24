// Passes 1 and 2 over the tiles of a sample: window, convolution, elements, dweight.
#pragma once

#include "thin/backward/convolution.cuh"
#include "thin/backward/elements.cuh"
#include "thin/backward/staged_gradient.cuh"
#include "thin/backward/weight_gradient.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::TilePasses {
  const Thread thread;
  const Window window{{thread.p, thread.s}};
  const ChunkConvolution convolution{{thread.p, thread.s}};
  const StagedGradient staged_gradient{{thread.p, thread.s}};
  const Elements elements{{thread.p, thread.s}};
  const WeightGradient weights{{thread.p, thread.s}};

  // One row tile of a chunk. `whole`: all positions of the chunk are in the output.
  template <bool second, bool whole, int row_tile, class Sums>
  __device__ __forceinline__ void process_row_tile(const Tile& tile, int first_class, const Chunk& chunk,
                                                   const float* staged, Sums& sums) const {
    constexpr int further = static_cast<int>(C::stride(4));
    const int64 output = tile.n * C::stride(0) + (row_tile * 16 + thread.quad) * C::stride(1) +
                         chunk.q[0] * C::stride(2) + chunk.q[1] * C::stride(3) +
                         chunk.cell * (classes_x * C::stride(4));
    // Without tensors beside them, elements that do not exist are masked instead of skipped: no branches.
    constexpr bool masks = (chunk_rows > 1 || halves) && !Numbers::has_tensors;
    // Tile `t` of the chunk is span t % spans of row t / spans.
    const auto is_valid = [&](int x, int t, int k) {
      return whole || ((chunk_rows == 1 || chunk.has_row(t / spans)) &&
                       chunk.cell + t % spans * 8 + k < static_cast<int>(C::positions(2, x)));
    };
    const auto is_channel = [&](int half) {
      return channels % 16 == 0 || row_tile * 16 + half * 8 + thread.quad < channels;
    };
    const auto offset = [&](int half, int x, int t, int k) {
      return half * 8 * static_cast<int>(C::stride(1)) +
             t / spans * static_cast<int>(C::classes(1) * C::stride(3)) +
             ((t % spans * 8 + k) * classes_x + x) * further;
    };
    float g[classes_x][chunk_tiles][4];
    if constexpr (!Tail::has_mean && !StagedGradient::stages) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int x = 0; x < classes_x; ++x) {
              g[x][t][half * 2 + k] =
                  is_valid(x, t, k) && is_channel(half)
                      ? elements.template load_gradient<second>(output + offset(half, x, t, k))
                      : 0.0f;
            }
          }
        }
      }
    }
    float h[classes_x][chunk_tiles][4];
    convolution.template run<row_tile>(first_class, chunk.window, h);
    if constexpr (StagedGradient::stages) staged_gradient.read(staged, g);
    Operand* to_ring = nullptr;
    if constexpr (second && Numbers::wants_input) {
      to_ring = tile.ring +
                (chunk.q[0] * ring_stride(0) + chunk.q[1] * ring_stride(1) + chunk.cell * classes_x * rows +
                 row_tile * 16 + (halves ? 2 * thread.quad : thread.quad));
    }
    const auto ring_offset = [](int half, int x, int t, int k) {
      return half * 8 + t / spans * static_cast<int>(C::classes(1)) * ring_stride(1) +
             ((t % spans * 8 + k) * classes_x + x) * rows;
    };
    RowValues row[2];
    float before_values[2][Before::channel_operands > 0 ? Before::channel_operands : 1];
    float after_values[2][After::channel_operands > 0 ? After::channel_operands : 1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = row_tile * 16 + half * 8 + thread.quad;
      row[half] = thread.s.row[c];
      Before::load_channel(thread.p, tile.n, is_channel(half) ? c : 0, before_values[half]);
      After::load_channel(thread.p, tile.n, is_channel(half) ? c : 0, after_values[half]);
    }
#pragma unroll
    for (int x = 0; x < classes_x; ++x) {
#pragma unroll
      for (int t = 0; t < chunk_tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i / 2;
          const int k = i % 2;
          float& value = h[x][t][i];
          const bool valid = is_valid(x, t, k) && is_channel(half);
          if (masks || valid) {
            value = elements.template element<second>(row[half], before_values[half], after_values[half],
                                                      value, Tail::has_mean ? row[half].dy : g[x][t][i],
                                                      !masks || valid, output + offset(half, x, t, k),
                                                      sums.value[row_tile][half], sums.peak[row_tile][half]);
            if constexpr (second && !splits && !halves) value = round_to_tf32(value);
          } else {
            value = 0.0f;
          }
          if constexpr (second && Numbers::wants_input && !halves) {
            if (is_valid(x, t, k)) to_ring[ring_offset(half, x, t, k)] = value;
          }
        }
      }
    }
    if constexpr (second && halves) {
#pragma unroll
      for (int x = 0; x < classes_x; ++x) {
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t) {
          // Channels `quad` and `quad` + 8.
          const uint32 own = pack_halves(h[x][t][0], h[x][t][1]);
          const uint32 other = pack_halves(h[x][t][2], h[x][t][3]);
          if constexpr (Numbers::wants_input) {
            if (is_valid(x, t, 0))
              *reinterpret_cast<uint32*>(to_ring + ring_offset(0, x, t, 0)) = low_halves(own, other);
            if (is_valid(x, t, 1))
              *reinterpret_cast<uint32*>(to_ring + ring_offset(0, x, t, 1)) = high_halves(own, other);
          }
          if constexpr (Numbers::wants_weight) {
            const int flat = chunk.flat + t / spans * Numbers::tile(2) + t % spans * 8;
            uint4& to = thread.s.passes
                            .half_dh[weights.half_group(first_class + x, row_tile, flat / 16)][thread.lane];
            reinterpret_cast<uint2*>(&to)[flat / 8 % 2] = uint2{own, other};
          }
        }
      }
    } else if constexpr (second && Numbers::wants_weight) {
#pragma unroll
      for (int x = 0; x < classes_x; ++x) {
        float* to =
            &thread.s.passes
                 .dh[first_class + x][row_tile * 8 + thread.quad][(chunk.flat + 2 * thread.in_quad) * 2];
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t)
          *reinterpret_cast<float4*>(to + (t / spans * Numbers::tile(2) + t % spans * 8) * 2) =
              float4{h[x][t][0], h[x][t][2], h[x][t][1], h[x][t][3]};
      }
    }
  }

  // dh of a chunk outside the output is zero for dweight.
  __device__ __forceinline__ void clear_gradients(int first_class, const Chunk& chunk) const {
#pragma unroll 1
    for (int i = 0; i < classes_x * chunk_tiles * row_tiles; ++i) {
      const int row_tile = i % row_tiles;
      const int t = i / row_tiles % chunk_tiles;
      const int x = i / (row_tiles * chunk_tiles);
      const int flat =
          chunk.flat + t / spans * Numbers::tile(2) + t % spans * 8 + (halves ? 0 : 2 * thread.in_quad);
      if constexpr (halves) {
        uint4& to =
            thread.s.passes.half_dh[weights.half_group(first_class + x, row_tile, flat / 16)][thread.lane];
        reinterpret_cast<uint2*>(&to)[flat / 8 % 2] = uint2{0u, 0u};
        continue;
      }
      *reinterpret_cast<float4*>(&thread.s.passes.dh[first_class + x][row_tile * 8 + thread.quad][flat * 2]) =
          float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }

  static constexpr int items_of_tile = chunks * (classes / classes_x);

  // Where dy is staged, the copies of the warp's first item are in flight. They are again afterwards, for the
  // tile with index `next`, unless that is negative.
  template <bool second, class Sums>
  __device__ __forceinline__ void process_tile(const Tile& tile, int next, int& buffer, Sums& sums) const {
#pragma unroll 1
    for (int item = thread.warp; item < items_of_tile; item += warps) {
      const float* staged = nullptr;
      if constexpr (StagedGradient::stages) {
        staged = thread.s.passes.staged[thread.warp][buffer];
        buffer ^= 1;
        __syncwarp();  // all lanes have read the other buffer
        if (item + warps < items_of_tile) {
          staged_gradient.start(tile, item + warps, buffer);
        } else if (next >= 0) {
          staged_gradient.start(Tile(tile.n, tile.ring, next), thread.warp, buffer);
        } else {
          staged_gradient.start_none();
        }
        staged_gradient.wait();
      }
      const int first_class = item / chunks * classes_x;
      const Chunk chunk(tile, item % chunks, ThinClass<C>(first_class), thread);
      if (!chunk.has_row(0)) {
        if constexpr (second && Numbers::wants_weight) clear_gradients(first_class, chunk);
        continue;
      }
      if (chunk_rows > 1 && chunk.is_whole()) {
        process_chunk<second, true>(tile, first_class, chunk, staged, sums);
      } else {
        process_chunk<second, false>(tile, first_class, chunk, staged, sums);
      }
    }
  }

  template <bool second, bool whole, class Sums>
  __device__ __forceinline__ void process_chunk(const Tile& tile, int first_class, const Chunk& chunk,
                                                const float* staged, Sums& sums) const {
    process_row_tile<second, whole, 0>(tile, first_class, chunk, staged, sums);
    if constexpr (row_tiles > 1) process_row_tile<second, whole, 1>(tile, first_class, chunk, staged, sums);
    if constexpr (row_tiles > 2) process_row_tile<second, whole, 2>(tile, first_class, chunk, staged, sums);
    if constexpr (row_tiles > 3) process_row_tile<second, whole, 3>(tile, first_class, chunk, staged, sums);
  }

  template <bool second>
  __device__ __forceinline__ void pass(int64 n, int segment) const {
    constexpr int count = second ? second_sums : first_sums;
    typename Elements::template RowSums<count> sums;
    __syncthreads();  // shared memory is free
    const SampleScales scales = scales_of(thread.p, n, second);
    elements.template load_rows<second>(n, scales);
    if constexpr (second && Numbers::wants_weight) {
      for (int i = threadIdx.x; i < Numbers::units * 32; i += threads)
        thread.s.passes.weight[i / 32][i % 32] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    const int first = segment * Numbers::segment_tiles;
    const int last = (segment + 1) * Numbers::segment_tiles < Numbers::all_tiles
                         ? (segment + 1) * Numbers::segment_tiles
                         : Numbers::all_tiles;
    int buffer = 0;
    Operand* ring = second && Numbers::wants_input ? ring_of(thread.p, n) : nullptr;
    if constexpr (StagedGradient::stages) {
      if (thread.warp < items_of_tile) staged_gradient.start(Tile(n, ring, first), thread.warp, buffer);
    }
#pragma unroll 1
    for (int index = first; index < last; ++index) {
      const Tile tile(n, ring, index);
      window.rotate(tile.turn());
      if (slides && index > first && tile.origin[0] > 0) {
        constexpr int fresh = fresh_planes < Numbers::window(0) ? fresh_planes : Numbers::window(0);
        window.template load<fresh>(tile, scales.x);
      } else {
        window.template load<Numbers::window(0)>(tile, scales.x);
      }
      __syncthreads();
      process_tile<second>(tile, index + 1 < last ? index + 1 : -1, buffer, sums);
      __syncthreads();
      if constexpr (second && Numbers::wants_weight) {
        weights.multiply();
        __syncthreads();
      }
    }
    const int64 ticket = n * Numbers::segments + segment;
    if constexpr (halves) {
      if constexpr (!second) {
        elements.record_peak(n, sums);
      } else if constexpr (Numbers::wants_bias) {
#pragma unroll
        for (int i = 0; i < row_tiles * 2; ++i)
          sums.value[i / 2][i % 2][chain_sums] *= inverse_of_power(scales.dh);
      }
    }
    elements.template store_sums<count>(
        sums, (second ? thread.p.second_parts : thread.p.first_parts) + ticket * channels * count);
    if constexpr (second && Numbers::wants_weight) weights.store(n, segment, scales);
  }
};

}  // namespace onepass
