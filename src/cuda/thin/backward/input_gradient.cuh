// Pass 3: dx from planes of dh.
#pragma once

#include "device/barrier.cuh"
#include "thin/backward/layout.cuh"

namespace onepass {

template <class Convolution, class Tail, class Numbers>
struct ThinInputGradient : ThinGradients<Convolution, Tail, Numbers> {
  using Base = ThinGradients<Convolution, Tail, Numbers>;
  using Base::Base;
  using Base::column_rows;
  using Base::column_taps;
  using Base::column_tiles;
  using Base::halves;
  using Base::in_quad;
  using Base::lane;
  using Base::p;
  using Base::parts;
  using Base::quad;
  using Base::ring_of;
  using Base::ring_stride;
  using Base::row_tiles;
  using Base::rows;
  using Base::s;
  using Base::scales_of;
  using Base::splits;
  using Base::threads;
  using Base::warp;
  using Base::warps;
  using typename Base::C;
  using typename Base::Operand;

  static constexpr __device__ int floor_divide(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
  static constexpr __device__ int stride(int d) { return Numbers::conv_stride(d); }
  static constexpr __device__ int padding(int d) { return Numbers::conv_padding(d); }
  static constexpr __device__ int dilation(int d) { return Numbers::conv_dilation(d); }
  static constexpr __device__ int reach(int d) { return (static_cast<int>(C::kernel(d)) - 1) * dilation(d); }
  // Input i and output q meet by tap k where the finer of the two is the coarser times the stride, less the
  // padding, plus k times the dilation. The first and last output that input `i` may meet:
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
  // The first input plane that output plane `q` may meet, and the tap by which it meets plane `i`, -1 if
  // none.
  static __device__ __forceinline__ int first_plane(int q) {
    return C::transposed ? floor_divide(q + padding(0) - reach(0) + stride(0) - 1, stride(0))
                         : q * stride(0) - padding(0);
  }
  static __device__ __forceinline__ int plane_tap(int q, int i) {
    const int distance = C::transposed ? q + padding(0) - i * stride(0) : i - q * stride(0) + padding(0);
    if (distance < 0 || distance > reach(0) || (dilation(0) > 1 && distance % dilation(0) != 0)) return -1;
    return distance / dilation(0);
  }

  // Rows of the ring that a plane of the tile meets, from the first one that exists.
  static constexpr int live = Numbers::back_live;
  static constexpr int back_at_once = Numbers::back_spans_at_once;
  static constexpr int row_chunks = (Numbers::back_spans + back_at_once - 1) / back_at_once;
  static constexpr int back_columns = Numbers::back_columns;
  static constexpr int back_pitch = Numbers::back_pitch;  // of a position, in floats

  // Whether the rows of a plane are one piece of memory that a single bulk copy brings.
#if __CUDA_ARCH__ >= 900
  static constexpr bool copies_whole = back_columns == C::output_size(2) && back_pitch == rows;
#else
  static constexpr bool copies_whole = false;
#endif

  __device__ __forceinline__ void load_plane(const Operand* sample, int plane, int buffer, int first_row,
                                             int first_column) const {
    constexpr int in_vector = 16 / sizeof(Operand);
    constexpr int vectors = back_columns * rows / in_vector;
    const int begin = first_row > 0 ? first_row : 0;
    int end = first_row + Numbers::back_window(1);
    end = end < static_cast<int>(C::output_size(1)) ? end : static_cast<int>(C::output_size(1));
    const Operand* from = sample + plane * ring_stride(0) + begin * ring_stride(1) + first_column * rows;
    Operand* to = s.back_window.ring[buffer] + (begin - first_row) * (back_columns * back_pitch);
    const int all = (end - begin) * vectors;
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) {
      if (threadIdx.x == 0) {
        barrier::acquire_for_copies();
        barrier::expect(s.arrived + buffer, all * 16);
        barrier::copy(to, from, all * 16, s.arrived + buffer);
      }
      return;
    }
#endif
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += threads) {
      const int row = i / vectors;
      const int column = i % vectors / (rows / in_vector);
      const int o = i % (rows / in_vector) * in_vector;
      if (first_column + column >= static_cast<int>(C::output_size(2))) continue;
      const Operand* source = from + row * ring_stride(1) + column * rows + o;
      Operand* target = to + (row * back_columns + column) * back_pitch + o;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       static_cast<uint32>(__cvta_generic_to_shared(target))),
                   "l"(source)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Planes are counted from the block's first one on: plane `turn` lies in a buffer for the so-manieth time.
  static __device__ __forceinline__ int buffer_of(uint32 turn) {
    return static_cast<int>(turn % static_cast<uint32>(Numbers::back_buffers));
  }
  static __device__ __forceinline__ uint32 phase_of(uint32 turn) {
    return turn / static_cast<uint32>(Numbers::back_buffers) & 1u;
  }

  // Until the plane is there, for this thread's eyes or, where threads copied, for its own part.
  __device__ __forceinline__ void wait_for_plane(uint32 turn) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) {
      barrier::wait(s.arrived + buffer_of(turn), phase_of(turn));
      return;
    }
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // Where a warp has a row of dx to itself, it waits for planes of dh and for no other warp.
  static constexpr bool alone = copies_whole && Numbers::alone;
  static_assert(!alone || (row_chunks == 1 && column_tiles == 1 && Numbers::back_buffers > 1));

  // By the first thread: asks for plane `turn` when all warps are done with the one before it in its buffer.
  __device__ __forceinline__ void replace_plane(const Operand* sample, int plane, uint32 turn, int first_row,
                                                int first_column) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0) return;
    const uint32 before = turn - static_cast<uint32>(Numbers::back_buffers);
    barrier::wait(s.released + buffer_of(before), phase_of(before));
    load_plane(sample, plane, buffer_of(turn), first_row, first_column);
#endif
  }
  __device__ __forceinline__ void release_plane(uint32 turn) const {
#if __CUDA_ARCH__ >= 900
    barrier::release_to_copies();
    barrier::arrive(s.released + buffer_of(turn));
#endif
  }
  static __device__ __forceinline__ void meet_readers_of_products() {
    if constexpr (alone) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // What this thread has read or written of shared memory may be overwritten by copies behind the next
  // barrier.
  static __device__ __forceinline__ void release_to_planes() {
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) barrier::release_to_copies();
#endif
  }

  // A warp's part of pass 3: a row of dx, 16 rows of D and some columns of dh, for all `live` planes of dx
  // that a plane of dh meets.
  using PlaneSums = ProductSums<splits, back_at_once>;
  struct BackItem {
    int row, tile, chunk;
  };

  // `regular`: plane i meets it by tap i, or by the last but i where the convolution is transposed.
  static constexpr bool may_be_regular = Numbers::conv_stride(0) == 1 && Numbers::conv_dilation(0) == 1;

  template <bool regular>
  __device__ __forceinline__ void multiply_back(PlaneSums (&sums)[live], const BackItem& item, int buffer,
                                                int q0, int plane, int first, int last, int i1,
                                                int first_row) const {
    int tap[live];
#pragma unroll
    for (int i = 0; i < live; ++i) {
      const bool wanted = plane + i >= first && plane + i < last;
      tap[i] = regular ? (C::transposed ? live - 1 - i : i) : wanted ? plane_tap(q0, plane + i) : -1;
    }
    const Operand* of_lane =
        s.back_window.ring[buffer] + (item.chunk * back_at_once * 8 + quad) * back_pitch + in_quad * 4;
#pragma unroll(regular&& halves&& C::kernel(1) <= 4 ? 4 : 1)
    for (int k1 = 0; k1 < static_cast<int>(C::kernel(1)); ++k1) {
      const int q1 = met(1, i1, k1);
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
            const uint4 a = s.back[0][step * column_tiles + item.tile][lane];
#pragma unroll
            for (int j = 0; j < back_at_once; ++j) multiply_halves(sums[i].total[j], a, dh[j].x, dh[j].y);
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
                a[part] = s.back[part][(step + half) * column_tiles + item.tile][lane];
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
    const int row = item.tile * 16 + quad;
#pragma unroll
    for (int i = 0; i < back_at_once; ++i) {
      if (item.chunk * back_at_once + i >= Numbers::back_spans) break;
      const int column = (item.chunk * back_at_once + i) * 8 + 2 * in_quad;
      auto& to = s.back_window.product[buffer][item.row];
      if (row < column_rows)
        *reinterpret_cast<float2*>(&to[row][column]) = float2{sums.total[i][0], sums.total[i][1]};
      if (row + 8 < column_rows)
        *reinterpret_cast<float2*>(&to[row + 8][column]) = float2{sums.total[i][2], sums.total[i][3]};
    }
  }

  // A plane of the tile: products of the last taps added where they belong. A warp has some rows of some
  // channels, its lanes are columns.
  __device__ __forceinline__ void store_plane(int64 n, int plane, int buffer, int y, int x, int first_column,
                                              float dh_scale) const {
    constexpr int tile_1 = Numbers::back_tile(1);
    constexpr int tile_2 = Numbers::back_tile(2);
#pragma unroll 1
    for (int column = lane; column < tile_2; column += 32) {
      const int i2 = x + column;
      if (i2 >= static_cast<int>(C::input_size(2))) break;
      int from[column_taps];
#pragma unroll
      for (int k = 0; k < column_taps; ++k) {
        const int q = met(2, i2, k);
        from[k] = q >= 0 ? k * Numbers::product_pitch + q - first_column : -1;
      }
      const int64 to = n * Numbers::gradient_stride(0) + plane * Numbers::gradient_stride(2) +
                       y * Numbers::gradient_stride(3) + i2 * Numbers::gradient_stride(4);
      const auto store = [&](int row, int c) {
        const float* products_of = s.back_window.product[buffer][row][c * column_taps];
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < column_taps; ++k) sum += from[k] >= 0 ? products_of[from[k]] : 0.0f;
        if constexpr (halves) sum = sum * inverse_of_power(dh_scale) * inverse_of_power(s.back_scale);
        store_one<typename Tail::InputGradient>(
            p.input_gradient, to + c * Numbers::gradient_stride(1) + row * Numbers::gradient_stride(3), sum);
      };
      if constexpr (alone || (tile_1 * 2 >= warps && C::in_channels <= 4)) {
#pragma unroll 1
        for (int row = warp; row < tile_1 && y + row < static_cast<int>(C::input_size(1)); row += warps) {
#pragma unroll(C::in_channels <= 4 ? C::in_channels : 2)
          for (int c = 0; c < C::in_channels; ++c) store(row, c);
        }
      } else {
#pragma unroll 2
        for (int i = warp; i < tile_1 * C::in_channels; i += warps) {
          if (y + i / C::in_channels >= static_cast<int>(C::input_size(1))) break;
          store(i / C::in_channels, i % C::in_channels);
        }
      }
    }
  }

  // `turns`: planes that the block has had before, which this adds to.
  __device__ __forceinline__ void back(int64 n, int index, uint32& turns) const {
    constexpr int buffers = Numbers::back_buffers;
    const int x = index % Numbers::back_tiles(2) * Numbers::back_tile(2);
    const int y = index / Numbers::back_tiles(2) % Numbers::back_tiles(1) * Numbers::back_tile(1);
    const int z = index / (Numbers::back_tiles(2) * Numbers::back_tiles(1)) * Numbers::back_tile(0);
    const int last_z = z + Numbers::back_tile(0) < static_cast<int>(C::input_size(0))
                           ? z + Numbers::back_tile(0)
                           : static_cast<int>(C::input_size(0));
    const int first_row = first_met(1, y);
    int first_column = back_columns == C::output_size(2) ? 0 : first_met(2, x);
    first_column = first_column > 0 ? first_column : 0;
    int q_begin = first_met(0, z);
    q_begin = q_begin > 0 ? q_begin : 0;
    int q_end = last_met(0, last_z - 1) + 1;
    q_end = q_end < static_cast<int>(C::output_size(0)) ? q_end : static_cast<int>(C::output_size(0));
    const Operand* sample = ring_of(n);
    const BackItem item{warp / (row_chunks * column_tiles), warp % column_tiles,
                        warp / column_tiles % row_chunks};
    const bool active = item.row < Numbers::back_tile(1) && y + item.row < static_cast<int>(C::input_size(1));
    PlaneSums sums[live];
    release_to_planes();
    __syncthreads();  // the one before is done with shared memory
    const float dh_scale = scales_of(n, true).dh;
    const auto turn_of = [&](int q) { return turns + static_cast<uint32>(q - q_begin); };
    const int ahead = alone ? buffers : 1;  // planes that are asked for at first
    for (int q = q_begin; q < q_end && q < q_begin + ahead; ++q)
      load_plane(sample, q, buffer_of(turn_of(q)), first_row, first_column);
    int plane = q_begin < q_end ? first_plane(q_begin) : z;  // of sums[0]
    int waiting = -1;                                        // the plane whose products wait in shared memory
    const auto store_waiting = [&] {
      if (waiting >= 0) store_plane(n, waiting, waiting % 2, y, x, first_column, dh_scale);
      waiting = -1;
    };
#pragma unroll 1
    for (int q = q_begin; q < q_end || plane < last_z; ++q) {
      if (q < q_end) {
        const int buffer = buffer_of(turn_of(q));
        wait_for_plane(turn_of(q));
        if constexpr (alone) {
          __syncwarp();
          if (q > q_begin && q + buffers - 1 < q_end)
            replace_plane(sample, q + buffers - 1, turn_of(q + buffers - 1), first_row, first_column);
        } else {
          release_to_planes();
          __syncthreads();  // the plane is there, and nobody reads the one that the next replaces
          if (buffers > 1 && q + 1 < q_end)
            load_plane(sample, q + 1, buffer_of(turn_of(q + 1)), first_row, first_column);
        }
        store_waiting();
        if (active) {
          if (may_be_regular && plane >= z && plane + live <= last_z) {
            multiply_back<may_be_regular>(sums, item, buffer, q, plane, z, last_z, y + item.row, first_row);
          } else {
            multiply_back<false>(sums, item, buffer, q, plane, z, last_z, y + item.row, first_row);
          }
        }
        if constexpr (alone) release_plane(turn_of(q));
        if (buffers == 1 && q + 1 < q_end) {
          release_to_planes();
          __syncthreads();
          load_plane(sample, q + 1, 0, first_row, first_column);
        }
      }
      int next = q + 1 < q_end ? first_plane(q + 1) : last_z;
      next = next < last_z ? next : last_z;
#pragma unroll 1
      for (; plane < next; ++plane) {
        if (plane >= z) {
          if (waiting >= 0) {
            meet_readers_of_products();
            store_waiting();
          }
          if (active) put_products(sums[0], item, plane % 2);
          waiting = plane;
        }
#pragma unroll
        for (int i = 0; i + 1 < live; ++i) sums[i] = sums[i + 1];
        sums[live - 1] = PlaneSums{};
      }
    }
    meet_readers_of_products();
    store_waiting();
    if (q_begin < q_end) turns += static_cast<uint32>(q_end - q_begin);
  }
};

}  // namespace onepass
