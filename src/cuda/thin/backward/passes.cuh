// Passes 1 and 2 over a sample's tiles: the chains, their gradients and sums.
#pragma once

#include "device/barrier.cuh"
#include "thin/backward/weight_gradient.cuh"

namespace onepass {

template <class Convolution, class Tail, class Numbers>
struct ThinGradientPasses : ThinWeightGradient<Convolution, Tail, Numbers> {
  using Base = ThinWeightGradient<Convolution, Tail, Numbers>;
  using Base::after_sums;
  using Base::Base;
  using Base::chain_sums;
  using Base::channels;
  using Base::chunk_rows;
  using Base::chunk_tiles;
  using Base::chunks;
  using Base::classes;
  using Base::classes_x;
  using Base::find;
  using Base::first_sums;
  using Base::fresh_planes;
  using Base::groups;
  using Base::half_group;
  using Base::halves;
  using Base::in_quad;
  using Base::knows_classes;
  using Base::lane;
  using Base::multiply_weights;
  using Base::p;
  using Base::quad;
  using Base::ring_of;
  using Base::ring_stride;
  using Base::row_tiles;
  using Base::rows;
  using Base::s;
  using Base::scales_of;
  using Base::second_sums;
  using Base::slides;
  using Base::spans;
  using Base::splits;
  using Base::store_weights;
  using Base::threads;
  using Base::turn_window;
  using Base::warp;
  using Base::warps;
  using typename Base::After;
  using typename Base::Before;
  using typename Base::C;
  using typename Base::Chunk;
  using typename Base::Operand;
  using typename Base::RowValues;
  using typename Base::SampleScales;
  using typename Base::Tile;

  template <bool second>
  __device__ __forceinline__ void load_rows(int64 n, const SampleScales& scales) const {
    for (int c = threadIdx.x; c < rows; c += threads) {
      if constexpr (halves) s.unscale[c] = inverse_of_power(scales.x) * inverse_of_power(s.weight_scale[c]);
      RowValues own{0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
      if (c < channels) {
        if constexpr (Tail::has_norm) {
          const int64 slab = n * groups + c / Tail::group_channels;
          own.mean = p.statistics[2 * slab];
          own.rstd = p.statistics[2 * slab + 1];
          own.gamma = Tail::weight(p, c);
          own.beta = Tail::bias(p, c);
          if constexpr (second) {
            own.scale = own.rstd * own.gamma;
            own.sum = -own.rstd * load_shared_by_blocks(p.slab_sums + 2 * slab);
            own.product = -own.rstd * load_shared_by_blocks(p.slab_sums + 2 * slab + 1);
            if constexpr (halves) {  // all that becomes of dh is linear
              own.scale *= scales.dh;
              own.sum *= scales.dh;
              own.product *= scales.dh;
            }
          }
        }
        if constexpr (Tail::has_mean) {
          constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
          const int64 index = n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride;
          own.dy = load_one<typename Tail::OutputGradient>(p.output_gradient, index) * per_element;
        }
      }
      s.row[c] = own;
    }
  }

  template <int Count>
  struct RowSums {
    float value[row_tiles][2][Count > 0 ? Count : 1] = {};
    float peak[row_tiles][2] = {};  // of |dz|, in pass 1 where operands are halves
  };

  // One element: its sums, and in pass 2 the gradient of the convolution's output. One that is not valid adds
  // nothing and has none.
  template <bool second, int Count>
  __device__ __forceinline__ float element(const RowValues& row, const float* before_values,
                                           const float* after_values, float x, float g, bool valid,
                                           int64 index, float (&sum)[Count], float& peak) const {
    x = valid ? x : 0.0f;
    g = valid ? g : 0.0f;
    typename Before::template Tensors<1> before;
    typename After::template Tensors<1> after;
    before.load(p, index);
    after.load(p, index);
    typename Before::template TensorGradients<1> before_gradients;
    typename After::template TensorGradients<1> after_gradients;
    float of_after[After::channel_operands > 0 ? After::channel_operands : 1];
    float of_before[Before::channel_operands > 0 ? Before::channel_operands : 1];
    float dh;
    if constexpr (!Tail::has_norm) {
      dh = After::gradient(x, after_values, after, 0, g, of_after, after_gradients);
#pragma unroll
      for (int i = 0; i < chain_sums; ++i) sum[i] += of_after[i];
    } else {
      const float h = Before::value(x, before_values, before, 0);
      const float xhat = (h - row.mean) * row.rstd;
      const float z = fmaf(xhat, row.gamma, row.beta);
      const float dz = After::gradient(z, after_values, after, 0, g, of_after, after_gradients);
      if constexpr (!second) {
        sum[0] += dz;
        sum[1] = fmaf(dz, xhat, sum[1]);
        if constexpr (halves) peak = fmaxf(peak, fabsf(dz));
#pragma unroll
        for (int i = 0; i < after_sums; ++i) sum[2 + i] += of_after[i];
        return 0.0f;
      }
      if constexpr (Numbers::may_read_output) sum[second_sums - 1] += valid ? xhat : 0.0f;
      const float to_chain = valid ? fmaf(xhat, row.product, fmaf(row.scale, dz, row.sum)) : 0.0f;
      dh = Before::gradient(x, before_values, before, 0, to_chain, of_before, before_gradients);
#pragma unroll
      for (int i = 0; i < chain_sums; ++i) sum[i] += of_before[i];
    }
    if constexpr (second) {
      if constexpr (Numbers::wants_bias) sum[chain_sums] += dh;
      before_gradients.store(p, index);
      after_gradients.store(p, index);
    }
    return dh;
  }

  // Pass 2 is the last to read dy: caches need not keep it, and have more room for the ring.
  template <bool second>
  __device__ __forceinline__ float load_gradient(int64 index) const {
    using Gradient = typename Tail::OutputGradient;
    if constexpr (!second) return load_one<Gradient>(p.output_gradient, index);
    if constexpr (Gradient::bytes == 4) return __ldcs(static_cast<const float*>(p.output_gradient) + index);
    const uint16 bits = __ldcs(static_cast<const uint16*>(p.output_gradient) + index);
    return load_one<Gradient>(&bits, 0);
  }

  // dy of a chunk by way of shared memory, where a warp has it to itself: its columns lie side by side in
  // memory, a row for each channel, while a lane's elements are few of each of two rows. Copies are under way
  // while the chunk before is worked on. Rows of odd channels have their halves swapped, so that lanes of two
  // channels read different banks.
  static constexpr bool stages = Numbers::stages;
  static constexpr int staged_columns = 32;
  static_assert(!stages || (row_tiles == 1 && chunk_rows == 1 && spans * 8 * classes_x == staged_columns &&
                            C::stride(4) == 1 && !Tail::has_mean && Tail::OutputGradient::bytes == 4));
  static __device__ __forceinline__ int staged_column(int channel, int column) {
    return channel * staged_columns + (column ^ (channel % 2 * 16));
  }

  __device__ __forceinline__ void stage(const Tile& tile, int item, int buffer) const {
    const int first_class = item / chunks * classes_x;
    const Chunk chunk = find(tile, item % chunks, ThinClass<C>(first_class));
    const int column = chunk.first_cell * classes_x + lane;
    const bool valid = chunk.has_row(0) && column < static_cast<int>(C::output_size(2));
    const float* from = static_cast<const float*>(p.output_gradient);
    if (valid) {
      from += tile.n * C::stride(0) + (chunk.q[0] * static_cast<int>(C::stride(2)) +
                                       chunk.q[1] * static_cast<int>(C::stride(3)) + column);
    }
    float* to = s.passes.staged[warp][buffer];
    const uint32 even = barrier::shared_address(to + staged_column(0, lane));
    const uint32 odd = barrier::shared_address(to + staged_column(1, lane));
#pragma unroll
    for (int c = 0; c < channels; ++c) {
      copy_word((c % 2 == 0 ? even : odd) + c / 2 * (2 * staged_columns * 4), from + c * C::stride(1), valid);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Four bytes, or zeros.
  static __device__ __forceinline__ void copy_word(uint32 to, const float* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
  }

  __device__ __forceinline__ void read_staged(const float* staged,
                                              float (&g)[classes_x][chunk_tiles][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < chunk_tiles; ++t) {
        struct alignas(8 * classes_x <= 16 ? 8 * classes_x : 16) Run {
          float of[2 * classes_x];
        };
        const Run run = *reinterpret_cast<const Run*>(
            staged + staged_column(half * 8 + quad, (t * 8 + 2 * in_quad) * classes_x));
#pragma unroll
        for (int i = 0; i < 2 * classes_x; ++i) g[i % classes_x][t][half * 2 + i / classes_x] = run.of[i];
      }
    }
  }

  // `whole`: all positions of the chunk are in the output.
  template <bool second, bool whole, int row_tile, class Sums>
  __device__ __forceinline__ void take(const Tile& tile, int first_class, const Chunk& chunk,
                                       const float* staged, Sums& sums) const {
    constexpr int further = static_cast<int>(C::stride(4));
    const int64 output = tile.n * C::stride(0) + (row_tile * 16 + quad) * C::stride(1) +
                         chunk.q[0] * C::stride(2) + chunk.q[1] * C::stride(3) +
                         chunk.cell * (classes_x * C::stride(4));
    // Many rows are one block of code where nothing is loaded or stored beside them.
    constexpr bool masks = (chunk_rows > 1 || halves) && !Numbers::has_tensors;
    // Tile `t` of the chunk is span t % spans of row t / spans.
    const auto is_valid = [&](int x, int t, int k) {
      return whole || ((chunk_rows == 1 || chunk.has_row(t / spans)) &&
                       chunk.cell + t % spans * 8 + k < static_cast<int>(C::positions(2, x)));
    };
    const auto is_channel = [&](int half) {
      return channels % 16 == 0 || row_tile * 16 + half * 8 + quad < channels;
    };
    const auto offset = [&](int half, int x, int t, int k) {
      return half * 8 * static_cast<int>(C::stride(1)) +
             t / spans * static_cast<int>(C::classes(1) * C::stride(3)) +
             ((t % spans * 8 + k) * classes_x + x) * further;
    };
    float g[classes_x][chunk_tiles][4];
    if constexpr (!Tail::has_mean && !stages) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int x = 0; x < classes_x; ++x) {
              g[x][t][half * 2 + k] = is_valid(x, t, k) && is_channel(half)
                                          ? load_gradient<second>(output + offset(half, x, t, k))
                                          : 0.0f;
            }
          }
        }
      }
    }
    float h[classes_x][chunk_tiles][4];
    if constexpr (knows_classes) {
      this->template convolve_classes<row_tile>(first_class, chunk.window, h);
    } else {
#pragma unroll
      for (int x = 0; x < classes_x; ++x)
        this->template convolve_class<row_tile>(s.of_class[first_class + x], chunk.window, h[x]);
    }
    if constexpr (stages) read_staged(staged, g);
    Operand* to_ring = nullptr;
    if constexpr (second && Numbers::wants_input) {
      to_ring = tile.ring + (chunk.q[0] * ring_stride(0) + chunk.q[1] * ring_stride(1) +
                             chunk.cell * classes_x * rows + row_tile * 16 + (halves ? 2 * quad : quad));
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
      const int c = row_tile * 16 + half * 8 + quad;
      row[half] = s.row[c];
      Before::load_channel(p, tile.n, is_channel(half) ? c : 0, before_values[half]);
      After::load_channel(p, tile.n, is_channel(half) ? c : 0, after_values[half]);
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
            value = element<second>(row[half], before_values[half], after_values[half], value,
                                    Tail::has_mean ? row[half].dy : g[x][t][i], !masks || valid,
                                    output + offset(half, x, t, k), sums.value[row_tile][half],
                                    sums.peak[row_tile][half]);
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
          // Of channel `quad` and of the one 8 behind it.
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
            uint4& to = s.passes.half_dh[half_group(first_class + x, row_tile, flat / 16)][lane];
            reinterpret_cast<uint2*>(&to)[flat / 8 % 2] = uint2{own, other};
          }
        }
      }
    } else if constexpr (second && Numbers::wants_weight) {
#pragma unroll
      for (int x = 0; x < classes_x; ++x) {
        float* to = &s.passes.dh[first_class + x][row_tile * 8 + quad][(chunk.flat + 2 * in_quad) * 2];
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t)
          *reinterpret_cast<float4*>(to + (t / spans * Numbers::tile(2) + t % spans * 8) * 2) =
              float4{h[x][t][0], h[x][t][2], h[x][t][1], h[x][t][3]};
      }
    }
  }

  // Rows that are not in the output add nothing to dweight.
  __device__ __forceinline__ void clear_gradients(int first_class, const Chunk& chunk) const {
#pragma unroll 1
    for (int i = 0; i < classes_x * chunk_tiles * row_tiles; ++i) {
      const int row_tile = i % row_tiles;
      const int t = i / row_tiles % chunk_tiles;
      const int x = i / (row_tiles * chunk_tiles);
      const int flat = chunk.flat + t / spans * Numbers::tile(2) + t % spans * 8 + (halves ? 0 : 2 * in_quad);
      if constexpr (halves) {
        uint4& to = s.passes.half_dh[half_group(first_class + x, row_tile, flat / 16)][lane];
        reinterpret_cast<uint2*>(&to)[flat / 8 % 2] = uint2{0u, 0u};
        continue;
      }
      *reinterpret_cast<float4*>(&s.passes.dh[first_class + x][row_tile * 8 + quad][flat * 2]) =
          float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }

  static constexpr int items_of_tile = chunks * (classes / classes_x);

  // Where dy is staged, its first item is under way; so is that of the tile with index `next` behind it,
  // unless that is negative.
  template <bool second, class Sums>
  __device__ __forceinline__ void tile_of(const Tile& tile, int next, int& buffer, Sums& sums) const {
#pragma unroll 1
    for (int item = warp; item < items_of_tile; item += warps) {
      const float* staged = nullptr;
      if constexpr (stages) {
        staged = s.passes.staged[warp][buffer];
        buffer ^= 1;
        __syncwarp();  // all lanes have read what comes next from the other buffer
        if (item + warps < items_of_tile) {
          stage(tile, item + warps, buffer);
        } else if (next >= 0) {
          stage(Tile(tile.n, tile.ring, next), warp, buffer);
        } else {
          asm volatile("cp.async.commit_group;" ::: "memory");
        }
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
      }
      const int first_class = item / chunks * classes_x;
      const Chunk chunk = find(tile, item % chunks, ThinClass<C>(first_class));
      if (!chunk.has_row(0)) {
        if constexpr (second && Numbers::wants_weight) clear_gradients(first_class, chunk);
        continue;
      }
      if (chunk_rows > 1 && chunk.is_whole()) {
        take_rows<second, true>(tile, first_class, chunk, staged, sums);
      } else {
        take_rows<second, false>(tile, first_class, chunk, staged, sums);
      }
    }
  }

  template <bool second, bool whole, class Sums>
  __device__ __forceinline__ void take_rows(const Tile& tile, int first_class, const Chunk& chunk,
                                            const float* staged, Sums& sums) const {
    take<second, whole, 0>(tile, first_class, chunk, staged, sums);
    if constexpr (row_tiles > 1) take<second, whole, 1>(tile, first_class, chunk, staged, sums);
    if constexpr (row_tiles > 2) take<second, whole, 2>(tile, first_class, chunk, staged, sums);
    if constexpr (row_tiles > 3) take<second, whole, 3>(tile, first_class, chunk, staged, sums);
  }

  template <int Count, class Sums>
  __device__ __forceinline__ void store_sums(Sums& sums, float* to) const {
    if constexpr (Count > 0) {
#pragma unroll
      for (int i = 0; i < row_tiles * 2; ++i) {
#pragma unroll
        for (int k = 0; k < Count; ++k) {
          const float sum = lanes_sum<4>(sums.value[i / 2][i % 2][k]);
          if (in_quad == 0) s.passes.sum[warp][i * 8 + quad][k] = sum;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < channels * Count; i += threads) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += s.passes.sum[w][i / Count][i % Count];
        to[i] = total;
      }
    }
  }

  // The largest |rstd gamma dz|, for all blocks of the sample.
  template <class Sums>
  __device__ __forceinline__ void leave_peak(int64 n, const Sums& sums) const {
    uint32 most = 0;
#pragma unroll
    for (int i = 0; i < row_tiles * 2; ++i) {
      const RowValues& row = s.row[i * 8 + quad];
      const uint32 own = finite_magnitude(sums.peak[i / 2][i % 2] * row.rstd * row.gamma);
      most = most > own ? most : own;
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) atomicMax(p.peaks + n, most);
  }

  template <bool second>
  __device__ __forceinline__ void pass(int64 n, int segment) const {
    constexpr int count = second ? second_sums : first_sums;
    RowSums<count> sums;
    __syncthreads();  // the one before is done with shared memory
    const SampleScales scales = scales_of(n, second);
    load_rows<second>(n, scales);
    if constexpr (second && Numbers::wants_weight) {
      for (int i = threadIdx.x; i < Numbers::units * 32; i += threads)
        s.passes.weight[i / 32][i % 32] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    const int first = segment * Numbers::segment_tiles;
    const int last = (segment + 1) * Numbers::segment_tiles < Numbers::all_tiles
                         ? (segment + 1) * Numbers::segment_tiles
                         : Numbers::all_tiles;
    int buffer = 0;
    Operand* ring = second && Numbers::wants_input ? ring_of(n) : nullptr;
    if constexpr (stages) {
      if (warp < items_of_tile) stage(Tile(n, ring, first), warp, buffer);
    }
#pragma unroll 1
    for (int index = first; index < last; ++index) {
      const Tile tile(n, ring, index);
      turn_window(tile.turn());
      if (slides && index > first && tile.origin[0] > 0) {
        this->template load_window <
            fresh_planes<Numbers::window(0) ? fresh_planes : Numbers::window(0)>(tile, scales.x);
      } else {
        this->template load_window<Numbers::window(0)>(tile, scales.x);
      }
      __syncthreads();
      tile_of<second>(tile, index + 1 < last ? index + 1 : -1, buffer, sums);
      __syncthreads();
      if constexpr (second && Numbers::wants_weight) {
        multiply_weights();
        __syncthreads();
      }
    }
    const int64 ticket = n * Numbers::segments + segment;
    if constexpr (halves) {
      if constexpr (!second) {
        leave_peak(n, sums);
      } else if constexpr (Numbers::wants_bias) {
#pragma unroll
        for (int i = 0; i < row_tiles * 2; ++i)
          sums.value[i / 2][i % 2][chain_sums] *= inverse_of_power(scales.dh);
      }
    }
    store_sums<count>(sums, (second ? p.second_parts : p.first_parts) + ticket * channels * count);
    if constexpr (second && Numbers::wants_weight) store_weights(n, segment, scales);
  }
};

}  // namespace onepass
