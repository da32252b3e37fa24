// A convolution of 16-bit operands whose groups have few inputs, with the chain after it, on tensor cores:
// any kernel, stride, padding, dilation, transposed or not.
//
//   y[n, o, q] = chain(bias[o] + sum over inputs c of the group, taps t:  w[o, c, t] x[n, c, i(q, t)])
//
// Eight neighbouring outputs along x, a segment, read one run of inputs: they are that run times a banded
// (Toeplitz) matrix, B[i][j] = w[i - j step]. Sixteen segments are the rows of A of m16n8k16. A run of 16
// inputs has all taps of a kernel of nine; longer ones take several products.
//
// A block computes a tile: a box of cells times channels of some groups (direct/narrow/tile.cuh). It stages
// the input's window as it is, rows of chunks of eight inputs, so that a segment's run begins at a chunk. A
// warp has 16 segments of `rows` neighbouring rows and `outputs` channels: it loads a row of inputs once for
// all taps of y. Zeros of the band meet inputs of other segments: sums that are not finite are computed again
// one by one. Moves x once, apart from halos, and y once.
//
// Terms are added by input channel, then by tap, whatever the tile. Tiles so do not change the bits.
#pragma once

#include "direct/banded/bands.cuh"
#include "direct/banded/products.cuh"
#include "direct/banded/store.cuh"
#include "direct/banded/window.cuh"

namespace onepass {

template <class Convolution, class Tail, class Numbers>
struct Banded {
  using Types = BandedTypes<Convolution, Tail, Numbers>;
  using C = Convolution;
  using N = Numbers;
  using Parameters = typename Types::Parameters;
  using Item = typename Types::Item;
  using Products = typename Types::Products;
  using Store = conditional<N::is_late, typename Types::LateStore, typename Types::Store>;

  const Parameters& p;
  unsigned char* shared;

  __device__ __forceinline__ void run() const {
    auto* const bands = reinterpret_cast<uint32*>(shared + N::bands_at);
    const typename Types::Window window{p, reinterpret_cast<uint16*>(shared)};
    const typename Types::Bands weights{p, bands};
    const Products products{static_cast<uint32>(__cvta_generic_to_shared(shared)), bands};
    const Store store{p, reinterpret_cast<decltype(Store::kept)>(shared + N::results_at)};
    const typename Types::Tile tile(blockIdx.x);
    bool are_finite = true;
    weights.clear();
    __syncthreads();
    if constexpr (N::items_of_warp == 1) {
      const Item item(static_cast<int>(threadIdx.x) / 32);
      typename Types::Sums sums;
      sums.clear();
#pragma unroll 1
      for (int first_input = 0; first_input < C::in_channels; first_input += N::inputs) {
        if (first_input > 0) __syncthreads();
        weights.stage(tile, first_input);
        window.stage(tile, first_input);
        __syncthreads();
        if (item.in_range) products.add_chunk(tile, item, first_input, sums);
      }
      __syncthreads();  // results lie where the window is
      if (item.in_range) are_finite = store.keep(tile, item, sums);
    } else {
      weights.stage(tile, 0);
      window.stage(tile, 0);
      __syncthreads();
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x) / 32; i < Item::count; i += N::threads / 32) {
        const Item item(i);
        typename Types::Sums sums;
        sums.clear();
        products.add_chunk(tile, item, 0, sums);
        are_finite &= store.keep(tile, item, sums);
      }
    }
    if (!__syncthreads_and(are_finite)) {
      store.keep_careful(tile);
      __syncthreads();
    }
    store.store(tile);
  }
};

}  // namespace onepass
