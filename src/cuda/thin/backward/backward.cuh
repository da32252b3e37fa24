// The gradients of a thin convolution and all that follows it. The convolution is computed anew where its
// output is needed.
//
// With h the convolution's output, dh its gradient, z the norm's output and M elements in a slab:
//   pass 1   x -> h; dy -> dz; for each channel the sums of dz, of dz xhat and of what the after-chain reads.
//            The last block of a sample merges them to the slabs' means over M of gamma dz and gamma dz xhat
//   pass 2   x -> h -> dh as in tail/backward, a tile in shared memory at a time;
//            dweight[o, term] += sum over positions dh[o, q] x[term, q] by tensor cores; dh to a ring buffer
//   pass 3   dx: rows D[(input channel, last tap), q] = sum over outer taps and o of w dh[o, q] by tensor
//            cores, shifted and added to dx[input channel, i] as they are stored
// Pass 1 is left out without a norm, pass 3 where dx is not wanted, and unwanted products of pass 2.
//
// Work is taken by ticket, sample after sample: pass 1 of sample n, pass 2 of an earlier one, pass 3 of a
// still earlier one. So dy and dh come from the second-level cache. Blocks wait only for lower tickets. The
// ring buffer holds dh of a few samples: nothing of the convolution's size is in memory. Each ticket leaves
// its sums of dweight; the last block of a sample adds them. A second launch (Reduce) sums over the
// batch.
//
// Operands are f16 scaled by powers of two, tf32, or split in two with three products (strict f32, at most 64
// terms in the tensor core). dh is rounded as an operand is. For f16, a ticket of its own finds the scale of
// x, one sample ahead. x and dy are read twice, x once more for its scale. dh goes once each way through the
// second-level cache, dx is written once.
//
// ThinBackward has the kernel's types, sizes and shared memory. Its pieces are nested classes, each defined
// in its own file.
#pragma once

#include "device/types.cuh"
#include "thin/backward/parameters.cuh"
#include "thin/backward/products.cuh"
#include "thin/backward/terms.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward {
  struct Tile;              // tile.cuh: positions of a sample
  struct Chunk;             // tile.cuh: a warp's part of a tile
  struct Weights;           // weights.cuh: weights as fragments of the products
  struct Slabs;             // slabs.cuh: what a block computes for a sample between its passes
  struct Window;            // window.cuh: x of a tile in shared memory
  struct ChunkConvolution;  // convolution.cuh
  struct StagedGradient;    // staged_gradient.cuh: dy on its way
  struct Elements;          // elements.cuh: chains of one element, sums of a channel
  struct WeightGradient;    // weight_gradient.cuh
  struct TilePasses;        // passes.cuh: passes 1 and 2
  struct Planes;            // planes.cuh: dh on its way, for pass 3
  struct Geometry;          // input_gradient.cuh: which inputs and outputs meet
  struct InputGradient;     // input_gradient.cuh: pass 3
  struct Kernel;            // kernel.cuh: tickets
  struct Reduce;            // reduce.cuh: the second launch

  using Parameters = ThinBackwardParameters<Tail::parameters>;
  using Terms = GradientTerms<C, Numbers>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  static constexpr int threads = Numbers::threads;
  static constexpr int warps = Numbers::warps;
  static constexpr int channels = C::channels;
  static constexpr int row_tiles = Terms::row_tiles;
  static constexpr int rows = row_tiles * 16;  // channels, padded to whole row tiles
  static constexpr int groups = channels / Tail::group_channels;
  static constexpr int classes = Terms::classes;
  static constexpr int classes_x = static_cast<int>(C::classes(2));
  static constexpr int vector = Terms::vector;
  static constexpr int products = Terms::products;
  static constexpr int components = Terms::components;
  static constexpr int spans = Numbers::spans;            // of 8 positions in a row of a warp's chunk
  static constexpr int chunk_rows = Numbers::chunk_rows;  // in the dimension before the last
  static constexpr int chunk_tiles = chunk_rows * spans;
  static constexpr int row_chunks_of_tile = Numbers::tile(2) / (spans * 8);
  static constexpr int chunks = Numbers::tile(0) * (Numbers::tile(1) / chunk_rows) * row_chunks_of_tile;
  static_assert(Numbers::tile(1) % chunk_rows == 0 && Numbers::tile(2) % (spans * 8) == 0);
  static constexpr bool splits = Numbers::splits;
  static constexpr int parts = splits ? 2 : 1;  // of an operand
  // Operands are f16, scaled by powers of two: the bits of tf32 in half the space.
  static constexpr bool halves = Numbers::halves;
  static_assert(!halves || (vector == 4 && !splits && Tail::has_norm && Tail::before_sums == 0));
  using Operand = conditional<halves, uint16, float>;

  static constexpr int after_sums = Tail::after_sums;
  static constexpr int first_sums = Tail::has_norm ? 2 + after_sums : 0;
  static constexpr int chain_sums = Tail::has_norm ? Tail::before_sums : after_sums;
  // Where the output may replace pass 1, pass 2 sums xhat too.
  static constexpr int second_sums =
      chain_sums + (Numbers::wants_bias ? 1 : 0) + (Numbers::may_read_output ? 1 : 0);
  static constexpr int most_sums = first_sums > second_sums ? first_sums : second_sums;

  // Of pass 3.
  static constexpr int column_taps = static_cast<int>(C::kernel(2));
  static constexpr int column_rows = C::in_channels * column_taps;  // of D
  static constexpr int column_tiles = (column_rows + 15) / 16;
  static constexpr int back_steps =
      static_cast<int>(C::kernel(0) * C::kernel(1)) * row_tiles * (halves ? 1 : 2);  // of 16 or 8 channels

  // Tiles of one plane follow each other along the first dimension. The window is a ring buffer of planes:
  // the next tile loads only the planes that it does not share with this one.
  static constexpr bool slides = Numbers::slides;
  static constexpr int fresh_planes = static_cast<int>(C::step(0));
  static_assert(!slides || (Numbers::tile(0) == 1 && fresh_planes < Numbers::window(0)));

  struct alignas(16) RowValues {
    float mean, rstd, gamma, beta;
    float scale, product, sum;  // dh = scale dz + product xhat + sum
    float dy;                   // where the block ends in a mean
  };
  static constexpr int dh_groups = Numbers::tile(0) * Numbers::tile(1) * Numbers::tile(2) / 16;
  static_assert(!halves || !Numbers::wants_weight || Numbers::tile(2) % 16 == 0);
  struct Passes {
    union {
      alignas(16) Operand window[Numbers::window_vectors * vector];
      float sum[warps][rows][most_sums > 0 ? most_sums : 1];  // after the last window
    };
    // [class][c][position][2]: channels c and c + 8 of a row tile are neighbours.
    alignas(16) float dh[Numbers::wants_weight && !halves ? classes : 1]
                        [Numbers::wants_weight && !halves ? rows / 2 : 1][halves ? 4 : Numbers::dh_pitch];
    // The same as f16: fragments of 16 positions of a row and 16 channels, as lanes hold them.
    uint4 half_dh[halves && Numbers::wants_weight ? classes * row_tiles * dh_groups : 1][32];
    float4 weight[Numbers::wants_weight ? Numbers::units : 1][32];
    alignas(16) float staged[Numbers::stages_gradient ? warps : 1][2]
                            [Numbers::stages_gradient ? 16 * 32 : 4];  // dy
  };
  struct Back {
    alignas(16) Operand ring[Numbers::back_buffers][Numbers::back_elements];
    alignas(16) float product[2][Numbers::back_tile(1)][column_rows][Numbers::product_pitch];
  };
  struct Shared {
    uint4 weight[parts][Numbers::fragments > 0 ? Numbers::fragments* row_tiles : 1][32];
    uint4 back[parts][Numbers::wants_input ? back_steps * column_tiles : 1][32];
    int step_window[Numbers::steps * 4 + 1];  // offsets of entries in the window, in elements
    int group_window[Numbers::jobs * 8 + 1];
    int2 step_entry[slides ? Numbers::steps * 4 : 1];
    int2 group_entry[slides ? Numbers::jobs * 8 : 1];
    typename Terms::Class of_class[classes];
    RowValues row[rows];
    float bias[rows];
    float weight_scale[halves ? rows : 1];  // of each channel's weights; `unscale` is for its sums
    float unscale[halves ? rows : 1];
    float back_scale;
    uint32 most;
    uint64 arrived[Numbers::back_buffers];   // barriers of planes of dh: filled by copies
    uint64 released[Numbers::back_buffers];  // free for the next copy
    union {
      Passes passes;
      Back back_window;
    };
  };

  // dh in the ring buffer: [position of the output][channel]. As f16, channels c and c + 8 of a row tile are
  // neighbours.
  static constexpr __device__ int ring_stride(int d) {
    const int row = static_cast<int>(C::output_size(2)) * rows;
    return d == 2 ? rows : d == 1 ? row : row * static_cast<int>(C::output_size(1));
  }
  static constexpr __device__ int64 ring_sample() {
    return static_cast<int64>(ring_stride(0)) * C::output_size(0);
  }
  static __device__ __forceinline__ Operand* ring_of(const Parameters& p, int64 n) {
    return static_cast<Operand*>(p.ring) + n % p.ring_samples * ring_sample();
  }

  // Powers of two that scale x and dh of a sample; 1 unless operands are f16.
  struct SampleScales {
    float x = 1.0f;
    float dh = 1.0f;
  };
  static __device__ __forceinline__ SampleScales scales_of(const Parameters& p, int64 n, bool has_dh) {
    SampleScales own;
    if constexpr (halves) {
      own.x = load_shared_by_blocks(p.scales + 2 * n);
      if (has_dh) own.dh = load_shared_by_blocks(p.scales + 2 * n + 1);
    }
    return own;
  }

  // Input channels of a position of the window: f32, or two f16 in a word.
  struct alignas(vector * sizeof(Operand)) Vector {
    conditional<halves, uint32, float> of[vector * sizeof(Operand) / 4];
  };

  // The state of a thread; every piece has one.
  struct Thread {
    const Parameters& p;
    Shared& s;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int quad = threadIdx.x % 32 / 4;  // of products
    const int in_quad = threadIdx.x % 4;
  };
};

}  // namespace onepass
