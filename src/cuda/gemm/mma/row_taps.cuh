// Taps along x as rows of the row "gemm_mma"'s product, where outputs are few:
//
//   P[o, a][q] = sum over channels and the other taps of w[o, a] x[q],   y[o][j] = sum over a of P[o, a][j +
//   shift(a)]
//
// Few outputs leave most of a product's 16 rows to zeros, and x's fragments are read once for each tap. With
// the taps of x as rows, rows are outputs times taps, and a fragment of x serves all of them. A tile computes
// columns q beyond its outputs on the right (halo), and adds neighbouring columns once, after the mainloop.
//
// Of stride s, tap a s + b is tap b of row a: it reads every s-th column from b on. A transposed convolution
// of stride s has s outputs of each column: a tap belongs to one of them, so that every tap is a row.
#pragma once

#include "gemm/mma/layout.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmMmaRowTaps {
  const GemmMmaBlock<C, Tail, Numbers> block;

  using Outputs = GemmMmaOutputs<Numbers>;
  static constexpr int taps = Numbers::row_taps;
  static constexpr int rows = static_cast<int>(C::channels) * taps;
  static constexpr int own_x = Numbers::own_columns;         // columns with outputs in a row of the box
  static constexpr int of_column = Numbers::column_outputs;  // outputs
  static constexpr int box_rows = Numbers::box(0) * Numbers::box(1);
  // The last row of a strided convolution may lack taps. An infinite x makes NaN of their zeros: samples with
  // such sums are computed again. f32 operands mark such samples where x is staged.
  static constexpr bool lacks_taps = C::kernel(2) % C::count(2, 0) != 0 && Tail::Input::bytes == 2;

  // Turns the sums of products into sums of outputs. Begins and ends with all threads.
  __device__ __forceinline__ void add(const GemmMmaItem<C, Numbers>& item,
                                      const GemmMmaSums<Numbers>& products, GemmMmaSums<Outputs>& d) const {
    __syncthreads();  // the rings are free
    leave(item, products);
    __syncthreads();
    sum(item);
    __syncthreads();
    collect(d);
  }

 private:
  // Leaves the products' sums, scaled, in shared memory.
  __device__ __forceinline__ void leave(const GemmMmaItem<C, Numbers>& item,
                                        const GemmMmaSums<Numbers>& products) const {
    constexpr int padded_rows = Numbers::channel_tiles * Numbers::tile_rows;
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = block.row(i, h);
        if (row >= rows) continue;
        const float scale =
            Numbers::guards ? __ldg(block.p.scales + group_of<C>(item.n) * padded_rows + row) : 1.0f;
#pragma unroll
        for (int j = 0; j < Numbers::column_tiles; ++j) {
          *reinterpret_cast<float2*>(&block.s.added.products[row][block.column(2 * j)]) =
              float2{products[i][j][2 * h] * scale, products[i][j][2 * h + 1] * scale};
        }
      }
    }
  }

  // Adds up the taps of all outputs, each in the order of its taps.
  __device__ __forceinline__ void sum(const GemmMmaItem<C, Numbers>& item) const {
    constexpr int all = static_cast<int>(C::channels) * box_rows * own_x;
    bool exists = true;
    for (int i = block.thread; i < all; i += Numbers::threads) {
      const int row = i / own_x;
      const int x = i - row * own_x;
      const int channel = row / box_rows;
      const int in_box = row - channel * box_rows;
      const float* const from = &block.s.added.products[channel * taps][in_box * Numbers::box(2) + x];
      float total[of_column] = {};
#pragma unroll
      for (int a = 0; a < taps; ++a)
        total[Numbers::tap_output(a)] += from[a * (Numbers::tile_positions + 8) + Numbers::tap_shift(a)];
#pragma unroll
      for (int k = 0; k < of_column; ++k) {
        block.s.added.outputs[channel][(in_box * own_x + x) * of_column + k] = total[k];
        exists &= fabsf(total[k]) <= 3.4028235e38f;
      }
    }
    if constexpr (lacks_taps) {
      if (!exists) gemm::mark_sample(block.p, item.n);
    }
  }

  __device__ __forceinline__ void collect(GemmMmaSums<Outputs>& d) const {
    constexpr int all = box_rows * own_x * of_column;
    const GemmMmaBlock<C, Tail, Outputs> own{block.p, block.s};
#pragma unroll
    for (int i = 0; i < Outputs::row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = own.row(i, h);
#pragma unroll
        for (int j = 0; j < 2 * Outputs::column_tiles; ++j) {
          const int column = own.column(j);
          d[i][j / 2][2 * h + j % 2] =
              row < C::channels && column < all ? block.s.added.outputs[row][column] : 0.0f;
        }
      }
    }
  }
};

}  // namespace onepass
