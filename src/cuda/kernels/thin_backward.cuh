// The gradients of a thin convolution and all that follows it, the convolution computed anew where its output
// is needed.
//
// With h the convolution's output, dh its gradient, z the norm's output and M elements in a slab:
//   pass 1   x -> h; dy -> dz; for each channel the sums of dz, of dz xhat and of what the after-chain reads.
//            The last block of a sample merges them to the slabs' means over M of gamma dz and gamma dz xhat
//   pass 2   x -> h -> dh as in tail_backward.cuh, a class of a tile in shared memory at a time;
//            dweight[o, term] += sum over positions dh[o, q] x[term, q] by tensor cores; dh to the ring
//   pass 3   dx: rows D[(input channel, last tap), q] = sum over outer taps and o of w dh[o, q] by tensor
//            cores, shifted and added to dx[input channel, i] as they leave
// Pass 1 is left out without a norm, pass 3 where dx is not wanted, products that nobody wants in pass 2.
//
// Work is taken by ticket, sample after sample: pass 1 of sample n, pass 2 of an earlier and pass 3 of a
// still earlier one, so that dy and dh come from the second-level cache; blocks wait only for lower tickets.
// The ring has dh of a few samples: nothing of the convolution's size is in memory. Gradients of weights
// leave as one part for each ticket and are added by a second launch (ThinReduce), in double and in order.
//
// Operands of products are tf32: rounded, exact (of 16 bits), or split in two with three products (strict
// f32, at most 64 terms in the tensor core). dh is rounded as an operand is. Moves x and dy twice, dh once
// each way through the second-level cache, dx once.
#pragma once

#include "thin.cuh"

namespace onepass {

template <int Count>
struct ThinBackwardParameters {
  const void* input;
  const void* output_gradient;
  const void* output;  // or null; read where it makes pass 1 superfluous
  const float* statistics;
  uint32* control;  // zero: a ticket; for each sample arrivals of pass 1, a flag, arrivals of passes 2 and 3
  uint32* columns;  // zero: arrivals of ThinReduce
  float* first_parts;   // [batch][segments][channels][sums of pass 1]
  float* second_parts;  // [batch][segments][channels][sums of pass 2]
  float* slab_sums;     // [batch][groups][2]
  float* weight_parts;  // [batch][segments][units][128]
  double* slices;       // of ThinReduce
  float* ring;          // [ring_samples][channels][rows of the output][classes of columns][ring_cells]
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

// D += A B of tf32, 16 x 8 x 8.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const uint4& a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// x = high + low, both tf32, up to 2^-22 of it.
__device__ __forceinline__ void split_tf32(float x, float& high, float& low) {
  high = round_to_tf32(x);
  low = round_to_tf32(x - high);
}
__device__ __forceinline__ void split_tf32(const uint4& x, uint4& high, uint4& low) {
  float h[4], l[4];
  split_tf32(__uint_as_float(x.x), h[0], l[0]);
  split_tf32(__uint_as_float(x.y), h[1], l[1]);
  split_tf32(__uint_as_float(x.z), h[2], l[2]);
  split_tf32(__uint_as_float(x.w), h[3], l[3]);
  high = {__float_as_uint(h[0]), __float_as_uint(h[1]), __float_as_uint(h[2]), __float_as_uint(h[3])};
  low = {__float_as_uint(l[0]), __float_as_uint(l[1]), __float_as_uint(l[2]), __float_as_uint(l[3])};
}

// Sums of products. Split ones are moved to the CUDA cores' f32 after every 64 terms.
template <bool splits, int Count>
struct ProductSums {
  static constexpr int steps_in_core = 8;
  float total[Count][4] = {};
  float part[splits ? Count : 1][4] = {};
  int steps = 0;

  __device__ __forceinline__ void promote() {
    if constexpr (splits) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          total[i][r] += part[i][r];
          part[i][r] = 0.0f;
        }
      }
    }
  }
  // A step of 8 terms: `a` rounded or, where it is split, as two; b as it is in memory.
  __device__ __forceinline__ void add(const uint4 (&a)[splits ? 2 : 1], const float (&b)[Count][2]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if constexpr (splits) {
        float high[2], low[2];
        split_tf32(b[i][0], high[0], low[0]);
        split_tf32(b[i][1], high[1], low[1]);
        multiply_tf32(part[i], a[1], high[0], high[1]);
        multiply_tf32(part[i], a[0], low[0], low[1]);
        multiply_tf32(part[i], a[0], high[0], high[1]);
      } else {
        multiply_tf32(total[i], a[0], b[i][0], b[i][1]);
      }
    }
    if constexpr (splits) {
      if (++steps == steps_in_core) {
        promote();
        steps = 0;
      }
    }
  }
  __device__ __forceinline__ void finish() { promote(); }
};

// The convolution's terms as steps of 8, class after class.
template <class Convolution, class Numbers>
struct GradientTerms {
  using C = Convolution;
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr int row_tiles = (C::channels + 15) / 16;
  static constexpr int weight_stride =
      C::transposed ? C::taps : C::in_channels * C::taps;  // of an output channel

  struct Class {
    int step;  // the first
    int steps;
    int slot;   // of the first of its units' sums in shared memory
    int parts;  // into which a unit's positions are cut
  };

  // Terms (input channel, taps) of a class with the last tap running fastest.
  struct Term {
    int weight;  // its index without the output channel's, -1 where it fills up a step
    int window;  // from the window's element of a position with j = 0
  };

  static __device__ __forceinline__ int terms_of(const ThinClass<C>& own) {
    return C::in_channels * own.count[0] * own.count[1] * own.count[2];
  }

  static __device__ void find_classes(Class* classes_found) {
    int step = 0, slot = 0;
    for (int i = 0; i < classes; ++i) {
      const int steps = (terms_of(ThinClass<C>(i)) + 7) / 8;
      const int units = steps * row_tiles;
      int parts = units > 0 ? Numbers::warps / units : 1;
      parts = parts < 1 ? 1 : parts < Numbers::most_parts ? parts : Numbers::most_parts;
      classes_found[i] = {step, steps, slot, parts};
      step += steps;
      slot += units * parts;
    }
  }

  // The class that has step `step`.
  static __device__ int class_of(const Class* found, int step) {
    int i = 0;
    while (step >= found[i].step + found[i].steps) ++i;
    return i;
  }

  static __device__ Term term(const Class* found, int index) {
    const int i = class_of(found, index / 8);
    const ThinClass<C> own(i);
    const int terms = terms_of(own);
    const int within = index - found[i].step * 8;
    int rest = within < terms ? within : terms - 1;
    int m[3];
    m[2] = rest % own.count[2];
    rest /= own.count[2];
    m[1] = rest % own.count[1];
    rest /= own.count[1];
    m[0] = rest % own.count[0];
    const int channel = rest / own.count[0];
    int tap = 0;
    int window = channel;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      tap = tap * static_cast<int>(C::kernel(d)) + own.first[d] + m[d] * static_cast<int>(C::tap_step(d));
      window =
          window * Numbers::window(d) + own.base[d] + m[d] * static_cast<int>(C::delta(d)) - Numbers::low(d);
    }
    const int weight = C::transposed ? channel * C::channels * C::taps + tap : channel * C::taps + tap;
    return {within < terms ? weight : -1, window};
  }
};

template <class Convolution, class Tail, class Numbers>
struct ThinBackward {
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
  static constexpr int spans = Numbers::spans;  // of 8 positions that a warp has at a time
  static constexpr int box = Numbers::tile(0) * Numbers::tile(1) * Numbers::tile(2);
  static constexpr int box_steps = (box + 7) / 8;
  static constexpr int chunks = (box_steps + spans - 1) / spans;
  // Whether the spans of a chunk are neighbours in a row: then one address serves them all.
  static constexpr bool in_row = Numbers::tile(2) % (spans * 8) == 0;
  static constexpr bool splits = Numbers::splits;
  static constexpr int parts = splits ? 2 : 1;  // of an operand

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
  static constexpr int output_steps = (channels + 7) / 8;
  static constexpr int back_steps = static_cast<int>(C::kernel(0) * C::kernel(1)) * output_steps;

  struct alignas(16) Position {
    int window;  // in the window of x
    int output;  // in a channel of the output, from the tile's first
    int ring;    // the same in the ring
    uint32 j;    // in the tile, ten bits a dimension; the highest bit: not one of the tile
  };
  struct alignas(16) RowValues {
    float mean, rstd, gamma, beta;
    float scale, product, sum;  // dh = scale dz + product xhat + sum
    float dy;                   // where the block ends in a mean
  };
  struct Passes {
    alignas(16) float window[Numbers::window_floats];
    alignas(16) float dh[classes_x][rows][Numbers::dh_pitch];
    float4 weight[Numbers::weight_slots][32];
  };
  struct Back {
    alignas(
        16) float ring[Numbers::back_buffers][Numbers::back_window(1)][output_steps * 8][Numbers::back_pitch];
    alignas(16) float product[2][Numbers::back_tile(1)][column_rows][Numbers::product_pitch];
  };
  struct Shared {
    uint4 weight[parts][Numbers::steps * row_tiles + 1][32];
    uint4 back[parts][(Numbers::wants_input ? back_steps * column_tiles : 0) + 1][32];
    Position position[chunks * spans * 8];
    typename Terms::Term term[Numbers::steps * 8 + 1];
    int2 pair[Numbers::steps * 4 + 1];  // windows of the two terms of a lane in a step
    typename Terms::Class of_class[classes];
    RowValues row[rows];
    float bias[rows];
    float sum[warps][rows][most_sums > 0 ? most_sums : 1];
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

  // --- What does not change ---
  __device__ __forceinline__ float weight(int o, int index) const {
    if (o >= channels || index < 0) return 0.0f;
    float value = load_one<typename C::Weight>(p.parameter[0], o * Terms::weight_stride + index);
    if constexpr (C::rounds_to_tf32) value = round_to_tf32(value);
    return value;
  }

  __device__ __forceinline__ void put_weights(uint4 (&to)[32], uint4 (&low)[32], int at,
                                              const float (&w)[4]) const {
    const uint4 bits{__float_as_uint(w[0]), __float_as_uint(w[1]), __float_as_uint(w[2]),
                     __float_as_uint(w[3])};
    if constexpr (splits) {
      split_tf32(bits, to[at], low[at]);
    } else {
      to[at] = bits;
    }
  }

  __device__ void prepare() const {
    if (threadIdx.x == 0) Terms::find_classes(s.of_class);
    for (int f = threadIdx.x; f < chunks * spans * 8; f += threads) {
      const int within = f < box ? f : 0;
      const int j2 = within % Numbers::tile(2);
      const int j1 = within / Numbers::tile(2) % Numbers::tile(1);
      const int j0 = within / (Numbers::tile(2) * Numbers::tile(1));
      Position own;
      own.window =
          (j0 * static_cast<int>(C::step(0)) * Numbers::window(1) + j1 * static_cast<int>(C::step(1))) *
              Numbers::window(2) +
          j2 * static_cast<int>(C::step(2));
      own.output = j0 * static_cast<int>(C::classes(0) * C::stride(2)) +
                   j1 * static_cast<int>(C::classes(1) * C::stride(3)) +
                   j2 * static_cast<int>(C::classes(2) * C::stride(4));
      own.ring = j0 * static_cast<int>(C::classes(0)) * ring_stride(0) +
                 j1 * static_cast<int>(C::classes(1)) * ring_stride(1) + j2;
      own.j = static_cast<uint32>(j0 << 20 | j1 << 10 | j2) | (f < box ? 0u : 1u << 31);
      s.position[f] = own;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Numbers::steps * 8; i += threads) s.term[i] = Terms::term(s.of_class, i);
    __syncthreads();
    for (int i = threadIdx.x; i < Numbers::steps * 4; i += threads) {
      const int first = i / 4 * 8 + i % 4;
      s.pair[i] = int2{s.term[first].window, s.term[first + 4].window};
    }
    for (int i = threadIdx.x; i < Numbers::steps * row_tiles * 32; i += threads) {
      const int step = i / (row_tiles * 32);
      const int o = i / 32 % row_tiles * 16 + i % 32 / 4;
      const int k0 = s.term[step * 8 + i % 4].weight;
      const int k1 = s.term[step * 8 + i % 4 + 4].weight;
      const float w[4] = {weight(o, k0), weight(o + 8, k0), weight(o, k1), weight(o + 8, k1)};
      put_weights(s.weight[0][i / 32], s.weight[parts - 1][i / 32], i % 32, w);
    }
    if constexpr (Numbers::wants_input) {
      for (int i = threadIdx.x; i < back_steps * column_tiles * 32; i += threads) {
        const int row = i / 32 % column_tiles * 16 + i % 32 / 4;
        const int step = i / (column_tiles * 32);
        const int o = step % output_steps * 8 + i % 4;
        const int outer = step / output_steps;  // taps
        const int k0 = back_index(row, outer);
        const int k1 = back_index(row + 8, outer);
        const float w[4] = {weight(o, k0), weight(o, k1), weight(o + 4, k0), weight(o + 4, k1)};
        put_weights(s.back[0][i / 32], s.back[parts - 1][i / 32], i % 32, w);
      }
    }
    for (int o = threadIdx.x; o < rows; o += threads) {
      float value = 0.0f;
      if constexpr (C::has_bias) value = o < channels ? load_one<typename C::Bias>(p.parameter[1], o) : 0.0f;
      s.bias[o] = value;
    }
  }
  // Of row (input channel, last tap) with these outer taps.
  static __device__ __forceinline__ int back_index(int row, int outer) {
    if (row >= column_rows) return -1;
    const int channel = row / column_taps;
    const int tap = outer * column_taps + row % column_taps;
    return C::transposed ? channel * channels * C::taps + tap : channel * C::taps + tap;
  }

  // Of planes and rows; a row has the columns of one class after those of another, as they are written.
  static constexpr __device__ int ring_stride(int d) {
    const int row = classes_x * Numbers::ring_cells;
    return d == 1 ? row : row * static_cast<int>(C::output_size(1));
  }
  static constexpr __device__ int64 ring_channel() {
    return static_cast<int64>(ring_stride(0)) * C::output_size(0);
  }

  // --- Passes 1 and 2 ---
  struct Tile {
    int64 n;
    int origin[3];  // in positions of a class
    __device__ __forceinline__ Tile(int64 sample, int index) : n(sample) {
      origin[2] = index % Numbers::tiles(2) * Numbers::tile(2);
      origin[1] = index / Numbers::tiles(2) % Numbers::tiles(1) * Numbers::tile(1);
      origin[0] = index / (Numbers::tiles(2) * Numbers::tiles(1)) * Numbers::tile(0);
    }
  };

  template <bool second>
  __device__ __forceinline__ void load_rows(int64 n) const {
    for (int c = threadIdx.x; c < rows; c += threads) {
      RowValues own{0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
      if (c < channels) {
        if constexpr (Tail::has_norm) {
          const int64 slab = n * groups + c / Tail::group_channels;
          own.mean = p.statistics[2 * slab];
          own.rstd = p.statistics[2 * slab + 1];
          own.gamma = Tail::weight(p, c);
          own.beta = Tail::bias(p, c);
          if constexpr (second) {
            own.scale = own.rstd * own.gamma;
            own.sum = -own.rstd * load_shared_by_blocks(p.slab_sums + 2 * slab);
            own.product = -own.rstd * load_shared_by_blocks(p.slab_sums + 2 * slab + 1);
          }
        }
        if constexpr (Tail::has_mean) {
          constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
          const int64 index = n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride;
          own.dy = load_one<typename Tail::OutputGradient>(p.output_gradient, index) * per_element;
        }
      }
      s.row[c] = own;
    }
  }

  // A warp for each row.
  __device__ __forceinline__ void load_window(const Tile& tile) const {
    constexpr int width = Numbers::window(2);
    constexpr int all_rows = Numbers::window_floats / width;
    constexpr int vectors = (width + 31) / 32;
    int first[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) first[d] = tile.origin[d] * static_cast<int>(C::step(d)) + Numbers::low(d);
    const char* sample = static_cast<const char*>(p.input) + tile.n * C::input_stride(0) * Input::bytes;
#pragma unroll 2
    for (int row = warp; row < all_rows; row += warps) {
      const int i1 = first[1] + row % Numbers::window(1);
      const int i0 = first[0] + row / Numbers::window(1) % Numbers::window(0);
      const int c = row / (Numbers::window(1) * Numbers::window(0));
      const bool inside = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                          static_cast<unsigned>(i1) < static_cast<unsigned>(C::input_size(1));
      const int offset = c * static_cast<int>(C::input_stride(1)) +
                         i0 * static_cast<int>(C::input_stride(2)) +
                         i1 * static_cast<int>(C::input_stride(3));
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        const int column = v * 32 + lane;
        const int i2 = first[2] + column;
        float value = 0.0f;
        if (inside && static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2))) {
          value = load_one<Input>(sample, offset + i2 * static_cast<int>(C::input_stride(4)));
          if constexpr (C::rounds_to_tf32) value = round_to_tf32(value);
        }
        if (width % 32 == 0 || column < width) s.passes.window[row * width + column] = value;
      }
    }
  }

  template <int Count>
  struct RowSums {
    float value[row_tiles][2][Count > 0 ? Count : 1] = {};
  };

  // Where a warp's chunk of positions lies: the columns of products that the lane loads, and the pairs of
  // positions whose sums it has.
  struct Where {
    static constexpr int count = in_row ? 1 : spans;
    int base[count];
    Position at[count][2];
    bool valid[spans][2];

    __device__ __forceinline__ int window(int i) const {
      return in_row ? base[0] + i * 8 * static_cast<int>(C::step(2)) : base[in_row ? 0 : i];
    }
    __device__ __forceinline__ int output(int i, int k) const {
      constexpr int further = 8 * static_cast<int>(C::classes(2) * C::stride(4));
      return in_row ? at[0][k].output + i * further : at[in_row ? 0 : i][k].output;
    }
    __device__ __forceinline__ int ring(int i, int k) const {
      return in_row ? at[0][k].ring + i * 8 : at[in_row ? 0 : i][k].ring;
    }
  };

  __device__ __forceinline__ void find(Where& where, int chunk, const int (&left)[3]) const {
#pragma unroll
    for (int i = 0; i < Where::count; ++i) {
      const Position* group = s.position + (chunk * spans + i) * 8;
      where.base[i] = group[quad].window;
      where.at[i][0] = group[2 * in_quad];
      where.at[i][1] = group[2 * in_quad + 1];
    }
#pragma unroll
    for (int i = 0; i < spans; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32 j = where.at[in_row ? 0 : i][k].j;
        where.valid[i][k] = static_cast<int>(j) >= 0 && static_cast<int>(j >> 20) < left[0] &&
                            static_cast<int>(j >> 10 & 1023u) < left[1] &&
                            static_cast<int>(j & 1023u) + (in_row ? i * 8 : 0) < left[2];
      }
    }
  }

  template <int row_tile>
  __device__ __forceinline__ void convolve(const typename Terms::Class& own, const Where& where,
                                           float (&h)[spans][4]) const {
    ProductSums<splits, spans> sums;
#pragma unroll 2
    for (int k = 0; k < own.steps; ++k) {
      const int step = own.step + k;
      const auto [first, other] = s.pair[step * 4 + in_quad];
      uint4 a[parts];
#pragma unroll
      for (int i = 0; i < parts; ++i) a[i] = s.weight[i][step * row_tiles + row_tile][lane];
      float b[spans][2];
#pragma unroll
      for (int i = 0; i < spans; ++i) {
        b[i][0] = s.passes.window[first + where.window(i)];
        b[i][1] = s.passes.window[other + where.window(i)];
      }
      sums.add(a, b);
    }
    sums.finish();
#pragma unroll
    for (int i = 0; i < spans; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) h[i][r] = sums.total[i][r] + s.bias[row_tile * 16 + r / 2 * 8 + quad];
    }
  }

  // One element: its sums, and in pass 2 the gradient of the convolution's output.
  template <bool second, int Count>
  __device__ __forceinline__ float element(const RowValues& row, const float* before_values,
                                           const float* after_values, float x, float g, int64 index,
                                           float (&sum)[Count]) const {
    typename Before::template Tensors<1> before;
    typename After::template Tensors<1> after;
    before.load(p, index);
    after.load(p, index);
    typename Before::template TensorGradients<1> before_gradients;
    typename After::template TensorGradients<1> after_gradients;
    float of_after[After::channel_operands > 0 ? After::channel_operands : 1];
    float of_before[Before::channel_operands > 0 ? Before::channel_operands : 1];
    float dh;
    if constexpr (!Tail::has_norm) {
      dh = After::gradient(x, after_values, after, 0, g, of_after, after_gradients);
#pragma unroll
      for (int i = 0; i < chain_sums; ++i) sum[i] += of_after[i];
    } else {
      const float h = Before::value(x, before_values, before, 0);
      const float xhat = (h - row.mean) * row.rstd;
      const float z = fmaf(xhat, row.gamma, row.beta);
      const float dz = After::gradient(z, after_values, after, 0, g, of_after, after_gradients);
      if constexpr (!second) {
        sum[0] += dz;
        sum[1] = fmaf(dz, xhat, sum[1]);
#pragma unroll
        for (int i = 0; i < after_sums; ++i) sum[2 + i] += of_after[i];
        return 0.0f;
      }
      if constexpr (Numbers::may_read_output) sum[second_sums - 1] += xhat;
      const float to_chain = fmaf(row.scale, dz, fmaf(xhat, row.product, row.sum));
      dh = Before::gradient(x, before_values, before, 0, to_chain, of_before, before_gradients);
#pragma unroll
      for (int i = 0; i < chain_sums; ++i) sum[i] += of_before[i];
    }
    if constexpr (second) {
      if constexpr (Numbers::wants_bias) sum[chain_sums] += dh;
      before_gradients.store(p, index);
      after_gradients.store(p, index);
    }
    return dh;
  }

  template <bool second, int row_tile, class Sums>
  __device__ __forceinline__ void take(const Tile& tile, const typename Terms::Class& own, int class_x,
                                       int chunk, const Where& where, int64 output, int64 ring,
                                       Sums& sums) const {
    using Gradient = typename Tail::OutputGradient;
    float g[spans][4];
    int64 begin[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = row_tile * 16 + half * 8 + quad;
      begin[half] = output + c * C::stride(1);
      if constexpr (!Tail::has_mean) {
#pragma unroll
        for (int i = 0; i < spans; ++i) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const bool in_range = where.valid[i][k] && (channels % 16 == 0 || c < channels);
            g[i][half * 2 + k] =
                in_range ? load_one<Gradient>(p.output_gradient, begin[half] + where.output(i, k)) : 0.0f;
          }
        }
      }
    }
    float h[spans][4];
    convolve<row_tile>(own, where, h);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = row_tile * 16 + half * 8 + quad;
      const bool in_range = channels % 16 == 0 || c < channels;
      const RowValues row = s.row[c];
      float before_values[Before::channel_operands > 0 ? Before::channel_operands : 1];
      float after_values[After::channel_operands > 0 ? After::channel_operands : 1];
      Before::load_channel(p, tile.n, in_range ? c : 0, before_values);
      After::load_channel(p, tile.n, in_range ? c : 0, after_values);
#pragma unroll
      for (int i = 0; i < spans; ++i) {
        float dh[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (where.valid[i][k] && in_range) {
            dh[k] = element<second>(row, before_values, after_values, h[i][half * 2 + k],
                                    Tail::has_mean ? row.dy : g[i][half * 2 + k],
                                    begin[half] + where.output(i, k), sums.value[row_tile][half]);
            if constexpr (second && !splits) dh[k] = round_to_tf32(dh[k]);
          }
        }
        if constexpr (second && Numbers::wants_input) {
          float* to = p.ring + (ring + c * ring_channel());
          if constexpr (in_row) {
            // A row of cells ends on 16 bytes: there is room for a pair whose second is beyond the output.
            if (where.valid[i][0] && in_range)
              *reinterpret_cast<float2*>(to + where.ring(i, 0)) = float2{dh[0], dh[1]};
          } else {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              if (where.valid[i][k] && in_range) to[where.ring(i, k)] = dh[k];
            }
          }
        }
        if constexpr (second && Numbers::wants_weight) {
          *reinterpret_cast<float2*>(&s.passes.dh[class_x][c][(chunk * spans + i) * 8 + 2 * in_quad]) =
              float2{dh[0], dh[1]};
        }
      }
    }
  }

  // The classes of a row together: what they read of dy lies side by side.
  template <bool second, class Sums>
  __device__ __forceinline__ void classes_of_tile(const Tile& tile, int first_class, Sums& sums) const {
    const int64 ring_sample =
        (Numbers::wants_input ? tile.n % p.ring_samples : 0) * channels * ring_channel();
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += warps) {
#pragma unroll 1
      for (int x = 0; x < classes_x; ++x) {
        const ThinClass<C> of_class(first_class + x);
        const typename Terms::Class own = s.of_class[first_class + x];
        int left[3];
        int q[3];
        int64 output = tile.n * C::stride(0);
#pragma unroll
        for (int d = 0; d < 3; ++d) {
          left[d] = of_class.positions[d] - tile.origin[d];
          q[d] = of_class.r[d] + static_cast<int>(C::classes(d)) * tile.origin[d];
          output += q[d] * C::stride(d + 2);
        }
        const int64 ring = ring_sample + q[0] * ring_stride(0) + q[1] * ring_stride(1) +
                           x * Numbers::ring_cells + tile.origin[2];
        Where where;
        find(where, chunk, left);
        take<second, 0>(tile, own, x, chunk, where, output, ring, sums);
        if constexpr (row_tiles > 1) take<second, 1>(tile, own, x, chunk, where, output, ring, sums);
        if constexpr (row_tiles > 2) take<second, 2>(tile, own, x, chunk, where, output, ring, sums);
        if constexpr (row_tiles > 3) take<second, 3>(tile, own, x, chunk, where, output, ring, sums);
      }
    }
  }

  static __device__ __forceinline__ int jobs_of(const typename Terms::Class& own) {
    constexpr int at_once = Numbers::units_at_once;
    return (own.steps + at_once - 1) / at_once * row_tiles * own.parts;
  }

  // dweight of a class's terms: rows are output channels, columns 8 terms, and the sum is over the positions
  // whose dh lies in shared memory. A job is `at_once` units of 8 terms that share the rows.
  __device__ __forceinline__ void multiply_weights(const typename Terms::Class& own, int class_x,
                                                   int first_warp) const {
    constexpr int at_once = Numbers::units_at_once;
    const int jobs = jobs_of(own);
#pragma unroll 1
    for (int job = (warp + warps - first_warp) % warps; job < jobs; job += warps) {
      const int part = job % own.parts;
      const int row_tile = job / own.parts % row_tiles;
      const int first = job / own.parts / row_tiles * at_once;
      int term[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int step = first + i < own.steps ? first + i : own.steps - 1;
        term[i] = s.term[(own.step + step) * 8 + quad].window;
      }
      ProductSums<splits, at_once> sums;
      const float* dh = s.passes.dh[class_x][row_tile * 16 + quad] + 2 * in_quad;
#pragma unroll 2
      for (int k = part; k < box_steps; k += own.parts) {
        const int first_window = s.position[k * 8 + 2 * in_quad].window;
        const int other_window =
            in_row ? first_window + static_cast<int>(C::step(2)) : s.position[k * 8 + 2 * in_quad + 1].window;
        const float2 upper = *reinterpret_cast<const float2*>(dh + k * 8);
        const float2 lower = *reinterpret_cast<const float2*>(dh + 8 * Numbers::dh_pitch + k * 8);
        const uint4 bits{__float_as_uint(upper.x), __float_as_uint(lower.x), __float_as_uint(upper.y),
                         __float_as_uint(lower.y)};
        uint4 a[parts];
        if constexpr (splits) {
          split_tf32(bits, a[0], a[1]);
        } else {
          a[0] = bits;
        }
        float b[at_once][2];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          b[i][0] = s.passes.window[term[i] + first_window];
          b[i][1] = s.passes.window[term[i] + other_window];
        }
        sums.add(a, b);
      }
      sums.finish();
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (first + i >= own.steps) break;
        float4& total =
            s.passes.weight[own.slot + (row_tile * own.steps + first + i) * own.parts + part][lane];
        const float4 before = total;
        total = {before.x + sums.total[i][0], before.y + sums.total[i][1], before.z + sums.total[i][2],
                 before.w + sums.total[i][3]};
      }
    }
  }

  // The unit's parts in order, to memory.
  __device__ __forceinline__ void store_weights(int64 ticket) const {
    constexpr int units = Numbers::steps * row_tiles;
    for (int i = threadIdx.x; i < units * 32; i += threads) {
      const int unit = i / 32;
      const int index = Terms::class_of(s.of_class, unit / row_tiles);
      const typename Terms::Class own = s.of_class[index];
      const float4* from = s.passes.weight[own.slot + (unit - own.step * row_tiles) * own.parts] + i % 32;
      float4 sum = from[0];
      for (int part = 1; part < own.parts; ++part) {
        const float4 next = from[part * 32];
        sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
      }
      reinterpret_cast<float4*>(p.weight_parts)[ticket * units * 32 + i] = sum;
    }
  }

  template <int Count, class Sums>
  __device__ __forceinline__ void store_sums(Sums& sums, float* to) const {
    if constexpr (Count > 0) {
#pragma unroll
      for (int i = 0; i < row_tiles * 2; ++i) {
#pragma unroll
        for (int k = 0; k < Count; ++k) {
          const float sum = lanes_sum<4>(sums.value[i / 2][i % 2][k]);
          if (in_quad == 0) s.sum[warp][i * 8 + quad][k] = sum;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < channels * Count; i += threads) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += s.sum[w][i / Count][i % Count];
        to[i] = total;
      }
    }
  }

  template <bool second>
  __device__ __forceinline__ void pass(int64 n, int segment) const {
    constexpr int count = second ? second_sums : first_sums;
    RowSums<count> sums;
    __syncthreads();  // the one before is done with shared memory
    load_rows<second>(n);
    if constexpr (second && Numbers::wants_weight) {
      for (int i = threadIdx.x; i < Numbers::weight_slots * 32; i += threads)
        s.passes.weight[i / 32][i % 32] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    const int last = (segment + 1) * Numbers::segment_tiles < Numbers::all_tiles
                         ? (segment + 1) * Numbers::segment_tiles
                         : Numbers::all_tiles;
#pragma unroll 1
    for (int index = segment * Numbers::segment_tiles; index < last; ++index) {
      const Tile tile(n, index);
      load_window(tile);
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < classes; i += classes_x) {
        classes_of_tile<second>(tile, i, sums);
        if constexpr (second && Numbers::wants_weight) {
          __syncthreads();
          int first_warp = 0;  // that has a job of this class, so that those of all classes are spread
#pragma unroll 1
          for (int x = 0; x < classes_x; ++x) {
            const typename Terms::Class own = s.of_class[i + x];
            multiply_weights(own, x, first_warp % warps);
            first_warp += jobs_of(own);
          }
          if constexpr (classes > classes_x) __syncthreads();
        }
      }
      if constexpr (!second || !Numbers::wants_weight || classes == classes_x) __syncthreads();
    }
    const int64 ticket = n * Numbers::segments + segment;
    store_sums<count>(sums, (second ? p.second_parts : p.first_parts) + ticket * channels * count);
    if constexpr (second && Numbers::wants_weight) store_weights(ticket);
  }

  // By the last block of a sample: the slabs' sums.
  __device__ __forceinline__ void finish_slabs(int64 n) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::group_channels * Tail::spatial);
    float* of_channel = &s.sum[0][0][0];
    for (int i = threadIdx.x; i < channels * 2; i += threads) {
      double total = 0.0;
      for (int segment = 0; segment < Numbers::segments; ++segment) {
        total += load_shared_by_blocks(
            p.first_parts + ((n * Numbers::segments + segment) * channels + i / 2) * first_sums + i % 2);
      }
      of_channel[i] = static_cast<float>(total);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < groups * 2; i += threads) {
      float total = 0.0f;
      for (int k = 0; k < Tail::group_channels; ++k) {
        const int c = i / 2 * Tail::group_channels + k;
        total = fmaf(Tail::weight(p, c), of_channel[c * 2 + i % 2], total);
      }
      p.slab_sums[n * groups * 2 + i] = total * per_element;
    }
  }

  // The same of a mean directly behind the norm, from the output alone: dz is dy over the positions, and the
  // mean of gamma xhat is y less beta. The rounding of y moves the slab's sum by 2^-24 of |y|, where dh is
  // rounded to 2^-11.
  __device__ __forceinline__ void finish_slabs_by_output(int64 n) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::group_channels * Tail::spatial);
    for (int i = threadIdx.x; i < groups; i += threads) {
      float sum = 0.0f, product = 0.0f;
      for (int c = i * Tail::group_channels; c < (i + 1) * Tail::group_channels; ++c) {
        const float dy = load_one<typename Tail::OutputGradient>(
            p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride);
        const float y = load_one<typename Tail::Output>(p.output, n * channels + c);
        sum = fmaf(Tail::weight(p, c), dy, sum);
        product = fmaf(dy, y - Tail::bias(p, c), product);
      }
      p.slab_sums[(n * groups + i) * 2] = sum * per_element;
      p.slab_sums[(n * groups + i) * 2 + 1] = product * per_element;
    }
  }

  // --- Pass 3 ---
  static constexpr __device__ int floor_divide(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
  static constexpr __device__ int stride(int d) { return Numbers::conv_stride(d); }
  static constexpr __device__ int padding(int d) { return Numbers::conv_padding(d); }
  static constexpr __device__ int dilation(int d) { return Numbers::conv_dilation(d); }
  static constexpr __device__ int reach(int d) { return (static_cast<int>(C::kernel(d)) - 1) * dilation(d); }
  // Input i and output q meet by tap k where the finer of the two is the coarser times the stride, less the
  // padding, plus k times the dilation. The first and last output that input `i` may meet:
  static __device__ __forceinline__ int first_met(int d, int i) {
    return C::transposed ? i * stride(d) - padding(d)
                         : floor_divide(i + padding(d) - reach(d) + stride(d) - 1, stride(d));
  }
  static __device__ __forceinline__ int last_met(int d, int i) {
    return C::transposed ? i * stride(d) - padding(d) + reach(d) : floor_divide(i + padding(d), stride(d));
  }
  // The output that it meets by tap `k`; -1 where there is none.
  static __device__ __forceinline__ int met(int d, int i, int k) {
    int q;
    if constexpr (C::transposed) {
      q = i * stride(d) - padding(d) + k * dilation(d);
    } else {
      const int distance = i + padding(d) - k * dilation(d);
      if (distance < 0 || (stride(d) > 1 && distance % stride(d) != 0)) return -1;
      q = distance / stride(d);
    }
    return q < static_cast<int>(C::output_size(d)) ? q : -1;
  }
  // The first input plane that output plane `q` may meet, and the tap by which it meets plane `i`, -1 if
  // none.
  static __device__ __forceinline__ int first_plane(int q) {
    return C::transposed ? floor_divide(q + padding(0) - reach(0) + stride(0) - 1, stride(0))
                         : q * stride(0) - padding(0);
  }
  static __device__ __forceinline__ int plane_tap(int q, int i) {
    const int distance = C::transposed ? q + padding(0) - i * stride(0) : i - q * stride(0) + padding(0);
    if (distance < 0 || distance > reach(0) || (dilation(0) > 1 && distance % dilation(0) != 0)) return -1;
    return distance / dilation(0);
  }

  // Where column `column` of channel `o` lies in its row: four neighbouring channels in different banks.
  static constexpr __device__ int ring_column(int o, int column) {
    return Numbers::back_pitch % 32 == 0 ? column ^ (o % 4 * 8) : column;
  }

  __device__ __forceinline__ void load_plane(const float* sample, int plane, int buffer, int first_row,
                                             int first_cell) const {
    constexpr int vectors = classes_x * Numbers::back_cells / 4;
    constexpr int all = Numbers::back_window(1) * output_steps * 8 * vectors;
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += threads) {
      const int column = i % vectors * 4;
      const int o = i / vectors % (output_steps * 8);
      const int row = i / (vectors * output_steps * 8);
      float* to = &s.back_window.ring[buffer][row][o][ring_column(o, column)];
      const int q1 = first_row + row;
      const int cell = first_cell + column % Numbers::back_cells;
      if (q1 < 0 || q1 >= static_cast<int>(C::output_size(1)) || cell >= Numbers::ring_cells) continue;
      if (channels % 8 != 0 && o >= channels) {
        *reinterpret_cast<float4*>(to) = float4{0.0f, 0.0f, 0.0f, 0.0f};
        continue;
      }
      const float* from = sample + o * ring_channel() + plane * ring_stride(0) + q1 * ring_stride(1) +
                          column / Numbers::back_cells * Numbers::ring_cells + cell;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       static_cast<uint32>(__cvta_generic_to_shared(to))),
                   "l"(from)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // A warp's part of pass 3: a row of dx, 16 rows of D and some columns of dh, for all `live` planes of dx
  // that a plane of dh meets.
  static constexpr int live = Numbers::back_live;
  static constexpr int back_at_once = Numbers::back_spans_at_once;
  static constexpr int row_chunks = (Numbers::back_spans + back_at_once - 1) / back_at_once;
  using PlaneSums = ProductSums<splits, back_at_once>;
  struct BackItem {
    int row, tile, chunk;
  };

  __device__ __forceinline__ void multiply_back(PlaneSums (&sums)[live], const BackItem& item, int buffer,
                                                int q0, int plane, int first, int last, int i1,
                                                int first_row) const {
    int tap[live];
#pragma unroll
    for (int i = 0; i < live; ++i) {
      const bool wanted = plane + i >= first && plane + i < last;
      tap[i] = wanted ? plane_tap(q0, plane + i) : -1;
    }
#pragma unroll 1
    for (int k1 = 0; k1 < static_cast<int>(C::kernel(1)); ++k1) {
      const int q1 = met(1, i1, k1);
      if (q1 < 0) continue;
      const auto& rows_of = s.back_window.ring[buffer][q1 - first_row];
#pragma unroll
      for (int k = 0; k < output_steps; ++k) {
        float b[back_at_once][2];
#pragma unroll
        for (int i = 0; i < back_at_once; ++i) {
          const int column = (item.chunk * back_at_once + i) * 8 + quad;
          b[i][0] = rows_of[k * 8 + in_quad][ring_column(in_quad, column)];
          b[i][1] = rows_of[k * 8 + in_quad + 4][ring_column(in_quad, column)];
        }
#pragma unroll
        for (int i = 0; i < live; ++i) {
          if (tap[i] < 0) continue;
          const int step = (tap[i] * static_cast<int>(C::kernel(1)) + k1) * output_steps + k;
          uint4 a[parts];
#pragma unroll
          for (int part = 0; part < parts; ++part)
            a[part] = s.back[part][step * column_tiles + item.tile][lane];
          sums[i].add(a, b);
        }
      }
    }
  }

  __device__ __forceinline__ void put_products(PlaneSums& sums, const BackItem& item, int buffer) const {
    sums.finish();
    const int row = item.tile * 16 + quad;
#pragma unroll
    for (int i = 0; i < back_at_once; ++i) {
      if (item.chunk * back_at_once + i >= Numbers::back_spans) break;
      const int column = (item.chunk * back_at_once + i) * 8 + 2 * in_quad;
      auto& to = s.back_window.product[buffer][item.row];
      if (row < column_rows)
        *reinterpret_cast<float2*>(&to[row][column]) = float2{sums.total[i][0], sums.total[i][1]};
      if (row + 8 < column_rows)
        *reinterpret_cast<float2*>(&to[row + 8][column]) = float2{sums.total[i][2], sums.total[i][3]};
    }
  }

  // A plane of the tile: products of the last taps added where they belong.
  __device__ __forceinline__ void store_plane(int64 n, int plane, int buffer, int y, int x,
                                              int first_cell) const {
    constexpr int tile_1 = Numbers::back_tile(1);
    constexpr int tile_2 = Numbers::back_tile(2);
    const int64 first = n * Numbers::gradient_stride(0) + plane * Numbers::gradient_stride(2);
#pragma unroll 2
    for (int i = threadIdx.x; i < tile_1 * C::in_channels * tile_2; i += threads) {
      const int i2 = x + i % tile_2;
      const int c = i / tile_2 % C::in_channels;
      const int row = i / (tile_2 * C::in_channels);
      if (i2 >= static_cast<int>(C::input_size(2)) || y + row >= static_cast<int>(C::input_size(1))) continue;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < column_taps; ++k) {
        const int q = met(2, i2, k);
        if (q >= 0) {
          const int column = q % classes_x * Numbers::back_cells + q / classes_x - first_cell;
          sum += s.back_window.product[buffer][row][c * column_taps + k][column];
        }
      }
      store_one<typename Tail::InputGradient>(p.input_gradient,
                                              first + c * Numbers::gradient_stride(1) +
                                                  (y + row) * Numbers::gradient_stride(3) +
                                                  i2 * Numbers::gradient_stride(4),
                                              sum);
    }
  }

  __device__ __forceinline__ void back(int64 n, int index) const {
    constexpr int buffers = Numbers::back_buffers;
    const int x = index % Numbers::back_tiles(2) * Numbers::back_tile(2);
    const int y = index / Numbers::back_tiles(2) % Numbers::back_tiles(1) * Numbers::back_tile(1);
    const int z = index / (Numbers::back_tiles(2) * Numbers::back_tiles(1)) * Numbers::back_tile(0);
    const int last_z = z + Numbers::back_tile(0) < static_cast<int>(C::input_size(0))
                           ? z + Numbers::back_tile(0)
                           : static_cast<int>(C::input_size(0));
    const int first_row = first_met(1, y);
    const int first_column = first_met(2, x);
    const int first_cell = first_column < 0 ? 0 : first_column / classes_x & ~3;
    int q_begin = first_met(0, z);
    q_begin = q_begin > 0 ? q_begin : 0;
    int q_end = last_met(0, last_z - 1) + 1;
    q_end = q_end < static_cast<int>(C::output_size(0)) ? q_end : static_cast<int>(C::output_size(0));
    const float* sample = p.ring + n % p.ring_samples * channels * ring_channel();
    const BackItem item{warp / (row_chunks * column_tiles), warp % column_tiles,
                        warp / column_tiles % row_chunks};
    const bool active = item.row < Numbers::back_tile(1) && y + item.row < static_cast<int>(C::input_size(1));
    PlaneSums sums[live];
    __syncthreads();  // the one before is done with shared memory
    if (q_begin < q_end) load_plane(sample, q_begin, 0, first_row, first_cell);
    int plane = q_begin < q_end ? first_plane(q_begin) : z;  // of sums[0]
    int waiting = -1;                                        // the plane whose products wait in shared memory
    const auto store_waiting = [&] {
      if (waiting >= 0) store_plane(n, waiting, waiting % 2, y, x, first_cell);
      waiting = -1;
    };
#pragma unroll 1
    for (int q = q_begin; q < q_end || plane < last_z; ++q) {
      if (q < q_end) {
        const int buffer = buffers > 1 ? (q - q_begin) % buffers : 0;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // the plane is there, and nobody reads the one that the next replaces
        if (buffers > 1 && q + 1 < q_end)
          load_plane(sample, q + 1, (q + 1 - q_begin) % buffers, first_row, first_cell);
        store_waiting();
        if (active) multiply_back(sums, item, buffer, q, plane, z, last_z, y + item.row, first_row);
        if (buffers == 1 && q + 1 < q_end) {
          __syncthreads();
          load_plane(sample, q + 1, 0, first_row, first_cell);
        }
      }
      int next = q + 1 < q_end ? first_plane(q + 1) : last_z;
      next = next < last_z ? next : last_z;
#pragma unroll 1
      for (; plane < next; ++plane) {
        if (plane >= z) {
          if (waiting >= 0) {
            __syncthreads();
            store_waiting();
          }
          if (active) put_products(sums[0], item, plane % 2);
          waiting = plane;
        }
#pragma unroll
        for (int i = 0; i + 1 < live; ++i) sums[i] = sums[i + 1];
        sums[live - 1] = PlaneSums{};
      }
    }
    __syncthreads();
    store_waiting();
  }

  // --- Work ---
  static constexpr int first_tickets = Numbers::has_first ? Numbers::segments : 0;
  static constexpr int second_tickets = Numbers::has_second ? Numbers::segments : 0;
  static constexpr int third_tickets =
      Numbers::wants_input ? Numbers::back_tiles(0) * Numbers::back_tiles(1) * Numbers::back_tiles(2) : 0;

  __device__ __forceinline__ uint32* counters(int64 n) const { return p.control + 4 + n * 4; }

  __device__ __forceinline__ void arrive(uint32* counter) const {
    __syncthreads();
    if (threadIdx.x == 0) count_up(counter);
  }

  __device__ __forceinline__ void run() const {
    constexpr int of_sample = first_tickets + second_tickets + third_tickets;
    const int64 first_lag = Numbers::has_first ? p.first_lag : 0;
    const int64 second_lag = Numbers::wants_input ? p.second_lag : 0;
    const int64 tickets = (p.batch + first_lag + second_lag) * of_sample;
    prepare();
    Tickets own(p.control);
#pragma unroll 1
    for (int64 ticket = own.take(); ticket < tickets; ticket = own.take()) {
      const auto sample = static_cast<int64>(static_cast<uint32>(ticket) / of_sample);
      int item = static_cast<int>(static_cast<uint32>(ticket) % of_sample);
      if (item < first_tickets) {
        if constexpr (first_tickets > 0) {
          if (sample >= p.batch) continue;
          if (Numbers::may_read_output && p.output != nullptr) {
            if (item > 0) continue;
            finish_slabs_by_output(sample);
            publish(counters(sample) + 1, 1u);
            continue;
          }
          pass<false>(sample, item);
          if (arrives_last(counters(sample), Numbers::segments)) {
            finish_slabs(sample);
            publish(counters(sample) + 1, 1u);
          }
        }
        continue;
      }
      item -= first_tickets;
      if (item < second_tickets) {
        if constexpr (second_tickets > 0) {
          const int64 n = sample - first_lag;
          if (n < 0 || n >= p.batch) continue;
          if (threadIdx.x == 0) {
            if (Numbers::has_first) wait_for(counters(n) + 1, 1u);
            if (Numbers::wants_input && n >= p.ring_samples)
              wait_for(counters(n - p.ring_samples) + 3, third_tickets);
          }
          pass<true>(n, item);
          if constexpr (Numbers::wants_input) arrive(counters(n) + 2);
        }
        continue;
      }
      if constexpr (third_tickets > 0) {
        const int64 n = sample - first_lag - second_lag;
        if (n < 0 || n >= p.batch) continue;
        if (threadIdx.x == 0) wait_for(counters(n) + 2, second_tickets);
        back(n, item - second_tickets);
        arrive(counters(n) + 3);
      }
    }
  }
};

// The second launch: sums over the batch. Blocks of 32 elements of dweight and a slice of the parts each,
// then one for each channel, then one for slopes that all channels share.
template <class Convolution, class Tail, class Numbers>
struct ThinReduce {
  using C = Convolution;
  using Backward = ThinBackward<Convolution, Tail, Numbers>;
  using Parameters = typename Backward::Parameters;
  using Terms = typename Backward::Terms;
  static constexpr int threads = Numbers::threads;
  static constexpr int warps = Numbers::warps;
  static constexpr int slices = Numbers::slices;
  static constexpr int units = Numbers::steps * Backward::row_tiles;
  static constexpr int columns = Numbers::wants_weight ? units * 4 : 0;
  static constexpr int weight_blocks = columns * slices;

  const Parameters& p;

  // The sum of `count` values, those of a thread in order, then the threads'.
  template <class Value>
  __device__ __forceinline__ double sum_of(int64 count, Value&& value) const {
    __shared__ double all[threads];
    double own = 0.0;
#pragma unroll 4
    for (int64 i = threadIdx.x; i < count; i += threads) own += value(i);
    __syncthreads();
    all[threadIdx.x] = own;
    for (int half = threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) all[threadIdx.x] += all[threadIdx.x + half];
    }
    __syncthreads();
    return all[0];
  }

  // Sum `i` of a channel in one part of a sample: those of pass 1, then those of pass 2.
  __device__ __forceinline__ float part(int64 index, int c, int i) const {
    const float* second = p.second_parts + (index * Backward::channels + c) * Backward::second_sums;
    if (i >= Backward::first_sums) return __ldg(second + i - Backward::first_sums);
    if constexpr (Numbers::may_read_output) {
      constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
      const int64 n = index / Numbers::segments;
      const float dy = load_one<typename Tail::OutputGradient>(
          p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride);
      if (i == 0) return index % Numbers::segments == 0 ? dy : 0.0f;
      return dy * per_element * __ldg(second + Backward::second_sums - 1);
    }
    return __ldg(p.first_parts + (index * Backward::channels + c) * Backward::first_sums + i);
  }

  __device__ __forceinline__ float channel_total(int c, int i) const {
    return static_cast<float>(sum_of(p.batch * Numbers::segments, [&](int64 k) { return part(k, c, i); }));
  }

  __device__ __forceinline__ void channel(int c) const {
    const auto of_sample = [&](int64 n, int i) {
      double sum = 0.0;
      for (int segment = 0; segment < Numbers::segments; ++segment)
        sum += part(n * Numbers::segments + segment, c, i);
      return static_cast<float>(sum);
    };
    Tail::store_channel_gradients(
        p, c, [&](int i) { return channel_total(c, i); }, of_sample);
    if constexpr (Numbers::wants_bias) {
      const float sum = channel_total(c, Backward::first_sums + Backward::chain_sums);
      if (threadIdx.x == 0) store_one<typename Numbers::BiasGradient>(p.gradient[1], c, sum);
    }
  }

  __device__ __forceinline__ void singles() const {
    Tail::for_each_single([&](int i, auto store) {
      const double sum = sum_of(p.batch * Numbers::segments * Backward::channels, [&](int64 k) {
        return part(k / Backward::channels, static_cast<int>(k % Backward::channels), i);
      });
      if (threadIdx.x == 0) store(static_cast<float>(sum), p);
    });
  }

  // Element `e` of a ticket's part: unit, lane, one of four.
  __device__ __forceinline__ void store_weight(int e, double sum) const {
    __shared__ typename Terms::Class of_class[Terms::classes];
    __syncwarp();
    if (threadIdx.x == 0) Terms::find_classes(of_class);
    __syncwarp();
    const int unit = e / 128;
    const int lane = e / 4 % 32;
    const int r = e % 4;
    const int index = Terms::class_of(of_class, unit / Backward::row_tiles);
    const int within = unit - of_class[index].step * Backward::row_tiles;
    const int step = of_class[index].step + within % of_class[index].steps;
    const int o = within / of_class[index].steps * 16 + lane / 4 + r / 2 * 8;
    const auto term = Terms::term(of_class, step * 8 + lane % 4 * 2 + r % 2);
    if (o < Backward::channels && term.weight >= 0)
      store_one<typename Numbers::WeightGradient>(p.gradient[0], o * Terms::weight_stride + term.weight,
                                                  static_cast<float>(sum));
  }

  __device__ __forceinline__ void weights(int column, int slice) const {
    __shared__ double all[warps][32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64 parts = p.batch * Numbers::segments;
    const int64 first = parts * slice / slices;
    const int64 last = parts * (slice + 1) / slices;
    double sum = 0.0;
#pragma unroll 4
    for (int64 i = first + warp; i < last; i += warps)
      sum += __ldg(p.weight_parts + (i * units * 128 + column * 32 + lane));
    all[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
      double total = 0.0;
      for (int w = 0; w < warps; ++w) total += all[w][lane];
      p.slices[(column * slices + slice) * 32 + lane] = total;
    }
    if (arrives_last(p.columns + column, slices) && warp == 0) {
      double total = 0.0;
      for (int i = 0; i < slices; ++i) total += __ldcg(p.slices + (column * slices + i) * 32 + lane);
      store_weight(column * 32 + lane, total);
    }
  }

  __device__ __forceinline__ void run() const {
    const int block = static_cast<int>(blockIdx.x);
    if (block < weight_blocks) {
      if constexpr (weight_blocks > 0) weights(block / slices, block % slices);
    } else if (block < weight_blocks + Backward::channels) {
      channel(block - weight_blocks);
    } else {
      singles();
    }
  }
};

}  // namespace onepass
