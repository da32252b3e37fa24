// The convolution of a warp's chunk, computed anew from the window for the backward passes.
#pragma once

#include "thin/backward/window.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::ChunkConvolution {
  const Thread thread;

  template <int row_tile, int row_taps>
  __device__ __forceinline__ void convolve(const typename Terms::Class& own, int window,
                                           float (&h)[chunk_tiles][4]) const {
    static_assert(!splits || chunk_rows == 1);
    ProductSums<splits, spans> sums[chunk_rows];
    const Operand* from = thread.s.passes.window + window;
#pragma unroll 1
    for (int k = 0; k < own.steps; ++k) {
      const Operand* entry = from + thread.s.step_window[(own.step + k) * 4 + thread.in_quad];
      const int fragment = own.fragment + k * (row_taps * products);
      // Weights of several rows stay in registers.
      uint4 held[chunk_rows > 1 ? row_taps : 1][products][parts];
      const auto load_weights = [&](int tap, int product, uint4(&a)[parts]) {
#pragma unroll
        for (int i = 0; i < parts; ++i)
          a[i] =
              thread.s.weight[i][(fragment + tap * products + product) * row_tiles + row_tile][thread.lane];
      };
      if constexpr (chunk_rows > 1) {
#pragma unroll
        for (int i = 0; i < row_taps * products; ++i)
          load_weights(i / products, i % products, held[i / products][i % products]);
      }
#pragma unroll
      for (int at = 0; at < Terms::x_rows(row_taps); ++at) {
        const int x_row = Terms::first_x_row(row_taps) + at;
        if (!Terms::is_read(x_row, row_taps)) continue;
        Vector x[spans];
#pragma unroll
        for (int i = 0; i < spans; ++i)
          x[i] = *reinterpret_cast<const Vector*>(entry + x_row * Terms::x_row_elements +
                                                  i * 8 * static_cast<int>(C::step(2)) * vector);
        if constexpr (halves) {
#pragma unroll
          for (int tap = 0; tap < row_taps; ++tap) {
            if (Terms::row_of(x_row, tap) < 0) continue;
            uint4 a[1];
            if constexpr (chunk_rows == 1) load_weights(tap, 0, a);
#pragma unroll
            for (int i = 0; i < spans; ++i)
              mma::multiply<mma::F16>(sums[Terms::row_of(x_row, tap)].total[i],
                                      chunk_rows > 1 ? held[tap][0][0] : a[0], x[i].of[0], x[i].of[1]);
          }
        } else {
#pragma unroll
          for (int product = 0; product < products; ++product) {
            float b[spans][2];
#pragma unroll
            for (int i = 0; i < spans; ++i) {
              b[i][0] = x[i].of[product * 2];
              b[i][1] = x[i].of[product * 2 + 1];
            }
#pragma unroll
            for (int tap = 0; tap < row_taps; ++tap) {
              if (Terms::row_of(x_row, tap) < 0) continue;
              if constexpr (chunk_rows > 1) {
                sums[Terms::row_of(x_row, tap)].add(held[tap][product], b);
              } else {
                uint4 a[parts];
                load_weights(tap, product, a);
                sums[0].add(a, b);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int row = 0; row < chunk_rows; ++row) {
      sums[row].finish();
#pragma unroll
      for (int i = 0; i < spans * 4; ++i) {
        const int c = row_tile * 16 + i % 4 / 2 * 8 + thread.quad;
        const float sum = sums[row].total[i / 4][i % 4];
        h[row * spans + i / 4][i % 4] =
            halves ? fmaf(sum, thread.s.unscale[c], thread.s.bias[c]) : sum + thread.s.bias[c];
      }
    }
  }

  // For f16 operands: all classes of a row at once, with their steps unrolled.
  static constexpr bool unrolls_classes = halves && chunk_rows == 1 && Numbers::steps <= 32;
  static constexpr __device__ int class_steps(int index) {
    int entries = Terms::vectors;
    for (int d = 2; d >= 0; --d) {
      entries *= static_cast<int>(C::count(d, index % static_cast<int>(C::classes(d))));
      index /= static_cast<int>(C::classes(d));
    }
    return (entries + 3) / 4;
  }
  static constexpr __device__ int first_step(int index) {
    int step = 0;
    for (int i = 0; i < index; ++i) step += class_steps(i);
    return step;
  }
  template <int row_tile, int index>
  __device__ __forceinline__ void convolve_known(const Operand* from, float (&h)[chunk_tiles][4]) const {
    constexpr int first = first_step(index);
    constexpr int steps = class_steps(index);
#pragma unroll
    for (int i = 0; i < spans * 4; ++i) h[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      const uint4 a = thread.s.weight[0][(first + k) * row_tiles + row_tile][thread.lane];
      const Operand* entry = from + thread.s.step_window[(first + k) * 4 + thread.in_quad];
#pragma unroll
      for (int i = 0; i < spans; ++i) {
        const Vector x =
            *reinterpret_cast<const Vector*>(entry + i * 8 * static_cast<int>(C::step(2)) * vector);
        mma::multiply<mma::F16>(h[i], a, x.of[0], x.of[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < spans * 4; ++i) {
      const int c = row_tile * 16 + i % 4 / 2 * 8 + thread.quad;
      h[i / 4][i % 4] = fmaf(h[i / 4][i % 4], thread.s.unscale[c], thread.s.bias[c]);
    }
  }
  template <int row_tile, int first_class, int x = 0>
  __device__ __forceinline__ void convolve_row(const Operand* from,
                                               float (&h)[classes_x][chunk_tiles][4]) const {
    convolve_known<row_tile, first_class + x>(from, h[x]);
    if constexpr (x + 1 < classes_x) convolve_row<row_tile, first_class, x + 1>(from, h);
  }
  template <int row_tile, int of_row = 0>
  __device__ __forceinline__ void convolve_classes(int first_class, int window,
                                                   float (&h)[classes_x][chunk_tiles][4]) const {
    if constexpr (of_row + classes_x < classes) {
      if (first_class != of_row) {
        convolve_classes<row_tile, of_row + classes_x>(first_class, window, h);
        return;
      }
    }
    convolve_row<row_tile, of_row>(thread.s.passes.window + window, h);
  }

  template <int row_tile, int row_taps = Terms::most_row_taps>
  __device__ __forceinline__ void convolve_class(const typename Terms::Class& own, int window,
                                                 float (&h)[chunk_tiles][4]) const {
    if constexpr (row_taps <= 1 || C::classes(1) == 1) {
      convolve<row_tile, (row_taps > 1 ? row_taps : 1)>(own, window, h);
    } else if constexpr (!Terms::has_row_taps(row_taps)) {
      convolve_class<row_tile, row_taps - 1>(own, window, h);
    } else if (own.row_taps == row_taps) {
      convolve<row_tile, row_taps>(own, window, h);
    } else {
      convolve_class<row_tile, row_taps - 1>(own, window, h);
    }
  }

  // h of the classes of a row that begin with `first_class`.
  template <int row_tile>
  __device__ __forceinline__ void run(int first_class, int window,
                                      float (&h)[classes_x][chunk_tiles][4]) const {
    if constexpr (unrolls_classes) {
      convolve_classes<row_tile>(first_class, window, h);
    } else {
#pragma unroll
      for (int x = 0; x < classes_x; ++x)
        convolve_class<row_tile>(thread.s.of_class[first_class + x], window, h[x]);
    }
  }
};

}  // namespace onepass
