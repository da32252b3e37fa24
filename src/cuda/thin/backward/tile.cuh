// Where a tile of the backward passes and a warp's chunk of it lie.
#pragma once

#include "thin/backward/backward.cuh"

namespace onepass {

// A tile of positions of a sample.
template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Tile {
  int64 n;
  Operand* ring;  // the sample's part
  int origin[3];  // in positions of a class
  __device__ __forceinline__ Tile(int64 sample, Operand* of_sample, int index) : n(sample), ring(of_sample) {
    if constexpr (slides) {
      origin[0] = index % Numbers::tiles(0);
      index /= Numbers::tiles(0);
    }
    origin[2] = index % Numbers::tiles(2) * Numbers::tile(2);
    origin[1] = index / Numbers::tiles(2) % Numbers::tiles(1) * Numbers::tile(1);
    if constexpr (!slides) origin[0] = index / (Numbers::tiles(2) * Numbers::tiles(1)) * Numbers::tile(0);
  }
  // The window's first plane in its ring buffer.
  __device__ __forceinline__ int turn() const {
    return slides ? origin[0] * static_cast<int>(C::step(0)) % Numbers::window(0) : 0;
  }
};

// A warp's part of a tile: some rows of some neighbouring positions, in all classes of a row. Classes of a
// row are interleaved in the output.
template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Chunk {
  int flat;        // of the first position in the tile
  int window;      // of the lane's column in the first row and span, in elements
  int first_cell;  // in the last dimension
  int cell;        // of the first of the lane's pair in the first span
  int q[2];        // plane and first row of the output

  __device__ __forceinline__ Chunk(const Tile& tile, int index, const ThinClass<C>& of_class,
                                   const Thread& thread) {
    constexpr int blocks = Numbers::tile(1) / chunk_rows;
    const int column = index % row_chunks_of_tile * (spans * 8);
    const int j1 = index / row_chunks_of_tile % blocks * chunk_rows;
    const int j0 = index / (row_chunks_of_tile * blocks);
    flat = (j0 * Numbers::tile(1) + j1) * Numbers::tile(2) + column;
    window = ((j0 * static_cast<int>(C::step(0)) * Numbers::window(1) + j1 * static_cast<int>(C::step(1))) *
                  Numbers::window(2) +
              (column + thread.quad) * static_cast<int>(C::step(2))) *
             vector;
    first_cell = tile.origin[2] + column;
    cell = first_cell + 2 * thread.in_quad;
    q[0] = of_class.r[0] + static_cast<int>(C::classes(0)) * (tile.origin[0] + j0);
    q[1] = of_class.r[1] + static_cast<int>(C::classes(1)) * (tile.origin[1] + j1);
  }
  __device__ __forceinline__ bool has_row(int row) const {
    return q[0] < static_cast<int>(C::output_size(0)) &&
           q[1] + row * static_cast<int>(C::classes(1)) < static_cast<int>(C::output_size(1));
  }
  // Only with one class of columns.
  __device__ __forceinline__ bool is_whole() const {
    return has_row(chunk_rows - 1) && first_cell + spans * 8 <= static_cast<int>(C::positions(2, 0));
  }
};

}  // namespace onepass
