// A convolution whose groups have few inputs, with the chain after it: any kernel, stride, padding, dilation,
// transposed or not, on CUDA cores.
//
//   y[n, o, q] = chain(bias[o] + sum over inputs c of the group, taps t:  w[o, c, t] x[n, c, i(q, t)])
//
// A block computes a tile: a box of cells times channels of some groups. A cell is one output position, or of
// a transposed convolution those of all classes along x (ThinAxis). It stages the input's window and the
// weights as f32, with zeros outside the input, in chunks of input channels. A thread holds `outputs`
// channels of `rows` x `positions` cells in registers. It loads the segment of a window's row once for all
// taps and cells of that row. The sums go through shared memory, so that x is read and y written in whole
// sectors in both layouts. Moves x once, apart from halos, and y once.
//
// Terms are added by input channel, then by tap, whatever the tile. Tiles so do not change the bits.
#pragma once

#include "direct/narrow/products.cuh"
#include "direct/narrow/results.cuh"
#include "direct/narrow/staging.cuh"

namespace onepass {

template <class Convolution, class Tail, class Numbers>
struct Narrow {
  using Types = NarrowTypes<Convolution, Tail, Numbers>;
  using C = Convolution;
  using N = Numbers;
  using Parameters = typename Types::Parameters;
  using Products = typename Types::Products;

  const Parameters& p;
  unsigned char* shared;

  __device__ __forceinline__ void run() const {
    auto* const window = reinterpret_cast<float*>(shared);
    float* const weights = window + N::window_floats;
    const typename Types::Staging staging{p};
    const Products products{window, weights};
    const typename Types::Results results{p, window};  // after the last product
    const typename Types::Tile tile(blockIdx.x);
    const typename Types::Slot slot;
    typename Types::Sums sums, part;
    Products::clear(sums);
    Products::clear(part);
    bool are_finite = true;
#pragma unroll 1
    for (int first_input = 0; first_input < C::in_channels; first_input += N::inputs) {
      if (first_input > 0) __syncthreads();
      are_finite &= staging.stage_weights(tile, first_input, weights);
      staging.stage_window(tile, first_input, window);
      __syncthreads();
      if (slot.in_range) products.add_chunk(tile, slot, first_input, sums, part);
    }
    if constexpr (N::part_inputs > 0) Products::fold(sums, part);
    if (__syncthreads_and(are_finite)) {
      if (slot.in_range) results.keep(tile, slot, sums);
    } else {
      results.template keep_careful<false>(tile);
    }
    __syncthreads();
    results.store(tile);
  }
};

}  // namespace onepass
