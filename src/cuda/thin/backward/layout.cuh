// The layout of the kernel for all gradients of a thin convolution: its constants and its shared memory.
#pragma once

#include "device/types.cuh"
#include "thin/backward/parameters.cuh"
#include "thin/backward/products.cuh"
#include "thin/backward/terms.cuh"

namespace onepass {

// A thread's place in its block and, as products have it, in its warp.
struct WarpThread {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int quad = threadIdx.x % 32 / 4;
  const int in_quad = threadIdx.x % 4;
};

// The pieces of the kernel are templates of this one type.
template <class Convolution, class TailOfBlock, class NumbersOfPlan>
struct ThinBackwardLayout {
  using C = Convolution;
  using Tail = TailOfBlock;
  using Numbers = NumbersOfPlan;
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
};

}  // namespace onepass
