// Pass 3: dx from planes of dh.
#pragma once

#include "thin/backward/planes.cuh"

namespace onepass {

// Which inputs and outputs meet, by which tap.
template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Geometry {
  static constexpr __device__ int floor_divide(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
  static constexpr __device__ int stride(int d) { return Numbers::conv_stride(d); }
  static constexpr __device__ int padding(int d) { return Numbers::conv_padding(d); }
  static constexpr __device__ int dilation(int d) { return Numbers::conv_dilation(d); }
  static constexpr __device__ int reach(int d) { return (static_cast<int>(C::kernel(d)) - 1) * dilation(d); }
  // Input i and output q meet by tap k where the finer of the two is the coarser times the stride, less the
  // padding, plus k times the dilation. The first and last output that input `i` may meet.
  static __device__ __forceinline__ int first_met(int d, int i) {
    return C::transposed ? i * stride(d) - padding(d)
                         : floor_divide(i + padding(d) - reach(d) + stride(d) - 1, stride(d));
  }
  static __device__ __forceinline__ int last_met(int d, int i) {
    return C::transposed ? i * stride(d) - padding(d) + reach(d) : floor_divide(i + padding(d), stride(d));
  }
  // The output that it meets by tap `k`; -1 where there is none.
  static __device__ __forceinline__ int met(int d, int i, int k) {
    int q;
    if constexpr (C::transposed) {
      q = i * stride(d) - padding(d) + k * dilation(d);
    } else {
      const int distance = i + padding(d) - k * dilation(d);
      if (distance < 0 || (stride(d) > 1 && distance % stride(d) != 0)) return -1;
      q = distance / stride(d);
    }
    return q < static_cast<int>(C::output_size(d)) ? q : -1;
  }
  // The first input plane that output plane `q` may meet, and the tap by which it meets plane `i`; -1: none.
  static __device__ __forceinline__ int first_plane(int q) {
    return C::transposed ? floor_divide(q + padding(0) - reach(0) + stride(0) - 1, stride(0))
                         : q * stride(0) - padding(0);
  }
  static __device__ __forceinline__ int plane_tap(int q, int i) {
    const int distance = C::transposed ? q + padding(0) - i * stride(0) : i - q * stride(0) + padding(0);
    if (distance < 0 || distance > reach(0) || (dilation(0) > 1 && distance % dilation(0) != 0)) return -1;
    return distance / dilation(0);
  }
};

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::InputGradient {
  const Thread thread;
  const Planes planes{{thread.p, thread.s}};

  static constexpr int live = Numbers::back_live;
  static constexpr int back_at_once = Numbers::back_spans_at_once;
  static constexpr int row_chunks = (Numbers::back_spans + back_at_once - 1) / back_at_once;
  static constexpr int back_columns = Numbers::back_columns;
  static constexpr int back_pitch = Numbers::back_pitch;  // of a position, in floats

  // Each warp has a row of dx: it waits for planes of dh and for no other warp.
  static constexpr bool row_per_warp = Planes::copies_whole && Numbers::row_per_warp;
  static_assert(!row_per_warp || (row_chunks == 1 && column_tiles == 1 && Numbers::back_buffers > 1));

  static __device__ __forceinline__ void sync_products() {
    if constexpr (row_per_warp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // A warp's part of pass 3: a row of dx, 16 rows of D and some columns of dh. It has sums of all `live`
  // planes of dx that a plane of dh meets.
  using PlaneSums = ProductSums<splits, back_at_once>;
  struct BackItem {
    int row, tile, chunk;
  };

  // `regular`: plane i of dx meets the plane of dh by tap i, counted from the last if transposed.
  static constexpr bool may_be_regular = Numbers::conv_stride(0) == 1 && Numbers::conv_dilation(0) == 1;

  template <bool regular>
  __device__ __forceinline__ void multiply_back(PlaneSums (&sums)[live], const BackItem& item, int buffer,
                                                int q0, int plane, int first, int last, int i1,
                                                int first_row) const {
    int tap[live];
#pragma unroll
    for (int i = 0; i < live; ++i) {
      const bool wanted = plane + i >= first && plane + i < last;
      tap[i] = regular  ? (C::transposed ? live - 1 - i : i)
               : wanted ? Geometry::plane_tap(q0, plane + i)
                        : -1;
    }
    const Operand* of_lane = thread.s.back_window.ring[buffer] +
                             (item.chunk * back_at_once * 8 + thread.quad) * back_pitch + thread.in_quad * 4;
#pragma unroll(regular&& halves&& C::kernel(1) <= 4 ? 4 : 1)
    for (int k1 = 0; k1 < static_cast<int>(C::kernel(1)); ++k1) {
      const int q1 = Geometry::met(1, i1, k1);
      if (q1 < 0) continue;
      const Operand* row = of_lane + (q1 - first_row) * (back_columns * back_pitch);
#pragma unroll
      for (int k = 0; k < row_tiles; ++k) {
        if constexpr (halves) {
          uint2 dh[back_at_once];
#pragma unroll
          for (int i = 0; i < back_at_once; ++i)
            dh[i] = *reinterpret_cast<const uint2*>(row + i * 8 * back_pitch + k * 16);
#pragma unroll
          for (int i = 0; i < live; ++i) {
            if (tap[i] < 0) continue;
            const int step = (tap[i] * static_cast<int>(C::kernel(1)) + k1) * row_tiles + k;
            const uint4 a = thread.s.back[0][step * column_tiles + item.tile][thread.lane];
#pragma unroll
            for (int j = 0; j < back_at_once; ++j)
              mma::multiply<mma::F16>(sums[i].total[j], a, dh[j].x, dh[j].y);
          }
        } else {
          float4 dh[back_at_once];
#pragma unroll
          for (int i = 0; i < back_at_once; ++i)
            dh[i] = *reinterpret_cast<const float4*>(row + i * 8 * back_pitch + k * 16);
#pragma unroll
          for (int i = 0; i < live; ++i) {
            if (tap[i] < 0) continue;
            const int step = ((tap[i] * static_cast<int>(C::kernel(1)) + k1) * row_tiles + k) * 2;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              uint4 a[parts];
#pragma unroll
              for (int part = 0; part < parts; ++part)
                a[part] = thread.s.back[part][(step + half) * column_tiles + item.tile][thread.lane];
              float b[back_at_once][2];
#pragma unroll
              for (int j = 0; j < back_at_once; ++j) {
                b[j][0] = half == 0 ? dh[j].x : dh[j].z;
                b[j][1] = half == 0 ? dh[j].y : dh[j].w;
              }
              sums[i].add(a, b);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void put_products(PlaneSums& sums, const BackItem& item, int buffer) const {
    sums.finish();
    const int row = item.tile * 16 + thread.quad;
#pragma unroll
    for (int i = 0; i < back_at_once; ++i) {
      if (item.chunk * back_at_once + i >= Numbers::back_spans) break;
      const int column = (item.chunk * back_at_once + i) * 8 + 2 * thread.in_quad;
      auto& to = thread.s.back_window.product[buffer][item.row];
      if (row < column_rows)
        *reinterpret_cast<float2*>(&to[row][column]) = float2{sums.total[i][0], sums.total[i][1]};
      if (row + 8 < column_rows)
        *reinterpret_cast<float2*>(&to[row + 8][column]) = float2{sums.total[i][2], sums.total[i][3]};
    }
  }

  // Stores a plane of dx: sums over the last tap of the products. A warp has some rows of some channels, its
  // lanes are columns.
  __device__ __forceinline__ void store_plane(int64 n, int plane, int buffer, int y, int x, int first_column,
                                              float dh_scale) const {
    constexpr int tile_1 = Numbers::back_tile(1);
    constexpr int tile_2 = Numbers::back_tile(2);
#pragma unroll 1
    for (int column = thread.lane; column < tile_2; column += 32) {
      const int i2 = x + column;
      if (i2 >= static_cast<int>(C::input_size(2))) break;
      int from[column_taps];
#pragma unroll
      for (int k = 0; k < column_taps; ++k) {
        const int q = Geometry::met(2, i2, k);
        from[k] = q >= 0 ? k * Numbers::product_pitch + q - first_column : -1;
      }
      const int64 to = n * Numbers::gradient_stride(0) + plane * Numbers::gradient_stride(2) +
                       y * Numbers::gradient_stride(3) + i2 * Numbers::gradient_stride(4);
      const auto store = [&](int row, int c) {
        const float* products_of = thread.s.back_window.product[buffer][row][c * column_taps];
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < column_taps; ++k) sum += from[k] >= 0 ? products_of[from[k]] : 0.0f;
        if constexpr (halves) sum = sum * inverse_of_power(dh_scale) * inverse_of_power(thread.s.back_scale);
        store_one<typename Tail::InputGradient>(
            thread.p.input_gradient, to + c * Numbers::gradient_stride(1) + row * Numbers::gradient_stride(3),
            sum);
      };
      if constexpr (row_per_warp || (tile_1 * 2 >= warps && C::in_channels <= 4)) {
#pragma unroll 1
        for (int row = thread.warp; row < tile_1 && y + row < static_cast<int>(C::input_size(1));
             row += warps) {
#pragma unroll(C::in_channels <= 4 ? C::in_channels : 2)
          for (int c = 0; c < C::in_channels; ++c) store(row, c);
        }
      } else {
#pragma unroll 2
        for (int i = thread.warp; i < tile_1 * C::in_channels; i += warps) {
          if (y + i / C::in_channels >= static_cast<int>(C::input_size(1))) break;
          store(i / C::in_channels, i % C::in_channels);
        }
      }
    }
  }

  // `planes_before`: planes that the block has loaded before; this adds its own.
  __device__ __forceinline__ void back(int64 n, int index, uint32& planes_before) const {
    constexpr int buffers = Numbers::back_buffers;
    const int x = index % Numbers::back_tiles(2) * Numbers::back_tile(2);
    const int y = index / Numbers::back_tiles(2) % Numbers::back_tiles(1) * Numbers::back_tile(1);
    const int z = index / (Numbers::back_tiles(2) * Numbers::back_tiles(1)) * Numbers::back_tile(0);
    const int last_z = z + Numbers::back_tile(0) < static_cast<int>(C::input_size(0))
                           ? z + Numbers::back_tile(0)
                           : static_cast<int>(C::input_size(0));
    const int first_row = Geometry::first_met(1, y);
    int first_column = back_columns == C::output_size(2) ? 0 : Geometry::first_met(2, x);
    first_column = first_column > 0 ? first_column : 0;
    int q_begin = Geometry::first_met(0, z);
    q_begin = q_begin > 0 ? q_begin : 0;
    int q_end = Geometry::last_met(0, last_z - 1) + 1;
    q_end = q_end < static_cast<int>(C::output_size(0)) ? q_end : static_cast<int>(C::output_size(0));
    const Operand* sample = ring_of(thread.p, n);
    const BackItem item{thread.warp / (row_chunks * column_tiles), thread.warp % column_tiles,
                        thread.warp / column_tiles % row_chunks};
    const bool active = item.row < Numbers::back_tile(1) && y + item.row < static_cast<int>(C::input_size(1));
    PlaneSums sums[live];
    planes.release_to_copies();
    __syncthreads();  // shared memory is free
    const float dh_scale = scales_of(thread.p, n, true).dh;
    const auto turn_of = [&](int q) { return planes_before + static_cast<uint32>(q - q_begin); };
    const int ahead = row_per_warp ? buffers : 1;  // planes that are loaded first
    for (int q = q_begin; q < q_end && q < q_begin + ahead; ++q)
      planes.load(sample, q, planes.buffer_of(turn_of(q)), first_row, first_column);
    int plane = q_begin < q_end ? Geometry::first_plane(q_begin) : z;  // of sums[0]
    int unstored = -1;  // plane whose products are in shared memory
    const auto store_products = [&] {
      if (unstored >= 0) store_plane(n, unstored, unstored % 2, y, x, first_column, dh_scale);
      unstored = -1;
    };
#pragma unroll 1
    for (int q = q_begin; q < q_end || plane < last_z; ++q) {
      if (q < q_end) {
        const int buffer = planes.buffer_of(turn_of(q));
        planes.wait(turn_of(q));
        if constexpr (row_per_warp) {
          __syncwarp();
          if (q > q_begin && q + buffers - 1 < q_end)
            planes.replace(sample, q + buffers - 1, turn_of(q + buffers - 1), first_row, first_column);
        } else {
          planes.release_to_copies();
          __syncthreads();  // the plane is there, and the next one's buffer is free
          if (buffers > 1 && q + 1 < q_end)
            planes.load(sample, q + 1, planes.buffer_of(turn_of(q + 1)), first_row, first_column);
        }
        store_products();
        if (active) {
          if (may_be_regular && plane >= z && plane + live <= last_z) {
            multiply_back<may_be_regular>(sums, item, buffer, q, plane, z, last_z, y + item.row, first_row);
          } else {
            multiply_back<false>(sums, item, buffer, q, plane, z, last_z, y + item.row, first_row);
          }
        }
        if constexpr (row_per_warp) planes.release(turn_of(q));
        if (buffers == 1 && q + 1 < q_end) {
          planes.release_to_copies();
          __syncthreads();
          planes.load(sample, q + 1, 0, first_row, first_column);
        }
      }
      int next = q + 1 < q_end ? Geometry::first_plane(q + 1) : last_z;
      next = next < last_z ? next : last_z;
#pragma unroll 1
      for (; plane < next; ++plane) {
        if (plane >= z) {
          if (unstored >= 0) {
            sync_products();
            store_products();
          }
          if (active) put_products(sums[0], item, plane % 2);
          unstored = plane;
        }
#pragma unroll
        for (int i = 0; i + 1 < live; ++i) sums[i] = sums[i + 1];
        sums[live - 1] = PlaneSums{};
      }
    }
    sync_products();
    store_products();
    if (q_begin < q_end) planes_before += static_cast<uint32>(q_end - q_begin);
  }
};

}  // namespace onepass
