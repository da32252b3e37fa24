// What kernels for all gradients of a thin convolution share: their parameters, numbers and shared memory.
#pragma once

#include "thin/backward/products.cuh"
#include "thin/backward/terms.cuh"

namespace onepass {

template <int Count>
struct ThinBackwardParameters {
  const void* input;
  const void* output_gradient;
  const void* output;  // or null; read where it makes pass 1 superfluous
  const float* statistics;
  uint32* control;  // zero: a ticket; for each sample arrivals of pass 1, a flag, arrivals of passes 2 and 3
  uint32* columns;  // zero: arrivals of ThinReduce
  uint32* peaks;    // zero: where operands are halves, what bounds dh of each sample
  float* scales;    // [batch][2]: what x and dh of a sample are multiplied by before they become halves
  float* first_parts;     // [batch][segments][channels][sums of pass 1]
  float* second_parts;    // [batch][segments][channels][sums of pass 2]
  float* slab_sums;       // [batch][groups][2]
  float* weight_parts;    // [ring_samples][segments][units][128]
  float* weight_samples;  // [batch][units][128]
  double* slices;         // of ThinReduce
  void* ring;             // [ring_samples][positions of the output][channels, a multiple of 16]
  void* input_gradient;
  int64 batch;
  int64 first_lag;   // samples from pass 1 to pass 2
  int64 second_lag;  // from pass 2 to pass 3
  int64 ring_samples;
  const void* parameter[Count > 0 ? Count : 1];
  void* gradient[Count > 0 ? Count : 1];

  // Elements go one by one.
  __device__ __forceinline__ bool is_aligned(int) const { return false; }
};

template <class Convolution, class Tail, class Numbers>
struct ThinGradients {
  using C = Convolution;
  using Parameters = ThinBackwardParameters<Tail::parameters>;
  using Terms = GradientTerms<C, Numbers>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  static constexpr int threads = Numbers::threads;
  static constexpr int warps = Numbers::warps;
  static constexpr int channels = C::channels;
  static constexpr int row_tiles = Terms::row_tiles;
  static constexpr int rows = row_tiles * 16;  // channels and what fills up the last tile of them
  static constexpr int groups = channels / Tail::group_channels;
  static constexpr int classes = Terms::classes;
  static constexpr int classes_x = static_cast<int>(C::classes(2));
  static constexpr int vector = Terms::vector;
  static constexpr int products = Terms::products;
  static constexpr int components = Terms::components;
  static constexpr int spans = Numbers::spans;            // of 8 positions in a row that a warp has at a time
  static constexpr int chunk_rows = Numbers::chunk_rows;  // in the dimension before the last
  static constexpr int chunk_tiles = chunk_rows * spans;
  static constexpr int row_chunks_of_tile = Numbers::tile(2) / (spans * 8);
  static constexpr int chunks = Numbers::tile(0) * (Numbers::tile(1) / chunk_rows) * row_chunks_of_tile;
  static_assert(Numbers::tile(1) % chunk_rows == 0 && Numbers::tile(2) % (spans * 8) == 0);
  static constexpr bool splits = Numbers::splits;
  static constexpr int parts = splits ? 2 : 1;  // of an operand
  // Operands are f16, scaled by powers of two: as many bits as tf32 has, in half of the room.
  static constexpr bool halves = Numbers::halves;
  static_assert(!halves || (vector == 4 && !splits && Tail::has_norm && Tail::before_sums == 0));
  using Operand = conditional<halves, uint16, float>;

  static constexpr int after_sums = Tail::after_sums;
  static constexpr int first_sums = Tail::has_norm ? 2 + after_sums : 0;
  static constexpr int chain_sums = Tail::has_norm ? Tail::before_sums : after_sums;
  // Pass 2 sums xhat too where the output may stand for pass 1.
  static constexpr int second_sums =
      chain_sums + (Numbers::wants_bias ? 1 : 0) + (Numbers::may_read_output ? 1 : 0);
  static constexpr int most_sums = first_sums > second_sums ? first_sums : second_sums;

  // Of pass 3.
  static constexpr int column_taps = static_cast<int>(C::kernel(2));
  static constexpr int column_rows = C::in_channels * column_taps;  // of D
  static constexpr int column_tiles = (column_rows + 15) / 16;
  static constexpr int back_steps =
      static_cast<int>(C::kernel(0) * C::kernel(1)) * row_tiles * (halves ? 1 : 2);  // of 16 or 8 channels

  // Tiles of one plane follow each other along the first dimension, and a window keeps the planes that the
  // next tile meets too: they lie in a ring.
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
      float sum[warps][rows][most_sums > 0 ? most_sums : 1];  // when the last window is done with
    };
    // Channels c and c + 8 of a tile of rows side by side, position after position.
    alignas(16) float dh[Numbers::wants_weight && !halves ? classes : 1]
                        [Numbers::wants_weight && !halves ? rows / 2 : 1][halves ? 4 : Numbers::dh_pitch];
    // The same as halves: operands as lanes have them, of 16 positions of a row and 16 channels.
    uint4 half_dh[halves && Numbers::wants_weight ? classes * row_tiles * dh_groups : 1][32];
    float4 weight[Numbers::wants_weight ? Numbers::units : 1][32];
    alignas(16) float staged[Numbers::stages ? warps : 1][2][Numbers::stages ? 16 * 32 : 4];  // dy
  };
  struct Back {
    alignas(16) Operand ring[Numbers::back_buffers][Numbers::back_elements];
    alignas(16) float product[2][Numbers::back_tile(1)][column_rows][Numbers::product_pitch];
  };
  struct Shared {
    uint4 weight[parts][Numbers::fragments > 0 ? Numbers::fragments* row_tiles : 1][32];
    uint4 back[parts][Numbers::wants_input ? back_steps * column_tiles : 1][32];
    int step_window[Numbers::steps * 4 + 1];  // of entries, in floats
    int group_window[Numbers::jobs * 8 + 1];
    int2 step_entry[slides ? Numbers::steps * 4 : 1];
    int2 group_entry[slides ? Numbers::jobs * 8 : 1];
    typename Terms::Class of_class[classes];
    RowValues row[rows];
    float bias[rows];
    float weight_scale[halves ? rows : 1];  // what operands are multiplied by, and sums therefore
    float unscale[halves ? rows : 1];
    float back_scale;
    uint32 most;
    uint64 arrived[Numbers::back_buffers];   // planes of dh
    uint64 released[Numbers::back_buffers];  // by threads that are done with them
    union {
      Passes passes;
      Back back_window;
    };
  };

  const Parameters& p;
  Shared& s;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int quad = threadIdx.x % 32 / 4;
  const int in_quad = threadIdx.x % 4;

  __device__ __forceinline__ ThinGradients(const Parameters& parameters, Shared& shared)
      : p(parameters), s(shared) {}

  // dh in the ring: positions of a sample as they lie in the output, all channels of one together; of halves
  // channels c and c + 8 of a tile of rows side by side.
  static constexpr __device__ int ring_stride(int d) {
    const int row = static_cast<int>(C::output_size(2)) * rows;
    return d == 2 ? rows : d == 1 ? row : row * static_cast<int>(C::output_size(1));
  }
  static constexpr __device__ int64 ring_sample() {
    return static_cast<int64>(ring_stride(0)) * C::output_size(0);
  }
  __device__ __forceinline__ Operand* ring_of(int64 n) const {
    return static_cast<Operand*>(p.ring) + n % p.ring_samples * ring_sample();
  }

  // What x and dh of a sample are multiplied by; 1 where operands are no halves.
  struct SampleScales {
    float x = 1.0f;
    float dh = 1.0f;
  };
  __device__ __forceinline__ SampleScales scales_of(int64 n, bool has_dh) const {
    SampleScales own;
    if constexpr (halves) {
      own.x = load_shared_by_blocks(p.scales + 2 * n);
      if (has_dh) own.dh = load_shared_by_blocks(p.scales + 2 * n + 1);
    }
    return own;
  }

  // Of the window: input channels of a position, as f32 or two halves in a word.
  struct alignas(vector * sizeof(Operand)) Vector {
    conditional<halves, uint32, float> of[vector * sizeof(Operand) / 4];
  };
};

}  // namespace onepass
