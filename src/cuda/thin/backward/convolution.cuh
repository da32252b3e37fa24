// The convolution of a tile for its gradients: the window of x in shared memory, and products.
#pragma once

#include "thin/backward/layout.cuh"

namespace onepass {

template <class Convolution, class Tail, class Numbers>
struct ThinGradientTile : ThinGradients<Convolution, Tail, Numbers> {
  using Base = ThinGradients<Convolution, Tail, Numbers>;
  using Base::Base;
  using Base::chunk_rows;
  using Base::chunk_tiles;
  using Base::classes;
  using Base::classes_x;
  using Base::components;
  using Base::halves;
  using Base::in_quad;
  using Base::lane;
  using Base::p;
  using Base::parts;
  using Base::products;
  using Base::quad;
  using Base::row_chunks_of_tile;
  using Base::row_tiles;
  using Base::s;
  using Base::slides;
  using Base::spans;
  using Base::splits;
  using Base::threads;
  using Base::vector;
  using Base::warp;
  using Base::warps;
  using typename Base::C;
  using typename Base::Input;
  using typename Base::Operand;
  using typename Base::Terms;
  using typename Base::Vector;

  struct Tile {
    int64 n;
    Operand* ring;  // the sample's part
    int origin[3];  // in positions of a class
    __device__ __forceinline__ Tile(int64 sample, Operand* of_sample, int index)
        : n(sample), ring(of_sample) {
      if constexpr (slides) {
        origin[0] = index % Numbers::tiles(0);
        index /= Numbers::tiles(0);
      }
      origin[2] = index % Numbers::tiles(2) * Numbers::tile(2);
      origin[1] = index / Numbers::tiles(2) % Numbers::tiles(1) * Numbers::tile(1);
      if constexpr (!slides) origin[0] = index / (Numbers::tiles(2) * Numbers::tiles(1)) * Numbers::tile(0);
    }
    // Where the window's first plane lies in its ring.
    __device__ __forceinline__ int turn() const {
      return slides ? origin[0] * static_cast<int>(C::step(0)) % Numbers::window(0) : 0;
    }
  };

  __device__ __forceinline__ void turn_window(int turn) const {
    if constexpr (slides) {
      for (int i = threadIdx.x; i < Numbers::steps * 4; i += threads)
        s.step_window[i] = Terms::window_of(s.step_entry[i].x, s.step_entry[i].y, turn);
      for (int i = threads - 1 - threadIdx.x; i < Numbers::jobs * 8; i += threads)
        s.group_window[i] = Terms::window_of(s.group_entry[i].x, s.group_entry[i].y, turn);
    }
  }

  // The window's last planes: all of them, or those that the tile before did not meet. A warp for each row of
  // vectors.
  template <int planes>
  __device__ __forceinline__ void load_window(const Tile& tile, float scale) const {
    constexpr int width = Numbers::window(2);
    constexpr int all_rows = Terms::vectors * planes * Numbers::window(1);
    const int turn = tile.turn();
    constexpr int rounds = (width + 31) / 32;
    int first[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) first[d] = tile.origin[d] * static_cast<int>(C::step(d)) + Numbers::low(d);
    const char* sample = static_cast<const char*>(p.input) + tile.n * C::input_stride(0) * Input::bytes;
#pragma unroll 2
    for (int row = warp; row < all_rows; row += warps) {
      const int i1 = first[1] + row % Numbers::window(1);
      int plane = Numbers::window(0) - planes + row / Numbers::window(1) % planes;
      const int i0 = first[0] + plane;
      const int of_vectors = row / (Numbers::window(1) * planes);
      const int c = of_vectors * vector;
      plane += turn;
      if (slides && plane >= Numbers::window(0)) plane -= Numbers::window(0);
      const int to_row =
          (of_vectors * Numbers::window(0) + plane) * Numbers::window(1) + row % Numbers::window(1);
      const bool inside = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                          static_cast<unsigned>(i1) < static_cast<unsigned>(C::input_size(1));
      const int offset = c * static_cast<int>(C::input_stride(1)) +
                         i0 * static_cast<int>(C::input_stride(2)) +
                         i1 * static_cast<int>(C::input_stride(3));
#pragma unroll
      for (int v = 0; v < rounds; ++v) {
        const int column = v * 32 + lane;
        const int i2 = first[2] + column;
        // Columns behind the input's last one in every tile, known when this is compiled.
        const bool is_empty =
            Numbers::tiles(2) == 1 && Numbers::low(2) + v * 32 >= static_cast<int>(C::input_size(2));
        const bool is_real =
            !is_empty && inside && static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2));
        float value[vector];
#pragma unroll
        for (int k = 0; k < vector; ++k) {
          value[k] = 0.0f;
          if (k < components && is_real && (C::in_channels % vector == 0 || c + k < C::in_channels)) {
            value[k] = load_one<Input>(sample, offset + k * static_cast<int>(C::input_stride(1)) +
                                                   i2 * static_cast<int>(C::input_stride(4)));
            if constexpr (C::rounds_to_tf32 && !halves) value[k] = round_to_tf32(value[k]);
          }
        }
        if constexpr (Terms::spare > 0) {
          if (c + vector > C::in_channels) {
            constexpr float share = 1.0f / static_cast<float>(Terms::spare);
            float mean = value[0] * share;
#pragma unroll
            for (int k = 1; k < Terms::spare; ++k) mean = fmaf(value[k], share, mean);
            value[Terms::spare] = halves ? mean : round_to_tf32(mean);
          }
        }
        Vector operands;
        if constexpr (halves) {
          operands.of[0] = pack_halves(value[0] * scale, value[1] * scale);
          operands.of[1] = pack_halves(value[2] * scale, value[3] * scale);
        } else {
#pragma unroll
          for (int k = 0; k < vector; ++k) operands.of[k] = value[k];
        }
        if (width % 32 == 0 || column < width)
          *reinterpret_cast<Vector*>(s.passes.window + (to_row * width + column) * vector) = operands;
      }
    }
  }

  // A warp's chunk: some rows of some neighbouring positions, in all classes of a row, where they lie side by
  // side in the output.
  struct Chunk {
    int flat;        // of the first position in the tile
    int window;      // of the lane's column of products in the first row and span, in elements
    int first_cell;  // in the last dimension
    int cell;        // of the first of the lane's pair in the first span
    int q[2];        // plane and first row of the output

    __device__ __forceinline__ bool has_row(int row) const {
      return q[0] < static_cast<int>(C::output_size(0)) &&
             q[1] + row * static_cast<int>(C::classes(1)) < static_cast<int>(C::output_size(1));
    }
    // Where there is one class of columns.
    __device__ __forceinline__ bool is_whole() const {
      return has_row(chunk_rows - 1) && first_cell + spans * 8 <= static_cast<int>(C::positions(2, 0));
    }
  };

  __device__ __forceinline__ Chunk find(const Tile& tile, int index, const ThinClass<C>& of_class) const {
    constexpr int blocks = Numbers::tile(1) / chunk_rows;
    const int column = index % row_chunks_of_tile * (spans * 8);
    const int j1 = index / row_chunks_of_tile % blocks * chunk_rows;
    const int j0 = index / (row_chunks_of_tile * blocks);
    Chunk own;
    own.flat = (j0 * Numbers::tile(1) + j1) * Numbers::tile(2) + column;
    own.window =
        ((j0 * static_cast<int>(C::step(0)) * Numbers::window(1) + j1 * static_cast<int>(C::step(1))) *
             Numbers::window(2) +
         (column + quad) * static_cast<int>(C::step(2))) *
        vector;
    own.first_cell = tile.origin[2] + column;
    own.cell = own.first_cell + 2 * in_quad;
    own.q[0] = of_class.r[0] + static_cast<int>(C::classes(0)) * (tile.origin[0] + j0);
    own.q[1] = of_class.r[1] + static_cast<int>(C::classes(1)) * (tile.origin[1] + j1);
    return own;
  }

  // Rows of x that `chunk_rows` rows of outputs meet by `row_taps` taps, counted from the first output's
  // first: the output row that meets row `x_row` by tap `tap`, -1 where there is none.
  static constexpr __device__ int first_x_row(int row_taps) {
    return C::delta(1) < 0 ? (row_taps - 1) * static_cast<int>(C::delta(1)) : 0;
  }
  static constexpr __device__ int x_rows(int row_taps) {
    const int delta = static_cast<int>(C::delta(1) < 0 ? -C::delta(1) : C::delta(1));
    return (chunk_rows - 1) * static_cast<int>(C::step(1)) + (row_taps - 1) * delta + 1;
  }
  static constexpr __device__ int row_of(int x_row, int tap) {
    const int distance = x_row - tap * static_cast<int>(C::delta(1));
    const int step = static_cast<int>(C::step(1));
    if (distance < 0 || distance % step != 0 || distance / step >= chunk_rows) return -1;
    return distance / step;
  }
  static constexpr __device__ bool is_met(int x_row, int row_taps) {
    for (int tap = 0; tap < row_taps; ++tap) {
      if (row_of(x_row, tap) >= 0) return true;
    }
    return false;
  }
  static constexpr int x_row_elements = Numbers::window(1) > 0 ? Numbers::window(2) * vector : 0;

  template <int row_tile, int row_taps>
  __device__ __forceinline__ void convolve(const typename Terms::Class& own, int window,
                                           float (&h)[chunk_tiles][4]) const {
    static_assert(!splits || chunk_rows == 1);
    ProductSums<splits, spans> sums[chunk_rows];
    const Operand* from = s.passes.window + window;
#pragma unroll 1
    for (int k = 0; k < own.steps; ++k) {
      const Operand* entry = from + s.step_window[(own.step + k) * 4 + in_quad];
      const int fragment = own.fragment + k * (row_taps * products);
      // Weights that several rows meet stay in registers.
      uint4 held[chunk_rows > 1 ? row_taps : 1][products][parts];
      const auto load_weights = [&](int tap, int product, uint4(&a)[parts]) {
#pragma unroll
        for (int i = 0; i < parts; ++i)
          a[i] = s.weight[i][(fragment + tap * products + product) * row_tiles + row_tile][lane];
      };
      if constexpr (chunk_rows > 1) {
#pragma unroll
        for (int i = 0; i < row_taps * products; ++i)
          load_weights(i / products, i % products, held[i / products][i % products]);
      }
#pragma unroll
      for (int at = 0; at < x_rows(row_taps); ++at) {
        const int x_row = first_x_row(row_taps) + at;
        if (!is_met(x_row, row_taps)) continue;
        Vector x[spans];
#pragma unroll
        for (int i = 0; i < spans; ++i)
          x[i] = *reinterpret_cast<const Vector*>(entry + x_row * x_row_elements +
                                                  i * 8 * static_cast<int>(C::step(2)) * vector);
        if constexpr (halves) {
#pragma unroll
          for (int tap = 0; tap < row_taps; ++tap) {
            if (row_of(x_row, tap) < 0) continue;
            uint4 a[1];
            if constexpr (chunk_rows == 1) load_weights(tap, 0, a);
#pragma unroll
            for (int i = 0; i < spans; ++i)
              multiply_halves(sums[row_of(x_row, tap)].total[i], chunk_rows > 1 ? held[tap][0][0] : a[0],
                              x[i].of[0], x[i].of[1]);
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
              if (row_of(x_row, tap) < 0) continue;
              if constexpr (chunk_rows > 1) {
                sums[row_of(x_row, tap)].add(held[tap][product], b);
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
        const int c = row_tile * 16 + i % 4 / 2 * 8 + quad;
        const float sum = sums[row].total[i / 4][i % 4];
        h[row * spans + i / 4][i % 4] = halves ? fmaf(sum, s.unscale[c], s.bias[c]) : sum + s.bias[c];
      }
    }
  }

  // The same of halves for all classes of a row, whose terms are known when this is compiled.
  static constexpr bool knows_classes = halves && chunk_rows == 1 && Numbers::steps <= 32;
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
      const uint4 a = s.weight[0][(first + k) * row_tiles + row_tile][lane];
      const Operand* entry = from + s.step_window[(first + k) * 4 + in_quad];
#pragma unroll
      for (int i = 0; i < spans; ++i) {
        const Vector x =
            *reinterpret_cast<const Vector*>(entry + i * 8 * static_cast<int>(C::step(2)) * vector);
        multiply_halves(h[i], a, x.of[0], x.of[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < spans * 4; ++i) {
      const int c = row_tile * 16 + i % 4 / 2 * 8 + quad;
      h[i / 4][i % 4] = fmaf(h[i / 4][i % 4], s.unscale[c], s.bias[c]);
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
    convolve_row<row_tile, of_row>(s.passes.window + window, h);
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
};

}  // namespace onepass
