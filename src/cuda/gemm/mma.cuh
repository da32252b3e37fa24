// The kernel of the row "gemm_mma": a wide convolution with what follows it up to the norm, as an implicit
// matrix product on every GPU from sm_80 on. The norm and what follows it are a launch of their own: over
// values in memory (gemm/store/finish.cuh), or this kernel `again`, which computes them a second time. The
// first launch then leaves moments alone.
//
// A block computes one tile: a box of outputs of one class by `tile_rows` output channels. The window of x
// that the box reads lies in shared memory as [vector of channels][entry]. A vector is 16 bytes of operands
// (eight of 16 bits, or four of tf32), and any eight vectors are a matrix of a product. A tap is therefore a
// number added to addresses, for any stride and dilation. Entries are ordered so that neighbouring outputs
// read neighbouring entries. Weights, packed by a launch before, are the left operand.
//
// A product has two vectors of terms. Where a tap has one or three, taps are taken in pairs, and vectors of
// both fill products. Channels that do not fill a vector or 16 rows are zeros.
//
// Where channels fill at most half of a vector, it has those of several neighbouring taps along x: an element
// of x then lies in as many vectors, and the mainloop sees fewer taps (SpannedConvolution).
//
//   weights   by asynchronous copies to a ring buffer; a stage is a group of taps of one chunk of channels
//   x         through registers, where it is rounded or split; a part of the next chunk's window is loaded
//             while a group of this chunk is multiplied. Two windows. Where operands of 16 bits are x itself,
//             by asynchronous copies, a chunk ahead: vectors of channels, or runs along x where no tap moves
//             along it. Then the window is [channel][entry], and matrices are turned as they are read.
//
// f32 operands are rounded to f16 for tf32, which is as exact, or split in two f16 otherwise: three products,
// and sums that leave the tensor cores, which truncate, after at most 64 terms. Samples whose values overflow
// f16 are marked and recomputed by another kernel. All samples are marked where a weight is not finite: it
// would meet the zeros beside the input. Where classes of a transposed convolution are tiles of their own,
// operands are tf32, or two of them.
//
// Where outputs are few, taps along x may be rows of the product (gemm/mma/row_taps.cuh). Then `C` has the
// taps and columns of the product along x.
#pragma once

#include "gemm/mma/epilogue.cuh"
#include "gemm/mma/mainloop.cuh"
#include "gemm/mma/row_taps.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmMma {
  using Parameters = GemmMmaParameters<Tail::parameters>;
  using Shared = GemmMmaShared<C, Tail, Numbers>;
  static_assert(sizeof(Shared) == Numbers::shared_bytes);
  static_assert(Numbers::column_tiles % 4 == 0 && Numbers::joint_taps * Numbers::vectors % 2 == 0);

  const GemmMmaBlock<C, Tail, Numbers> block;
  const GemmMmaMainloop<C, Tail, Numbers> mainloop{block};
  const GemmMmaRowTaps<C, Tail, Numbers> row_taps{block};
  using Outputs = GemmMmaOutputs<Numbers>;
  const GemmMmaEpilogue<C, Tail, Outputs> epilogue{{block.p, block.s}};

  __device__ __forceinline__ void run() const {
    if (blockIdx.x == 0 && block.thread == 0) gemm::mark_by_weights<Numbers>(block.p);
    // Backwards the second time: the last of x are still in the second-level cache.
    const bool again = Numbers::recomputes && block.p.again != 0;
    const GemmMmaItem<C, Numbers> item(again ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    const ThinClass<C> own(item.class_index);
    prepare(item, own);
    __syncthreads();
    GemmMmaSums<Outputs> d;
    convolve(item, own, d);
    uint32 inside = 0;
#pragma unroll
    for (int j = 0; j < 2 * Outputs::column_tiles; ++j)
      inside |= static_cast<uint32>(block.s.targets[epilogue.block.column(j)] >= 0) << j;
    epilogue.activate(item, inside, d);
    if constexpr (Numbers::recomputes) {
      if (again) {
        finish(item, inside, d);
        return;
      }
    }
    __syncthreads();  // the rings are free
    if constexpr (Tail::has_norm) {
      epilogue.row_moments(inside, d);
    } else if constexpr (Tail::has_mean) {
      epilogue.row_sums(inside, d);  // not distances, which are no numbers from infinity on
    }
    if constexpr (!Tail::has_norm && !Tail::has_mean)
      epilogue.template store_values<typename Tail::Output>(block.p.output, item, d);
    if constexpr (Tail::has_norm && !Tail::mean_follows_norm && !Numbers::recomputes)
      epilogue.template store_values<f32>(block.p.values, item, d);
    if constexpr (Tail::has_norm || Tail::has_mean) {
      __syncthreads();
      if constexpr (Tail::has_norm) epilogue.store_parts(item);
      if constexpr (Tail::mean_follows_norm || (Tail::has_mean && !Tail::has_norm)) epilogue.store_sums(item);
    }
    if constexpr (Tail::has_norm || Tail::has_mean || Numbers::guards) {
      constexpr uint32 tiles = Numbers::channel_tiles * decltype(epilogue)::position_parts;
      if (arrives_last(block.p.control + item.n, tiles)) epilogue.finish_sample(item.n);
    }
  }

 private:
  __device__ __forceinline__ void convolve(const GemmMmaItem<C, Numbers>& item, const ThinClass<C>& own,
                                           GemmMmaSums<Outputs>& d) const {
    if constexpr (Numbers::row_taps > 1) {
      GemmMmaSums<Numbers> products;
      mainloop.convolve(item, own, products);
      row_taps.add(item, products, d);
    } else {
      mainloop.convolve(item, own, d);
    }
  }

  // The norm and what follows, of values that are computed again.
  __device__ __forceinline__ void finish(const GemmMmaItem<C, Numbers>& item, uint32 inside,
                                         GemmMmaSums<Outputs>& d) const {
    epilogue.norm(item, inside, d);
    __syncthreads();  // the rings are free
    if constexpr (Tail::has_mean) {
      epilogue.row_sums(inside, d);
      __syncthreads();
      epilogue.store_sums(item);
      uint32* const counter =
          block.p.control + block.p.batch + item.n * Numbers::channel_tiles + item.channel_tile;
      if (arrives_last(counter, decltype(epilogue)::position_parts)) epilogue.store_means(item);
    } else {
      epilogue.template store_values<typename Tail::Output>(block.p.output, item, d);
    }
  }

  // Offsets of the tile's window and outputs, and the shifts of taps.
  __device__ __forceinline__ void prepare(const GemmMmaItem<C, Numbers>& item,
                                          const ThinClass<C>& own) const {
    using Geometry = GemmMmaGeometry<C, Numbers>;
    const int y = item.position_tile / Numbers::boxes_x;
    const int z = y / Numbers::boxes_y;
    const int first[3] = {z * Numbers::box(0), (y - z * Numbers::boxes_y) * Numbers::box(1),
                          (item.position_tile - y * Numbers::boxes_x) * Numbers::own_columns};
    for (int i = block.thread; i < Geometry::window; i += Numbers::threads) {
      const int row = i / Numbers::entries(2);
      const int plane = row / Numbers::entries(1);
      const int entry[3] = {plane, row - plane * Numbers::entries(1), i - row * Numbers::entries(2)};
      int offset = 0;
      bool inside = true;
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        const int at =
            first[d] * static_cast<int>(C::step(d)) + Geometry::low(own, d) + Geometry::place(d, entry[d]);
        if (d == 2 && Numbers::span > 1) {
          block.s.columns[i] = at;
          break;
        }
        inside &= static_cast<unsigned>(at) < static_cast<unsigned>(C::input_size(d));
        offset += at * static_cast<int>(C::input_stride(d + 2));
      }
      block.s.sources[i] = inside ? offset : -1;
    }
    for (int i = block.thread; i < Numbers::output_positions; i += Numbers::threads) {
      constexpr int of_row = Numbers::own_columns * Numbers::column_outputs;
      const int row = i / of_row;
      const int plane = row / Numbers::box(1);
      const int in_box[3] = {plane, row - plane * Numbers::box(1), i - row * of_row};
      int offset = 0;
      bool inside = plane < Numbers::box(0);
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        const int j = first[d] * (d == 2 ? Numbers::column_outputs : 1) + in_box[d];
        const int at = own.r[d] + static_cast<int>(C::classes(d)) * j;
        inside &= at < static_cast<int>(C::output_size(d));
        offset += at * static_cast<int>(Numbers::stride(d + 2));
      }
      block.s.targets[i] = inside ? offset : -1;
    }
    const int taps = own.count[0] * own.count[1] * own.count[2];
    for (int t = block.thread; t < Geometry::joints(taps) * Numbers::joint_taps; t += Numbers::threads) {
      if (Numbers::odd_taps && t == taps) {
        block.s.tap_shifts[t] = 0;  // of the tap of zeros
        break;
      }
      const int m1 = t / own.count[2];
      const int m0 = m1 / own.count[1];
      block.s.tap_shifts[t] = ((Geometry::tap_shift(own, 0, m0) * Numbers::entries(1) +
                                Geometry::tap_shift(own, 1, m1 - m0 * own.count[1])) *
                                   Numbers::entries(2) +
                               Geometry::tap_shift(own, 2, t - m1 * own.count[2])) *
                              Geometry::place_bytes;
    }
  }
};

}  // namespace onepass
