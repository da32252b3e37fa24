// The gradients of a thin convolution and all that follows it, the convolution computed anew where its output
// is needed.
//
// With h the convolution's output, dh its gradient, z the norm's output and M elements in a slab:
//   pass 1   x -> h; dy -> dz; for each channel the sums of dz, of dz xhat and of what the after-chain reads.
//            The last block of a sample merges them to the slabs' means over M of gamma dz and gamma dz xhat
//   pass 2   x -> h -> dh as in tail_backward.cuh, a tile in shared memory at a time;
//            dweight[o, term] += sum over positions dh[o, q] x[term, q] by tensor cores; dh to the ring
//   pass 3   dx: rows D[(input channel, last tap), q] = sum over outer taps and o of w dh[o, q] by tensor
//            cores, shifted and added to dx[input channel, i] as they leave
// Pass 1 is left out without a norm, pass 3 where dx is not wanted, products that nobody wants in pass 2.
//
// Work is taken by ticket, sample after sample: pass 1 of sample n, pass 2 of an earlier and pass 3 of a
// still earlier one, so that dy and dh come from the second-level cache; blocks wait only for lower tickets.
// The ring has dh of a few samples: nothing of the convolution's size is in memory. Gradients of weights
// leave as one part for each ticket, which the last block of a sample adds; sums over the batch are a second
// launch (ThinReduce), in double and in order.
//
// Operands of products are tf32: rounded, exact (of 16 bits), or split in two with three products (strict
// f32, at most 64 terms in the tensor core). dh is rounded as an operand is. Moves x and dy twice, dh once
// each way through the second-level cache, dx once.
#pragma once

#include "barrier.cuh"
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
  float* first_parts;     // [batch][segments][channels][sums of pass 1]
  float* second_parts;    // [batch][segments][channels][sums of pass 2]
  float* slab_sums;       // [batch][groups][2]
  float* weight_parts;    // [ring_samples][segments][units][128]
  float* weight_samples;  // [batch][units][128]
  double* slices;         // of ThinReduce
  float* ring;            // [ring_samples][positions of the output][channels, a multiple of 16]
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

// The convolution's terms. The window of x has vectors of input channels; an entry is such a vector and a
// tap. Where a chunk has several rows, an entry has taps of the first and last dimension alone and meets
// every tap of the dimension between them ("row tap"), so that what is loaded of a row of x serves all rows
// of outputs that meet it. A step is four entries, one for each lane of a quad; a group is the eight entries
// that are the columns of a product of dweight.
template <class Convolution, class Numbers>
struct GradientTerms {
  using C = Convolution;
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr int row_tiles = (C::channels + 15) / 16;
  static constexpr int vector = Numbers::vector;
  static constexpr int products = vector / 2;
  static constexpr int components = C::in_channels < vector ? C::in_channels : vector;  // that are ever real
  static constexpr int vectors = (C::in_channels + vector - 1) / vector;
  static constexpr int weight_stride =
      C::transposed ? C::taps : C::in_channels * C::taps;  // of an output channel
  static constexpr int channel_stride = C::transposed ? C::channels * C::taps : C::taps;

  static constexpr bool has_rows = Numbers::chunk_rows > 1;
  static constexpr int most_row_taps =
      has_rows ? static_cast<int>((C::kernel(1) + C::tap_step(1) - 1) / C::tap_step(1)) : 1;
  static constexpr __device__ bool has_row_taps(int count) {
    for (int r = 0; r < static_cast<int>(C::classes(1)); ++r) {
      if (C::count(1, r) == count) return true;
    }
    return false;
  }

  struct Class {
    int row_taps;
    int step;  // the first
    int steps;
    int fragment;  // the first of its operands: steps, their row taps, products
    int job;       // the first of its products of dweight: groups of a tile of rows, then those of the next
    int groups;
    int unit;  // the first of its sums of dweight: jobs, their row taps, components
  };

  // Entries of a class with the last tap running fastest, then the first, then the vector of channels.
  struct Entry {
    int tap;      // -1 beyond the last entry
    int channel;  // the first of the vector
    int window;   // from the window's vector of a position with j = 0
  };

  static __device__ __forceinline__ int row_taps_of(const ThinClass<C>& own) {
    return has_rows ? own.count[1] : 1;
  }
  static __device__ __forceinline__ int entries_of(const ThinClass<C>& own) {
    const int outer = vectors * own.count[0] * own.count[2];
    return has_rows && own.count[1] > 0 ? outer : outer * own.count[1];
  }

  static __device__ void find_classes(Class* found) {
    int step = 0, fragment = 0, job = 0, unit = 0;
    for (int i = 0; i < classes; ++i) {
      const ThinClass<C> own(i);
      const int entries = entries_of(own);
      found[i] = {row_taps_of(own), step, (entries + 3) / 4, fragment, job, (entries + 7) / 8, unit};
      step += found[i].steps;
      fragment += found[i].steps * found[i].row_taps * products;
      job += found[i].groups * row_tiles;
      unit += units_of(found[i]);
    }
  }
  static __device__ __forceinline__ int units_of(const Class& own) {
    return own.groups * row_tiles * own.row_taps * components;
  }

  // The class that has a step, an operand, a job or a unit.
  static __device__ int class_of_step(const Class* found, int step) {
    int i = 0;
    while (step >= found[i].step + found[i].steps) ++i;
    return i;
  }
  static __device__ int class_of_fragment(const Class* found, int fragment) {
    int i = 0;
    while (fragment >= found[i].fragment + found[i].steps * found[i].row_taps * products) ++i;
    return i;
  }
  static __device__ int class_of_job(const Class* found, int job) {
    int i = 0;
    while (job >= found[i].job + found[i].groups * row_tiles) ++i;
    return i;
  }
  static __device__ int class_of_unit(const Class* found, int unit) {
    int i = 0;
    while (unit >= found[i].unit + units_of(found[i])) ++i;
    return i;
  }

  // What fills up a step or a group reads what the last entry reads.
  static __device__ Entry entry(int class_index, int index, int row_tap) {
    const ThinClass<C> own(class_index);
    const int entries = entries_of(own);
    int rest = index < entries ? index : entries - 1;
    int m[3];
    m[2] = rest % own.count[2];
    rest /= own.count[2];
    m[1] = row_tap;
    if constexpr (!has_rows) {
      m[1] = rest % own.count[1];
      rest /= own.count[1];
    }
    m[0] = rest % own.count[0];
    const int of_vectors = rest / own.count[0];
    int tap = 0;
    int window = of_vectors;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      tap = tap * static_cast<int>(C::kernel(d)) + own.first[d] + m[d] * static_cast<int>(C::tap_step(d));
      window =
          window * Numbers::window(d) + own.base[d] + m[d] * static_cast<int>(C::delta(d)) - Numbers::low(d);
    }
    return {index < entries ? tap : -1, of_vectors * vector, window};
  }

  // Rounding weights moves all sums of a channel alike, and a norm and long sums let that show. Where the
  // last vector of channels is not full, the mean of its channels times what rounding drops of their weights
  // makes up for most of it, at no cost. Only where the forward had exact weights; -1 where there is no room.
  static constexpr int spare = Numbers::makes_up_for_weights && C::in_channels % vector != 0
                                   ? static_cast<int>(C::in_channels % vector)
                                   : -1;

  // The index of a weight without its output channel; -1 where there is none.
  static __device__ __forceinline__ int weight_index(const Entry& entry, int component) {
    const int channel = entry.channel + component;
    return entry.tap < 0 || channel >= C::in_channels ? -1 : channel * channel_stride + entry.tap;
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
      static_cast<int>(C::kernel(0) * C::kernel(1)) * row_tiles * 2;  // of 8 output channels

  struct alignas(16) RowValues {
    float mean, rstd, gamma, beta;
    float scale, product, sum;  // dh = scale dz + product xhat + sum
    float dy;                   // where the block ends in a mean
  };
  struct Passes {
    union {
      alignas(16) float window[Numbers::window_vectors * vector];
      float sum[warps][rows][most_sums > 0 ? most_sums : 1];  // when the last window is done with
    };
    // Channels c and c + 8 of a tile of rows side by side, position after position.
    alignas(16) float dh[Numbers::wants_weight ? classes : 1][Numbers::wants_weight ? rows / 2 : 1]
                        [Numbers::dh_pitch];
    float4 weight[Numbers::wants_weight ? Numbers::units : 1][32];
  };
  struct Back {
    alignas(16) float ring[Numbers::back_buffers][Numbers::back_floats];
    alignas(16) float product[2][Numbers::back_tile(1)][column_rows][Numbers::product_pitch];
  };
  struct Shared {
    uint4 weight[parts][Numbers::fragments > 0 ? Numbers::fragments* row_tiles : 1][32];
    uint4 back[parts][Numbers::wants_input ? back_steps * column_tiles : 1][32];
    int step_window[Numbers::steps * 4 + 1];  // of entries, in floats
    int group_window[Numbers::jobs * 8 + 1];
    typename Terms::Class of_class[classes];
    RowValues row[rows];
    float bias[rows];
    uint64 arrived[2];  // planes of dh
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

  // Of a component of an entry.
  __device__ __forceinline__ float entry_weight(int o, const typename Terms::Entry& entry,
                                                int component) const {
    if (component != Terms::spare || entry.channel + vector <= C::in_channels)
      return weight(o, Terms::weight_index(entry, component));
    if (o >= channels || entry.tap < 0) return 0.0f;
    float dropped = 0.0f;
    for (int i = 0; i < component; ++i) {
      const float exact = load_one<typename C::Weight>(
          p.parameter[0], o * Terms::weight_stride + Terms::weight_index(entry, i));
      dropped += exact - round_to_tf32(exact);
    }
    return round_to_tf32(dropped);
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
    if (threadIdx.x == 0) {
      Terms::find_classes(s.of_class);
#if __CUDA_ARCH__ >= 900
      for (uint64& barrier_of : s.arrived) barrier::initialise(&barrier_of);
#endif
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Numbers::steps * 4; i += threads) {
      const int own = Terms::class_of_step(s.of_class, i / 4);
      s.step_window[i] = Terms::entry(own, i - s.of_class[own].step * 4, 0).window * vector;
    }
    for (int i = threadIdx.x; i < Numbers::jobs * 8; i += threads) {
      const int own = Terms::class_of_job(s.of_class, i / 8);
      const int group = (i / 8 - s.of_class[own].job) % s.of_class[own].groups;
      s.group_window[i] = Terms::entry(own, group * 8 + i % 8, 0).window * vector;
    }
    for (int i = threadIdx.x; i < Numbers::fragments * row_tiles * 32; i += threads) {
      const int fragment = i / (row_tiles * 32);
      const int o = i / 32 % row_tiles * 16 + i % 32 / 4;
      const int own = Terms::class_of_fragment(s.of_class, fragment);
      const int within = fragment - s.of_class[own].fragment;
      const int product = within % products;
      const int row_tap = within / products % s.of_class[own].row_taps;
      const int step = within / products / s.of_class[own].row_taps;
      const auto entry = Terms::entry(own, step * 4 + i % 4, row_tap);
      const int k = product * 2;
      const float w[4] = {entry_weight(o, entry, k), entry_weight(o + 8, entry, k),
                          entry_weight(o, entry, k + 1), entry_weight(o + 8, entry, k + 1)};
      put_weights(s.weight[0][i / 32], s.weight[parts - 1][i / 32], i % 32, w);
    }
    if constexpr (Numbers::wants_input) {
      for (int i = threadIdx.x; i < back_steps * column_tiles * 32; i += threads) {
        const int row = i / 32 % column_tiles * 16 + i % 32 / 4;
        const int step = i / (column_tiles * 32);
        // A lane has four neighbouring output channels, two for each of two steps.
        const int o = step / 2 % row_tiles * 16 + i % 4 * 4 + step % 2 * 2;
        const int outer = step / (2 * row_tiles);  // taps
        const int k0 = back_index(row, outer);
        const int k1 = back_index(row + 8, outer);
        const float w[4] = {weight(o, k0), weight(o, k1), weight(o + 1, k0), weight(o + 1, k1)};
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
    return row / column_taps * Terms::channel_stride + outer * column_taps + row % column_taps;
  }

  // dh in the ring: positions of a sample as they lie in the output, all channels of one together.
  static constexpr __device__ int ring_stride(int d) {
    const int row = static_cast<int>(C::output_size(2)) * rows;
    return d == 2 ? rows : d == 1 ? row : row * static_cast<int>(C::output_size(1));
  }
  static constexpr __device__ int64 ring_sample() {
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

  // A warp for each row of vectors.
  __device__ __forceinline__ void load_window(const Tile& tile) const {
    constexpr int width = Numbers::window(2);
    constexpr int all_rows = Numbers::window_vectors / width;
    constexpr int rounds = (width + 31) / 32;
    int first[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) first[d] = tile.origin[d] * static_cast<int>(C::step(d)) + Numbers::low(d);
    const char* sample = static_cast<const char*>(p.input) + tile.n * C::input_stride(0) * Input::bytes;
#pragma unroll 2
    for (int row = warp; row < all_rows; row += warps) {
      const int i1 = first[1] + row % Numbers::window(1);
      const int i0 = first[0] + row / Numbers::window(1) % Numbers::window(0);
      const int c = row / (Numbers::window(1) * Numbers::window(0)) * vector;
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
        Vector value;
#pragma unroll
        for (int k = 0; k < vector; ++k) {
          value.of[k] = 0.0f;
          if (k < components && is_real && (C::in_channels % vector == 0 || c + k < C::in_channels)) {
            value.of[k] = load_one<Input>(sample, offset + k * static_cast<int>(C::input_stride(1)) +
                                                      i2 * static_cast<int>(C::input_stride(4)));
            if constexpr (C::rounds_to_tf32) value.of[k] = round_to_tf32(value.of[k]);
          }
        }
        if constexpr (Terms::spare > 0) {
          if (c + vector > C::in_channels) {
            constexpr float share = 1.0f / static_cast<float>(Terms::spare);
            float mean = value.of[0] * share;
#pragma unroll
            for (int k = 1; k < Terms::spare; ++k) mean = fmaf(value.of[k], share, mean);
            value.of[Terms::spare] = round_to_tf32(mean);
          }
        }
        if (width % 32 == 0 || column < width)
          *reinterpret_cast<Vector*>(s.passes.window + (row * width + column) * vector) = value;
      }
    }
  }
  struct alignas(vector * 4) Vector {
    float of[vector];
  };

  template <int Count>
  struct RowSums {
    float value[row_tiles][2][Count > 0 ? Count : 1] = {};
  };

  // A warp's chunk: some rows of some neighbouring positions, in all classes of a row, where they lie side by
  // side in the output.
  struct Chunk {
    int flat;        // of the first position in the tile
    int window;      // of the lane's column of products in the first row and span, in floats
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
  static constexpr int x_row_floats = Numbers::window(1) > 0 ? Numbers::window(2) * vector : 0;

  template <int row_tile, int row_taps>
  __device__ __forceinline__ void convolve(const typename Terms::Class& own, int window,
                                           float (&h)[chunk_tiles][4]) const {
    static_assert(!splits || chunk_rows == 1);
    ProductSums<splits, spans> sums[chunk_rows];
    const float* from = s.passes.window + window;
#pragma unroll 1
    for (int k = 0; k < own.steps; ++k) {
      const float* entry = from + s.step_window[(own.step + k) * 4 + in_quad];
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
          x[i] = *reinterpret_cast<const Vector*>(entry + x_row * x_row_floats +
                                                  i * 8 * static_cast<int>(C::step(2)) * vector);
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
#pragma unroll
    for (int row = 0; row < chunk_rows; ++row) {
      sums[row].finish();
#pragma unroll
      for (int i = 0; i < spans * 4; ++i)
        h[row * spans + i / 4][i % 4] =
            sums[row].total[i / 4][i % 4] + s.bias[row_tile * 16 + i % 4 / 2 * 8 + quad];
    }
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

  // One element: its sums, and in pass 2 the gradient of the convolution's output. One that is not valid adds
  // nothing and has none.
  template <bool second, int Count>
  __device__ __forceinline__ float element(const RowValues& row, const float* before_values,
                                           const float* after_values, float x, float g, bool valid,
                                           int64 index, float (&sum)[Count]) const {
    x = valid ? x : 0.0f;
    g = valid ? g : 0.0f;
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
      if constexpr (Numbers::may_read_output) sum[second_sums - 1] += valid ? xhat : 0.0f;
      const float to_chain = valid ? fmaf(row.scale, dz, fmaf(xhat, row.product, row.sum)) : 0.0f;
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

  // Pass 2 is the last to read dy: caches need not keep it, and have more room for the ring.
  template <bool second>
  __device__ __forceinline__ float load_gradient(int64 index) const {
    using Gradient = typename Tail::OutputGradient;
    if constexpr (!second) return load_one<Gradient>(p.output_gradient, index);
    if constexpr (Gradient::bytes == 4) return __ldcs(static_cast<const float*>(p.output_gradient) + index);
    const uint16 bits = __ldcs(static_cast<const uint16*>(p.output_gradient) + index);
    return load_one<Gradient>(&bits, 0);
  }

  // `whole`: all positions of the chunk are in the output.
  template <bool second, bool whole, int row_tile, class Sums>
  __device__ __forceinline__ void take(const Tile& tile, int first_class, const Chunk& chunk,
                                       Sums& sums) const {
    constexpr int further = static_cast<int>(C::stride(4));
    const int64 output = tile.n * C::stride(0) + (row_tile * 16 + quad) * C::stride(1) +
                         chunk.q[0] * C::stride(2) + chunk.q[1] * C::stride(3) +
                         chunk.cell * (classes_x * C::stride(4));
    // Many rows are one block of code where nothing is loaded or stored beside them.
    constexpr bool masks = chunk_rows > 1 && !Numbers::has_tensors;
    // Tile `t` of the chunk is span t % spans of row t / spans.
    const auto is_valid = [&](int x, int t, int k) {
      return whole || ((chunk_rows == 1 || chunk.has_row(t / spans)) &&
                       chunk.cell + t % spans * 8 + k < static_cast<int>(C::positions(2, x)));
    };
    const auto is_channel = [&](int half) {
      return channels % 16 == 0 || row_tile * 16 + half * 8 + quad < channels;
    };
    const auto offset = [&](int half, int x, int t, int k) {
      return half * 8 * static_cast<int>(C::stride(1)) +
             t / spans * static_cast<int>(C::classes(1) * C::stride(3)) +
             ((t % spans * 8 + k) * classes_x + x) * further;
    };
    float g[classes_x][chunk_tiles][4];
    if constexpr (!Tail::has_mean) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int x = 0; x < classes_x; ++x) {
              g[x][t][half * 2 + k] = is_valid(x, t, k) && is_channel(half)
                                          ? load_gradient<second>(output + offset(half, x, t, k))
                                          : 0.0f;
            }
          }
        }
      }
    }
    float h[classes_x][chunk_tiles][4];
#pragma unroll
    for (int x = 0; x < classes_x; ++x)
      convolve_class<row_tile>(s.of_class[first_class + x], chunk.window, h[x]);
    float* to_ring = nullptr;
    if constexpr (second && Numbers::wants_input) {
      to_ring = p.ring + tile.n % p.ring_samples * ring_sample() +
                (chunk.q[0] * ring_stride(0) + chunk.q[1] * ring_stride(1) + chunk.cell * classes_x * rows +
                 row_tile * 16 + quad);
    }
    const auto ring_offset = [](int half, int x, int t, int k) {
      return half * 8 + t / spans * static_cast<int>(C::classes(1)) * ring_stride(1) +
             ((t % spans * 8 + k) * classes_x + x) * rows;
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = row_tile * 16 + half * 8 + quad;
      const RowValues row = s.row[c];
      float before_values[Before::channel_operands > 0 ? Before::channel_operands : 1];
      float after_values[After::channel_operands > 0 ? After::channel_operands : 1];
      Before::load_channel(p, tile.n, is_channel(half) ? c : 0, before_values);
      After::load_channel(p, tile.n, is_channel(half) ? c : 0, after_values);
#pragma unroll
      for (int x = 0; x < classes_x; ++x) {
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float& value = h[x][t][half * 2 + k];
            const bool valid = is_valid(x, t, k) && is_channel(half);
            if (masks || valid) {
              value = element<second>(row, before_values, after_values, value,
                                      Tail::has_mean ? row.dy : g[x][t][half * 2 + k], !masks || valid,
                                      output + offset(half, x, t, k), sums.value[row_tile][half]);
              if constexpr (second && !splits) value = round_to_tf32(value);
            } else {
              value = 0.0f;
            }
            if constexpr (second && Numbers::wants_input) {
              if (is_valid(x, t, k)) to_ring[ring_offset(half, x, t, k)] = value;
            }
          }
        }
      }
    }
    if constexpr (second && Numbers::wants_weight) {
#pragma unroll
      for (int x = 0; x < classes_x; ++x) {
        float* to = &s.passes.dh[first_class + x][row_tile * 8 + quad][(chunk.flat + 2 * in_quad) * 2];
#pragma unroll
        for (int t = 0; t < chunk_tiles; ++t)
          *reinterpret_cast<float4*>(to + (t / spans * Numbers::tile(2) + t % spans * 8) * 2) =
              float4{h[x][t][0], h[x][t][2], h[x][t][1], h[x][t][3]};
      }
    }
  }

  // Rows that are not in the output add nothing to dweight.
  __device__ __forceinline__ void clear_gradients(int first_class, const Chunk& chunk) const {
#pragma unroll 1
    for (int i = 0; i < classes_x * chunk_tiles * row_tiles; ++i) {
      const int row_tile = i % row_tiles;
      const int t = i / row_tiles % chunk_tiles;
      const int x = i / (row_tiles * chunk_tiles);
      const int flat = chunk.flat + t / spans * Numbers::tile(2) + t % spans * 8 + 2 * in_quad;
      *reinterpret_cast<float4*>(&s.passes.dh[first_class + x][row_tile * 8 + quad][flat * 2]) =
          float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }

  template <bool second, class Sums>
  __device__ __forceinline__ void tile_of(const Tile& tile, Sums& sums) const {
#pragma unroll 1
    for (int item = warp; item < chunks * (classes / classes_x); item += warps) {
      const int first_class = item / chunks * classes_x;
      const Chunk chunk = find(tile, item % chunks, ThinClass<C>(first_class));
      if (!chunk.has_row(0)) {
        if constexpr (second && Numbers::wants_weight) clear_gradients(first_class, chunk);
        continue;
      }
      if (chunk_rows > 1 && chunk.is_whole()) {
        take_rows<second, true>(tile, first_class, chunk, sums);
      } else {
        take_rows<second, false>(tile, first_class, chunk, sums);
      }
    }
  }

  template <bool second, bool whole, class Sums>
  __device__ __forceinline__ void take_rows(const Tile& tile, int first_class, const Chunk& chunk,
                                            Sums& sums) const {
    take<second, whole, 0>(tile, first_class, chunk, sums);
    if constexpr (row_tiles > 1) take<second, whole, 1>(tile, first_class, chunk, sums);
    if constexpr (row_tiles > 2) take<second, whole, 2>(tile, first_class, chunk, sums);
    if constexpr (row_tiles > 3) take<second, whole, 3>(tile, first_class, chunk, sums);
  }

  // dweight: rows are output channels, columns the 8 entries of a group, a product for each row tap and each
  // component of their vectors; the sum is over the positions whose dh lies in shared memory. Where there are
  // fewer jobs than warps the positions of a job are cut into parts.
  static constexpr int job_parts = Numbers::job_parts;

  template <int row_taps>
  __device__ __forceinline__ void multiply_job(const typename Terms::Class& own, int class_index, int job,
                                               int part, bool exists) const {
    ProductSums<splits, components> sums[row_taps];
    const int row_tile = row_tiles == 1 ? 0 : (job - own.job) / own.groups;
    if (exists) {
      const float* dh = s.passes.dh[class_index][row_tile * 8 + quad] + 4 * in_quad;
      const float* window = s.passes.window + s.group_window[job * 8 + quad] +
                            2 * in_quad * static_cast<int>(C::step(2)) * vector;
      constexpr int steps = Numbers::tile(2) / 8;
#pragma unroll 1
      for (int block = 0; block < Numbers::tile(0) * (Numbers::tile(1) / chunk_rows); ++block) {
        const int row = block * chunk_rows;
        const int j0 = row / Numbers::tile(1);
        const int j1 = row % Numbers::tile(1);
        const float* rows_of_x = window + (j0 * static_cast<int>(C::step(0)) * Numbers::window(1) +
                                           j1 * static_cast<int>(C::step(1))) *
                                              x_row_floats;
#pragma unroll 1
        for (int k = part; k < steps; k += job_parts) {
          uint4 a[chunk_rows][parts];
#pragma unroll
          for (int i = 0; i < chunk_rows; ++i) {
            const uint4 bits =
                *reinterpret_cast<const uint4*>(dh + ((row + i) * Numbers::tile(2) + k * 8) * 2);
            if constexpr (splits) {
              split_tf32(bits, a[i][0], a[i][1]);
            } else {
              a[i][0] = bits;
            }
          }
          const float* columns = rows_of_x + k * 8 * static_cast<int>(C::step(2)) * vector;
#pragma unroll
          for (int at = 0; at < x_rows(row_taps); ++at) {
            const int x_row = first_x_row(row_taps) + at;
            if (!is_met(x_row, row_taps)) continue;
            const float* x = columns + x_row * x_row_floats;
            const Vector first = *reinterpret_cast<const Vector*>(x);
            const Vector other = *reinterpret_cast<const Vector*>(x + static_cast<int>(C::step(2)) * vector);
            float b[components][2];
#pragma unroll
            for (int i = 0; i < components; ++i) {
              b[i][0] = first.of[i];
              b[i][1] = other.of[i];
            }
#pragma unroll
            for (int tap = 0; tap < row_taps; ++tap) {
              if (row_of(x_row, tap) >= 0) sums[tap].add(a[row_of(x_row, tap)], b);
            }
          }
        }
      }
    }
    // The parts take turns at the sums in shared memory, each beginning with others.
    const int unit = own.unit + (job - own.job) * (row_taps * components);
#pragma unroll
    for (int turn = 0; turn < job_parts; ++turn) {
      if (turn > 0) __syncthreads();
#pragma unroll
      for (int rest = 0; rest < job_parts; ++rest) {
        if (!exists || (rest + part + turn) % job_parts != 0) continue;
#pragma unroll
        for (int i = rest; i < row_taps * components; i += job_parts) {
          sums[i / components].finish();
          const auto& value = sums[i / components].total[i % components];
          float4& total = s.passes.weight[unit + i][lane];
          const float4 before = total;
          total = {before.x + value[0], before.y + value[1], before.z + value[2], before.w + value[3]};
        }
      }
    }
  }

  template <int row_taps = Terms::most_row_taps>
  __device__ __forceinline__ void multiply_class(const typename Terms::Class& own, int class_index, int job,
                                                 int part, bool exists) const {
    if constexpr (row_taps <= 1 || C::classes(1) == 1) {
      multiply_job<(row_taps > 1 ? row_taps : 1)>(own, class_index, job, part, exists);
    } else if constexpr (!Terms::has_row_taps(row_taps)) {
      multiply_class<row_taps - 1>(own, class_index, job, part, exists);
    } else if (own.row_taps == row_taps) {
      multiply_job<row_taps>(own, class_index, job, part, exists);
    } else {
      multiply_class<row_taps - 1>(own, class_index, job, part, exists);
    }
  }

  __device__ __forceinline__ void multiply_weights() const {
#pragma unroll 1
    for (int first = 0; first < Numbers::jobs * job_parts; first += warps) {
      const int index = first + warp;
      const bool exists = index < Numbers::jobs * job_parts;
      const int job = exists ? index / job_parts : 0;
      const int class_index = classes == 1 ? 0 : Terms::class_of_job(s.of_class, job);
      multiply_class(s.of_class[class_index], class_index, job, index % job_parts, exists);
    }
  }

  // Sums of dweight in memory: of each ticket of the samples that are on their way, then of the sample.
  __device__ __forceinline__ float* weights_of(int64 n, int segment) const {
    return p.weight_parts + (n % p.ring_samples * Numbers::segments + segment) * (Numbers::units * 128);
  }
  __device__ __forceinline__ void store_weights(int64 n, int segment) const {
    auto* to = reinterpret_cast<float4*>(Numbers::segments > 1 ? weights_of(n, segment)
                                                               : p.weight_samples + n * Numbers::units * 128);
    for (int i = threadIdx.x; i < Numbers::units * 32; i += threads) to[i] = s.passes.weight[i / 32][i % 32];
  }
  __device__ __forceinline__ void merge_weights(int64 n) const {
    const auto* from = reinterpret_cast<const float4*>(weights_of(n, 0));
    auto* to = reinterpret_cast<float4*>(p.weight_samples + n * Numbers::units * 128);
#pragma unroll 1
    for (int i = threadIdx.x; i < Numbers::units * 32; i += threads) {
      double sum[4] = {};
#pragma unroll 8
      for (int segment = 0; segment < Numbers::segments; ++segment) {
        const float4 part = __ldcg(from + segment * (Numbers::units * 32) + i);
        sum[0] += part.x;
        sum[1] += part.y;
        sum[2] += part.z;
        sum[3] += part.w;
      }
      to[i] = {static_cast<float>(sum[0]), static_cast<float>(sum[1]), static_cast<float>(sum[2]),
               static_cast<float>(sum[3])};
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
          if (in_quad == 0) s.passes.sum[warp][i * 8 + quad][k] = sum;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < channels * Count; i += threads) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += s.passes.sum[w][i / Count][i % Count];
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
      for (int i = threadIdx.x; i < Numbers::units * 32; i += threads)
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
      tile_of<second>(tile, sums);
      __syncthreads();
      if constexpr (second && Numbers::wants_weight) {
        multiply_weights();
        __syncthreads();
      }
    }
    const int64 ticket = n * Numbers::segments + segment;
    store_sums<count>(sums, (second ? p.second_parts : p.first_parts) + ticket * channels * count);
    if constexpr (second && Numbers::wants_weight) store_weights(n, segment);
  }

  // By the last block of a sample: the slabs' sums.
  __device__ __forceinline__ void finish_slabs(int64 n) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::group_channels * Tail::spatial);
    float* of_channel = &s.passes.sum[0][0][0];
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
  // mean of gamma xhat is y less beta. The rounding of y moves the slab's sum of dz xhat by at most a
  // rounding of the sum of |dy y|; it is enough where that is small beside the sum of |gamma dy|, which is
  // what dh is made of.
  __device__ __forceinline__ bool output_is_enough(int64 n) const {
    constexpr float most = is_same<typename Tail::Output, f32> ? 1024.0f : 2.0f;
    bool is_enough = true;
    for (int i = threadIdx.x; i < groups; i += threads) {
      float moved = 0.0f, all = 0.0f;
      for (int c = i * Tail::group_channels; c < (i + 1) * Tail::group_channels; ++c) {
        const float dy = load_one<typename Tail::OutputGradient>(
            p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride);
        moved = fmaf(fabsf(dy), fabsf(load_one<typename Tail::Output>(p.output, n * channels + c)), moved);
        all = fmaf(fabsf(dy), fabsf(Tail::weight(p, c)), all);
      }
      is_enough = is_enough && moved <= most * all;
    }
    return __syncthreads_and(is_enough) != 0;
  }
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

  // Rows of the ring that a plane of the tile meets, from the first one that exists.
  static constexpr int live = Numbers::back_live;
  static constexpr int back_at_once = Numbers::back_spans_at_once;
  static constexpr int row_chunks = (Numbers::back_spans + back_at_once - 1) / back_at_once;
  static constexpr int back_columns = Numbers::back_columns;
  static constexpr int back_pitch = Numbers::back_pitch;  // of a position, in floats

  // Whether the rows of a plane are one piece of memory that a single bulk copy brings.
#if __CUDA_ARCH__ >= 900
  static constexpr bool copies_whole = back_columns == C::output_size(2) && back_pitch == rows;
#else
  static constexpr bool copies_whole = false;
#endif

  __device__ __forceinline__ void load_plane(const float* sample, int plane, int buffer, int first_row,
                                             int first_column) const {
    constexpr int vectors = back_columns * rows / 4;
    const int begin = first_row > 0 ? first_row : 0;
    int end = first_row + Numbers::back_window(1);
    end = end < static_cast<int>(C::output_size(1)) ? end : static_cast<int>(C::output_size(1));
    const float* from = sample + plane * ring_stride(0) + begin * ring_stride(1) + first_column * rows;
    float* to = s.back_window.ring[buffer] + (begin - first_row) * (back_columns * back_pitch);
    const int all = (end - begin) * vectors;
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) {
      if (threadIdx.x == 0) {
        barrier::acquire_for_copies();
        barrier::expect(s.arrived + buffer, all * 16);
        barrier::copy(to, from, all * 16, s.arrived + buffer);
      }
      return;
    }
#endif
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += threads) {
      const int row = i / vectors;
      const int column = i % vectors / (rows / 4);
      const int o = i % (rows / 4) * 4;
      if (first_column + column >= static_cast<int>(C::output_size(2))) continue;
      const float* source = from + row * ring_stride(1) + column * rows + o;
      float* target = to + (row * back_columns + column) * back_pitch + o;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       static_cast<uint32>(__cvta_generic_to_shared(target))),
                   "l"(source)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Until the plane in a buffer is there, for this thread's eyes or, where threads copied, for its own part.
  __device__ __forceinline__ void wait_for_plane(int buffer, uint32& phases) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) {
      barrier::wait(s.arrived + buffer, phases >> buffer & 1u);
      phases ^= 1u << buffer;
      return;
    }
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // What this thread has read or written of shared memory may be overwritten by copies behind the next
  // barrier.
  static __device__ __forceinline__ void release_to_planes() {
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) barrier::release_to_copies();
#endif
  }

  // A warp's part of pass 3: a row of dx, 16 rows of D and some columns of dh, for all `live` planes of dx
  // that a plane of dh meets.
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
    const float* of_lane =
        s.back_window.ring[buffer] + (item.chunk * back_at_once * 8 + quad) * back_pitch + in_quad * 4;
#pragma unroll 1
    for (int k1 = 0; k1 < static_cast<int>(C::kernel(1)); ++k1) {
      const int q1 = met(1, i1, k1);
      if (q1 < 0) continue;
      const float* row = of_lane + (q1 - first_row) * (back_columns * back_pitch);
#pragma unroll
      for (int k = 0; k < row_tiles; ++k) {
        float4 dh[back_at_once];
#pragma unroll
        for (int i = 0; i < back_at_once; ++i)
          dh[i] = *reinterpret_cast<const float4*>(row + i * 8 * back_pitch + k * 16);
#pragma unroll
        for (int i = 0; i < live; ++i) {
          if (tap[i] < 0) continue;
          const int step = ((tap[i] * static_cast<int>(C::kernel(1)) + k1) * row_tiles + k) * 2;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint4 a[parts];
#pragma unroll
            for (int part = 0; part < parts; ++part)
              a[part] = s.back[part][(step + half) * column_tiles + item.tile][lane];
            float b[back_at_once][2];
#pragma unroll
            for (int j = 0; j < back_at_once; ++j) {
              b[j][0] = half == 0 ? dh[j].x : dh[j].z;
              b[j][1] = half == 0 ? dh[j].y : dh[j].w;
            }
            sums[i].add(a, b);
          }
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

  // A plane of the tile: products of the last taps added where they belong. A warp has some rows of some
  // channels, its lanes are columns.
  __device__ __forceinline__ void store_plane(int64 n, int plane, int buffer, int y, int x,
                                              int first_column) const {
    constexpr int tile_1 = Numbers::back_tile(1);
    constexpr int tile_2 = Numbers::back_tile(2);
#pragma unroll 1
    for (int column = lane; column < tile_2; column += 32) {
      const int i2 = x + column;
      if (i2 >= static_cast<int>(C::input_size(2))) break;
      int from[column_taps];
#pragma unroll
      for (int k = 0; k < column_taps; ++k) {
        const int q = met(2, i2, k);
        from[k] = q >= 0 ? k * Numbers::product_pitch + q - first_column : -1;
      }
      const int64 to = n * Numbers::gradient_stride(0) + plane * Numbers::gradient_stride(2) +
                       i2 * Numbers::gradient_stride(4);
#pragma unroll 2
      for (int i = warp; i < tile_1 * C::in_channels; i += warps) {
        const int row = i / C::in_channels;
        const int c = i % C::in_channels;
        if (y + row >= static_cast<int>(C::input_size(1))) break;
        const float* products_of = s.back_window.product[buffer][row][c * column_taps];
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < column_taps; ++k) sum += from[k] >= 0 ? products_of[from[k]] : 0.0f;
        store_one<typename Tail::InputGradient>(
            p.input_gradient, to + c * Numbers::gradient_stride(1) + (y + row) * Numbers::gradient_stride(3),
            sum);
      }
    }
  }

  // `phases`: of the copies into each buffer, kept from ticket to ticket.
  __device__ __forceinline__ void back(int64 n, int index, uint32& phases) const {
    constexpr int buffers = Numbers::back_buffers;
    const int x = index % Numbers::back_tiles(2) * Numbers::back_tile(2);
    const int y = index / Numbers::back_tiles(2) % Numbers::back_tiles(1) * Numbers::back_tile(1);
    const int z = index / (Numbers::back_tiles(2) * Numbers::back_tiles(1)) * Numbers::back_tile(0);
    const int last_z = z + Numbers::back_tile(0) < static_cast<int>(C::input_size(0))
                           ? z + Numbers::back_tile(0)
                           : static_cast<int>(C::input_size(0));
    const int first_row = first_met(1, y);
    int first_column = back_columns == C::output_size(2) ? 0 : first_met(2, x);
    first_column = first_column > 0 ? first_column : 0;
    int q_begin = first_met(0, z);
    q_begin = q_begin > 0 ? q_begin : 0;
    int q_end = last_met(0, last_z - 1) + 1;
    q_end = q_end < static_cast<int>(C::output_size(0)) ? q_end : static_cast<int>(C::output_size(0));
    const float* sample = p.ring + n % p.ring_samples * ring_sample();
    const BackItem item{warp / (row_chunks * column_tiles), warp % column_tiles,
                        warp / column_tiles % row_chunks};
    const bool active = item.row < Numbers::back_tile(1) && y + item.row < static_cast<int>(C::input_size(1));
    PlaneSums sums[live];
    release_to_planes();
    __syncthreads();  // the one before is done with shared memory
    if (q_begin < q_end) load_plane(sample, q_begin, 0, first_row, first_column);
    int plane = q_begin < q_end ? first_plane(q_begin) : z;  // of sums[0]
    int waiting = -1;                                        // the plane whose products wait in shared memory
    const auto store_waiting = [&] {
      if (waiting >= 0) store_plane(n, waiting, waiting % 2, y, x, first_column);
      waiting = -1;
    };
#pragma unroll 1
    for (int q = q_begin; q < q_end || plane < last_z; ++q) {
      if (q < q_end) {
        const int buffer = buffers > 1 ? (q - q_begin) % buffers : 0;
        wait_for_plane(buffer, phases);
        release_to_planes();
        __syncthreads();  // the plane is there, and nobody reads the one that the next replaces
        if (buffers > 1 && q + 1 < q_end)
          load_plane(sample, q + 1, (q + 1 - q_begin) % buffers, first_row, first_column);
        store_waiting();
        if (active) multiply_back(sums, item, buffer, q, plane, z, last_z, y + item.row, first_row);
        if (buffers == 1 && q + 1 < q_end) {
          release_to_planes();
          __syncthreads();
          load_plane(sample, q + 1, 0, first_row, first_column);
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
  static constexpr int second_tickets = Numbers::has_second ? Numbers::segments : 0;
  static constexpr int third_tickets =
      Numbers::wants_input ? Numbers::back_tiles(0) * Numbers::back_tiles(1) * Numbers::back_tiles(2) : 0;

  // Whether the last ticket of pass 2 of a sample adds parts of dweight; until then, and until pass 3 is
  // done, the sample has its place in the rings.
  static constexpr bool merges = Numbers::wants_weight && Numbers::segments > 1;
  static constexpr uint32 third_done = third_tickets + (merges ? 1 : 0);

  __device__ __forceinline__ uint32* counters(int64 n) const { return p.control + 4 + n * 4; }

  __device__ __forceinline__ void arrive(uint32* counter) const {
    __syncthreads();
    if (threadIdx.x == 0) count_up(counter);
  }

  __device__ __forceinline__ void run() const {
    const bool by_output = Numbers::may_read_output && p.output != nullptr;
    const int first_tickets = !Numbers::has_first ? 0 : by_output ? 1 : Numbers::segments;
    const int of_sample = first_tickets + second_tickets + third_tickets;
    const int64 first_lag = Numbers::has_first ? p.first_lag : 0;
    const int64 second_lag = Numbers::wants_input ? p.second_lag : 0;
    const int64 tickets = (p.batch + first_lag + second_lag) * of_sample;
    prepare();
    uint32 phases = 0;
    Tickets own(p.control);
#pragma unroll 1
    for (int64 ticket = own.take(); ticket < tickets; ticket = own.take()) {
      const auto sample = static_cast<int64>(static_cast<uint32>(ticket) / static_cast<uint32>(of_sample));
      int item = static_cast<int>(static_cast<uint32>(ticket) % static_cast<uint32>(of_sample));
      if (item < first_tickets) {
        if constexpr (Numbers::has_first) {
          if (sample >= p.batch) continue;
          // By the output alone, or all of it by this block where that is not enough.
          bool is_done = false;
          if constexpr (Numbers::may_read_output) {
            is_done = by_output && output_is_enough(sample);
            if (is_done) finish_slabs_by_output(sample);
          }
          if (!is_done) {
            const int last = by_output ? Numbers::segments : item + 1;
#pragma unroll 1
            for (int segment = item; segment < last; ++segment) pass<false>(sample, segment);
            is_done = arrives_last(counters(sample), by_output ? 1 : Numbers::segments);
            if (is_done) finish_slabs(sample);
          }
          if (is_done) publish(counters(sample) + 1, 1u);
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
            if (third_done > 0 && n >= p.ring_samples) wait_for(counters(n - p.ring_samples) + 3, third_done);
          }
          pass<true>(n, item);
          if constexpr (merges) {
            if (arrives_last(counters(n) + 2, second_tickets)) {
              merge_weights(n);
              arrive(counters(n) + 3);
            }
          } else if constexpr (Numbers::wants_input) {
            arrive(counters(n) + 2);
          }
        }
        continue;
      }
      if constexpr (third_tickets > 0) {
        const int64 n = sample - first_lag - second_lag;
        if (n < 0 || n >= p.batch) continue;
        if (threadIdx.x == 0) wait_for(counters(n) + 2, second_tickets);
        back(n, item - second_tickets, phases);
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
  static constexpr int units = Numbers::units;
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
    const int index = Terms::class_of_unit(of_class, unit);
    const typename Terms::Class own = of_class[index];
    const int within = unit - own.unit;
    const int row_tap = within / Backward::components % own.row_taps;
    const int job = within / Backward::components / own.row_taps;
    const int o = job / own.groups * 16 + lane / 4 + r / 2 * 8;
    const auto entry = Terms::entry(index, job % own.groups * 8 + lane % 4 * 2 + r % 2, row_tap);
    const int of_weight = Terms::weight_index(entry, within % Backward::components);
    if (o < Backward::channels && of_weight >= 0)
      store_one<typename Numbers::WeightGradient>(p.gradient[0], o * Terms::weight_stride + of_weight,
                                                  static_cast<float>(sum));
  }

  __device__ __forceinline__ void weights(int column, int slice) const {
    __shared__ double all[warps][32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64 first = p.batch * slice / slices;
    const int64 last = p.batch * (slice + 1) / slices;
    double sum = 0.0;
#pragma unroll 4
    for (int64 i = first + warp; i < last; i += warps)
      sum += __ldg(p.weight_samples + (i * units * 128 + column * 32 + lane));
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
