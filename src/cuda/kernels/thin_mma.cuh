// A thin convolution and its chains and norm in one launch, by tensor cores, each output computed twice.
//
//   pass 1   x -> convolution -> before-chain -> moments of a tile; the last tile of a sample merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y
//
// A *cell* is one output position of every class (thin.h). A tile is one plane of cells, `tile_y` rows and
// `tile_x` cells of each. Its window of x lies in shared memory, four channels of a position side by side. A
// warp's item is 8 or 16 neighbouring cells: products of M = 16 output channels, N = 8 cells and K = twice
// (a tap, four input channels), of each class only its own taps. A lane then holds neighbours of a row in all
// its classes: rows are put together in shared memory, each with the 16-byte phase of where it goes, and
// leave in pieces of many rows.
//
// Work is taken by ticket: pass 1 of one tile, then pass 2 of the tile `lag` tickets before, so that stores
// run beside arithmetic at all times. Moves x twice (the second time from the second-level cache), y once.
//
// Products of tf32 operands are exact. Operands of 16 bits are tf32 numbers; f32 ones are rounded to it in
// that mode, and else split into two, which leaves 2^-22 of a term. Tiles with an element that is not finite,
// or so large that what follows might overflow, are summed term by term instead ("careful").
#pragma once

#include "thin.cuh"

namespace onepass {

template <int Value>
struct Constant {
  static constexpr int value = Value;
  constexpr __device__ operator int() const { return Value; }
};

// body(Constant<0>{}), ..., body(Constant<Count - 1>{}).
template <int Count, int First = 0, class Body>
__device__ __forceinline__ void for_constant(Body&& body) {
  if constexpr (First < Count) {
    body(Constant<First>{});
    for_constant<Count, First + 1>(body);
  }
}

// D = A B + C, A 16 x 8 (or 16 x 4) of tf32 by rows, B by columns.
__device__ __forceinline__ void mma_k8(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                                       const float* c) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}
__device__ __forceinline__ void mma_k4(float (&d)[4], const uint32 (&a)[4], uint32 b0, const float* c) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %8, %9, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The terms of each class, in pairs: what the products of one warp are.
template <class C>
struct ThinTerms {
  static constexpr int vectors = (C::in_channels + 3) / 4;  // of four input channels

  struct Term {
    int z, y, x;  // of the window, from the cell's first position
    int tap;
    int vector;
  };
  static constexpr __device__ int classes(int d) { return static_cast<int>(C::classes(d)); }
  static constexpr __device__ int count(int d, int r) { return static_cast<int>(C::count(d, r)); }
  static constexpr __device__ int offset(int d, int r, int m) {
    return static_cast<int>(C::base(d, r) + m * C::delta(d));
  }
  static constexpr __device__ int tap(int d, int r, int m) {
    return static_cast<int>(C::first(d, r) + m * C::tap_step(d));
  }
  // The lowest offset of all classes, and how far it is to the highest.
  static constexpr __device__ int low(int d) {
    int least = 1 << 30;
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) least = offset(d, r, m) < least ? offset(d, r, m) : least;
    }
    return least == 1 << 30 ? 0 : least;
  }
  static constexpr __device__ int reach(int d) {
    int most = low(d);
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) most = offset(d, r, m) > most ? offset(d, r, m) : most;
    }
    return most - low(d);
  }
  static constexpr __device__ int terms(int rz, int ry, int rx) {
    return count(0, rz) * count(1, ry) * count(2, rx) * vectors;
  }
  static constexpr __device__ Term term(int rz, int ry, int rx, int i) {
    const int vector = i % vectors;
    const int x = i / vectors % count(2, rx);
    const int y = i / vectors / count(2, rx) % count(1, ry);
    const int z = i / vectors / count(2, rx) / count(1, ry);
    return {
        offset(0, rz, z) - low(0), offset(1, ry, y) - low(1), offset(2, rx, x) - low(2),
        (tap(0, rz, z) * static_cast<int>(C::kernel(1)) + tap(1, ry, y)) * static_cast<int>(C::kernel(2)) +
            tap(2, rx, x),
        vector};
  }
  // Products of all classes before this one.
  static constexpr __device__ int products_before(int rz, int ry, int rx) {
    int sum = 0;
    for (int i = 0; i < (rz * classes(1) + ry) * classes(2) + rx; ++i) {
      sum += (terms(i / (classes(1) * classes(2)), i / classes(2) % classes(1), i % classes(2)) + 1) / 2;
    }
    return sum;
  }
  static constexpr int products = products_before(classes(0), 0, 0);
};

// The bits of an element.
template <int Bytes>
struct Bits {
  using Type = uint32;
};
template <>
struct Bits<2> {
  using Type = uint16;
};

template <class C, class Tail, class Numbers>
struct ThinMma {
  using Parameters = ThinParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Output = typename Tail::Output;
  using Terms = ThinTerms<C>;
  using Term = typename Terms::Term;

  static constexpr int threads = Numbers::threads;
  static constexpr int warps = Numbers::warps;
  static constexpr int channels = C::channels;
  static constexpr int row_tiles = (channels + 15) / 16;
  static constexpr int vectors = Terms::vectors;
  static constexpr int products = Terms::products;
  static constexpr int groups = channels / Tail::group_channels;
  static constexpr int classes_z = Terms::classes(0);
  static constexpr int classes_y = Terms::classes(1);
  static constexpr int classes_x = Terms::classes(2);
  static constexpr int out_z = static_cast<int>(C::output_size(0));
  static constexpr int out_y = static_cast<int>(C::output_size(1));
  static constexpr int out_x = static_cast<int>(C::output_size(2));
  static constexpr int cells_y = (out_y + classes_y - 1) / classes_y;
  static constexpr int tile_y = Numbers::tile_y;
  static constexpr int tile_x = Numbers::tile_x;
  static constexpr int spans = Numbers::spans;  // of 8 cells in an item
  static constexpr int columns = tile_x / (8 * spans);
  static constexpr int window_y = Numbers::window_y;
  static constexpr int window_x = Numbers::window_x;
  static constexpr int window = Numbers::window_z * window_y * window_x;  // positions
  static constexpr bool in_registers = Numbers::weights_in_registers;
  static constexpr bool splits = Numbers::splits;
  // In shared memory: the weights, unless they are in registers, then their rests, where they are split.
  static constexpr int first_rest = in_registers ? 0 : products * row_tiles;
  static constexpr int shared_weights = first_rest + (splits ? products * row_tiles : 0);

  // Rows on their way out: `stage_y` rows of cells at a time. A chunk is what is contiguous in the output:
  // all rows of a plane where a tile has whole rows, else one row.
  static constexpr int stage_rows = Numbers::stage_y * classes_y;
  static constexpr bool whole_rows = Numbers::tiles_x == 1;
  static constexpr int row_pitch = whole_rows ? out_x : Numbers::chunk_pitch;
  static constexpr int chunks_of_plane = whole_rows ? 1 : stage_rows;
  static constexpr int plane_pitch = Numbers::chunk_pitch * chunks_of_plane;
  static constexpr int channel_pitch = Numbers::channel_pitch;
  static constexpr int chunks = channels * classes_z * chunks_of_plane;
  static constexpr int width = 16 / Output::bytes;

  struct alignas(16) Shared {
    alignas(16) unsigned char stage[2][Numbers::stage_bytes];
    float4 x[vectors * window];
    uint32 weights[shared_weights > 0 ? shared_weights : 1][32][4];
    float moments[warps][row_tiles * 16][3];
    uint32 ticket;
  };
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);

  const Parameters& p;
  Shared& s;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int quad = lane / 4;  // of a product: the output channel, and that 8 further
  const int in_quad = lane % 4;

  struct Tile {
    int64 n;
    int index;    // within the sample
    int z, y, x;  // its first cell

    explicit __device__ __forceinline__ Tile(int64 i)
        : n(i / Numbers::tiles),
          index(static_cast<int>(i % Numbers::tiles)),
          z(index / (Numbers::tiles_x * Numbers::tiles_y)),
          y(index / Numbers::tiles_x % Numbers::tiles_y * tile_y),
          x(index % Numbers::tiles_x * tile_x) {}
  };

  template <class Body>
  static __device__ __forceinline__ void for_each_class(Body&& body) {
    for_constant<classes_z>([&](auto rz) {
      for_constant<classes_y>([&](auto ry) { for_constant<classes_x>([&](auto rx) { body(rz, ry, rx); }); });
    });
  }

  // --- Weights, as the products take them ---
  struct Weights {
    uint32 a[in_registers ? products * row_tiles : 1][4];
    float bias[row_tiles][4];  // as sums lie: two cells of a channel, two of that 8 further
  };

  static __device__ __forceinline__ float weight(const Parameters& p, int channel, int input, int tap) {
    if (channel >= channels || input >= C::in_channels) return 0.0f;
    const int index = C::transposed ? (input * channels + channel) * C::taps + tap
                                    : (channel * C::in_channels + input) * C::taps + tap;
    return load_one<typename C::Weight>(p.parameter[0], index);
  }
  static __device__ __forceinline__ float bias(const Parameters& p, int channel) {
    if constexpr (C::has_bias) return load_one<typename C::Bias>(p.parameter[1], channel);
    return 0.0f;
  }

  // A multiplicand as the tensor core takes it; the rest of it where it is split.
  static __device__ __forceinline__ uint32 operand(float x) {
    return __float_as_uint(C::rounds_to_tf32 || splits ? round_to_tf32(x) : x);
  }
  static __device__ __forceinline__ uint32 rest(float x) {
    return __float_as_uint(round_to_tf32(x - round_to_tf32(x)));
  }

  __device__ __forceinline__ void load_weights(Weights& w) const {
    for_each_class([&](auto rz_, auto ry_, auto rx_) {
      constexpr int rz = decltype(rz_)::value;
      constexpr int ry = decltype(ry_)::value;
      constexpr int rx = decltype(rx_)::value;
      constexpr int first = Terms::products_before(rz, ry, rx);
      for_constant<Terms::terms(rz, ry, rx)>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        constexpr Term t = Terms::term(rz, ry, rx, i);
        constexpr int place = i % 2 * 2;
        if constexpr (in_registers) {
          for_constant<2 * row_tiles>([&](auto half_) {
            constexpr int half = decltype(half_)::value;
            w.a[(first + i / 2) * row_tiles + half / 2][place + half % 2] =
                operand(weight(p, half * 8 + quad, t.vector * 4 + in_quad, t.tap));
          });
        }
        if (shared_weights > 0 && i % warps == warp) {
#pragma unroll 1
          for (int half = 0; half < 2 * row_tiles; ++half) {
            const float value = weight(p, half * 8 + quad, t.vector * 4 + in_quad, t.tap);
            const int to = (first + i / 2) * row_tiles + half / 2;
            if constexpr (!in_registers) s.weights[to][lane][place + half % 2] = operand(value);
            if constexpr (splits) s.weights[first_rest + to][lane][place + half % 2] = rest(value);
          }
        }
      });
    });
#pragma unroll
    for (int half = 0; half < 2 * row_tiles; ++half) {
      const int channel = half * 8 + quad;
      const float value = channel < channels ? bias(p, channel) : 0.0f;
      // The first product takes four registers in a row. Of two equal ones the compiler would keep one and
      // copy it for each product, one instruction an output; it does not know that the neighbour's is equal.
      w.bias[half / 2][half % 2 * 2] = value;
      w.bias[half / 2][half % 2 * 2 + 1] = __shfl_xor_sync(0xffffffffu, value, 1);
    }
    __syncthreads();
  }

  template <bool of_rest>
  __device__ __forceinline__ void take_weights(uint32 (&a)[4], const Weights& w, int index) const {
    if constexpr (in_registers && !of_rest) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = w.a[index][i];
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(s.weights[(of_rest ? first_rest : 0) + index][lane]);
      a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
  }

  // --- The largest |x| for which no tile needs care; NaN where a weight is not finite ---
  __device__ __forceinline__ float input_limit() const {
    constexpr float most = 1e30f;  // of a sum
    float largest = 0.0f;          // sum of a channel's |w|; NaN stays
    for (int channel = warp; channel < channels; channel += warps) {
      float sum = 0.0f;
      for (int i = lane; i < C::in_channels * C::taps; i += 32)
        sum += fabsf(weight(p, channel, i / C::taps, i % C::taps));
      largest = pointwise::maximum(lanes_sum<32>(sum), largest);
    }
    if (lane == 0) s.moments[warp][0][0] = largest;
    __syncthreads();
    for (int i = 0; i < warps; ++i) largest = pointwise::maximum(s.moments[i][0][0], largest);
    __syncthreads();
    return largest <= most ? most / pointwise::maximum(largest, 1.0f) : __int_as_float(0x7fffffff);
  }

  // --- The window of x ---
  // Whether the tile needs care.
  __device__ __forceinline__ bool load_window(const Tile& tile, float limit) const {
    using Input = typename Tail::Input;
    __syncthreads();  // nobody reads the one before
    // Of a thread's positions, `threads` apart, the coordinates go on by sums: quotients took 8 of 100
    // instructions of the kernel.
    constexpr int step_x = threads % window_x;
    constexpr int step_y = threads / window_x % window_y;
    constexpr int step_z = threads / (window_x * window_y);
    const int first_x = tile.x * static_cast<int>(C::step(2)) + Terms::low(2);
    const int first_y = tile.y * static_cast<int>(C::step(1)) + Terms::low(1);
    const int first_z = tile.z * static_cast<int>(C::step(0)) + Terms::low(0);
    int x = static_cast<int>(threadIdx.x) % window_x;
    int y = static_cast<int>(threadIdx.x) / window_x % window_y;
    int z = static_cast<int>(threadIdx.x) / (window_x * window_y);
    const char* sample = static_cast<const char*>(p.input) + tile.n * C::input_stride(0) * Input::bytes;
    float largest = 0.0f;
#pragma unroll 2
    for (int i = threadIdx.x; i < window; i += threads) {
      const bool inside = static_cast<unsigned>(first_x + x) < static_cast<unsigned>(C::input_size(2)) &&
                          static_cast<unsigned>(first_y + y) < static_cast<unsigned>(C::input_size(1)) &&
                          static_cast<unsigned>(first_z + z) < static_cast<unsigned>(C::input_size(0));
      const int at = (first_z + z) * static_cast<int>(C::input_stride(2)) +
                     (first_y + y) * static_cast<int>(C::input_stride(3)) +
                     (first_x + x) * static_cast<int>(C::input_stride(4));
#pragma unroll
      for (int vector = 0; vector < vectors; ++vector) {
        float v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          v[k] = 0.0f;
          if (vector * 4 + k >= C::in_channels) continue;
          if (inside) v[k] = load_one<Input>(sample, at + (vector * 4 + k) * C::input_stride(1));
          largest = pointwise::maximum(fabsf(v[k]), largest);
          if constexpr (C::rounds_to_tf32) v[k] = round_to_tf32(v[k]);
        }
        s.x[vector * window + i] = float4{v[0], v[1], v[2], v[3]};
      }
      x += step_x;
      y += step_y;
      z += step_z;
      if (x >= window_x) x -= window_x, ++y;
      if (y >= window_y) y -= window_y, ++z;
    }
    return __syncthreads_or(!(largest <= limit));
  }

  // What the lane's cells have of a term: channel `in_quad` of its vector.
  static constexpr int box_z = Terms::reach(0) + 1, box_y = Terms::reach(1) + 1, box_x = Terms::reach(2) + 1;
  static constexpr bool preloads = classes_z * classes_y > 1 && vectors* box_z* box_y* box_x* spans <= 32;
  struct Columns {
    const float* base;
    float value[preloads ? vectors * box_z * box_y * box_x : 1][spans];

    static __device__ __forceinline__ constexpr int place(const Term& t) {
      return ((t.vector * box_z + t.z) * box_y + t.y) * box_x + t.x;
    }
    __device__ __forceinline__ float from_shared(const Term& t, int span) const {
      return base[(((t.vector * Numbers::window_z + t.z) * window_y + t.y) * window_x + t.x +
                   span * 8 * static_cast<int>(C::step(2))) *
                  4];
    }
    __device__ __forceinline__ float at(const Term& t, int span) const {
      if constexpr (preloads) return value[place(t)][span];
      return from_shared(t, span);
    }
  };

  __device__ __forceinline__ Columns columns_of(int y, int column) const {
    Columns c;
    c.base = reinterpret_cast<const float*>(s.x) +
             (y * static_cast<int>(C::step(1)) * window_x +
              (column * spans * 8 + quad) * static_cast<int>(C::step(2))) *
                 4 +
             in_quad;
    if constexpr (preloads) {
#pragma unroll
      for (int i = 0; i < vectors * box_z * box_y * box_x; ++i) {
#pragma unroll
        for (int span = 0; span < spans; ++span)
          c.value[i][span] = c.from_shared(
              Term{i / (box_x * box_y) % box_z, i / box_x % box_y, i % box_x, 0, i / (box_x * box_y * box_z)},
              span);
      }
    }
    return c;
  }

  // --- Sums of the classes (rz, ry, all of x): [16 channels][class][8 cells], four a lane ---
  using Sums = float[row_tiles][classes_x][spans][4];

  template <int rz, int ry>
  __device__ __forceinline__ void convolve(Sums& sum, const Weights& w, const Columns& c) const {
    for_constant<classes_x>([&](auto rx_) {
      constexpr int rx = decltype(rx_)::value;
      constexpr int first = Terms::products_before(rz, ry, rx);
      constexpr int terms = Terms::terms(rz, ry, rx);
      if constexpr (terms == 0) {
        for_constant<row_tiles * spans>([&](auto i_) {
          constexpr int i = decltype(i_)::value;
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[i / spans][rx][i % spans][k] = w.bias[i / spans][k];
        });
      }
      if constexpr (splits) {
        convolve_split<rz, ry, rx>(sum, w, c);
        return;
      }
      for_constant<(terms + 1) / 2>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        constexpr bool both = 2 * i + 1 < terms;
        constexpr Term t = Terms::term(rz, ry, rx, 2 * i);
        constexpr Term u = Terms::term(rz, ry, rx, both ? 2 * i + 1 : 2 * i);
        uint32 b[spans][2];
        for_constant<spans>([&](auto span_) {
          constexpr int span = decltype(span_)::value;
          b[span][0] = __float_as_uint(c.at(t, span));
          if constexpr (both) b[span][1] = __float_as_uint(c.at(u, span));
        });
        for_constant<row_tiles>([&](auto m_) {
          constexpr int m = decltype(m_)::value;
          uint32 a[4];
          take_weights<false>(a, w, (first + i) * row_tiles + m);
          for_constant<spans>([&](auto span_) {
            constexpr int span = decltype(span_)::value;
            float(&d)[4] = sum[m][rx][span];
            if constexpr (both) {
              mma_k8(d, a, b[span][0], b[span][1], i == 0 ? w.bias[m] : d);
            } else {
              mma_k4(d, a, b[span][0], i == 0 ? w.bias[m] : d);
            }
          });
        });
      });
    });
  }

  // The same where x = x1 + x2, w = w1 + w2: small terms apart; the tensor core truncates its sums, so that
  // at most 64 terms are added in it.
  template <int rz, int ry, int rx>
  __device__ __forceinline__ void convolve_split(Sums& sum, const Weights& w, const Columns& c) const {
    constexpr int first = Terms::products_before(rz, ry, rx);
    constexpr int terms = Terms::terms(rz, ry, rx);
    constexpr int count = (terms + 1) / 2;
    constexpr int at_once = 8;
    const float zero[4] = {};
    for_constant<row_tiles>([&](auto m_) {
      constexpr int m = decltype(m_)::value;
      for_constant<spans>([&](auto span_) {
        constexpr int span = decltype(span_)::value;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[m][rx][span][k] = w.bias[m][k];
      });
    });
    for_constant<(count + at_once - 1) / at_once>([&](auto part_) {
      constexpr int part = decltype(part_)::value;
      constexpr int here = count - part * at_once < at_once ? count - part * at_once : at_once;
      float large[row_tiles][spans][4], small[row_tiles][spans][4];
      for_constant<here>([&](auto j_) {
        constexpr int j = decltype(j_)::value;
        constexpr int i = part * at_once + j;
        constexpr bool both = 2 * i + 1 < terms;
        constexpr Term t = Terms::term(rz, ry, rx, 2 * i);
        constexpr Term u = Terms::term(rz, ry, rx, both ? 2 * i + 1 : 2 * i);
        uint32 b[spans][2], b_rest[spans][2];
        for_constant<spans>([&](auto span_) {
          constexpr int span = decltype(span_)::value;
          b[span][0] = operand(c.at(t, span));
          b_rest[span][0] = rest(c.at(t, span));
          if constexpr (both) {
            b[span][1] = operand(c.at(u, span));
            b_rest[span][1] = rest(c.at(u, span));
          }
        });
        for_constant<row_tiles>([&](auto m_) {
          constexpr int m = decltype(m_)::value;
          uint32 a[4], a_rest[4];
          take_weights<false>(a, w, (first + i) * row_tiles + m);
          take_weights<true>(a_rest, w, (first + i) * row_tiles + m);
          for_constant<spans>([&](auto span_) {
            constexpr int span = decltype(span_)::value;
            float(&d)[4] = large[m][span];
            float(&e)[4] = small[m][span];
            if constexpr (both) {
              mma_k8(e, a, b_rest[span][0], b_rest[span][1], j == 0 ? zero : e);
              mma_k8(e, a_rest, b[span][0], b[span][1], e);
              mma_k8(d, a, b[span][0], b[span][1], j == 0 ? zero : d);
            } else {
              mma_k4(e, a, b_rest[span][0], j == 0 ? zero : e);
              mma_k4(e, a_rest, b[span][0], e);
              mma_k4(d, a, b[span][0], j == 0 ? zero : d);
            }
          });
        });
      });
      for_constant<row_tiles>([&](auto m_) {
        constexpr int m = decltype(m_)::value;
        for_constant<spans>([&](auto span_) {
          constexpr int span = decltype(span_)::value;
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[m][rx][span][k] += large[m][span][k] + small[m][span][k];
        });
      });
    });
  }

  // One sum, term by term, of the taps that meet an input. Static: an address of the agent would make all
  // its shared memory generic.
  static __device__ __noinline__ float careful_sum(const Parameters& p, int64 n, int channel, int rz, int ry,
                                                   int rx, int z, int y, int x) {
    if (channel >= channels) return 0.0f;
    const int r[3] = {rz, ry, rx};
    const int cell[3] = {z, y, x};
    float sum = bias(p, channel);
    for (int input = 0; input < C::in_channels; ++input) {
      float part = 0.0f;
      for (int i = 0; i < Terms::count(0, rz) * Terms::count(1, ry) * Terms::count(2, rx); ++i) {
        const int m[3] = {i / (Terms::count(2, rx) * Terms::count(1, ry)),
                          i / Terms::count(2, rx) % Terms::count(1, ry), i % Terms::count(2, rx)};
        int64 at = n * C::input_stride(0) + input * C::input_stride(1);
        int tap = 0;
        bool meets = true;
        for (int d = 0; d < 3; ++d) {
          const int position = cell[d] * static_cast<int>(C::step(d)) + Terms::offset(d, r[d], m[d]);
          meets &= position >= 0 && position < C::input_size(d);
          at += position * C::input_stride(d + 2);
          tap = tap * static_cast<int>(C::kernel(d)) + Terms::tap(d, r[d], m[d]);
        }
        if (!meets) continue;
        float a = weight(p, channel, input, tap);
        float b = load_one<typename Tail::Input>(p.input, at);
        if constexpr (C::rounds_to_tf32) a = round_to_tf32(a), b = round_to_tf32(b);
        part = fmaf(a, b, part);
      }
      sum += part;
    }
    return sum;
  }

  template <bool careful, int rz, int ry>
  __device__ __forceinline__ void sums_of(Sums& sum, const Weights& w, const Columns& c, const Tile& tile,
                                          int y, int column) const {
    if constexpr (!careful) {
      convolve<rz, ry>(sum, w, c);
    } else {
      for_constant<row_tiles>([&](auto m_) {
        constexpr int m = decltype(m_)::value;
        for_constant<classes_x>([&](auto rx_) {
          constexpr int rx = decltype(rx_)::value;
          for_constant<spans * 4>([&](auto i_) {
            constexpr int i = decltype(i_)::value;
            sum[m][rx][i / 4][i % 4] =
                careful_sum(p, tile.n, m * 16 + i % 4 / 2 * 8 + quad, rz, ry, rx, tile.z, tile.y + y,
                            tile.x + (column * spans + i / 4) * 8 + 2 * in_quad + i % 2);
          });
        });
      });
    }
  }

  // --- Chains ---
  template <class Chain>
  struct Operands {
    ChannelValues<Chain, 1> row[row_tiles][2];
    __device__ __forceinline__ void load(const Parameters& p, int64 n, int quad) {
#pragma unroll
      for (int half = 0; half < 2 * row_tiles; ++half) {
        const int channel = half * 8 + quad;
        row[half / 2][half % 2].load(p, n, channel < channels ? channel : 0);
      }
    }
  };

  template <class Chain>
  static __device__ __forceinline__ float apply(float x, const ChannelValues<Chain, 1>& own) {
    const typename Chain::template Tensors<1> none;
    return Chain::value(x, own.value[0], none, 0);
  }

  // Whether the lane's element (cell 2 in_quad + i of the last span, class rx) can lie beyond the row's end.
  static constexpr __device__ bool may_end(int i, int rx) {
    return ((Numbers::tiles_x * columns * spans - 1) * 8 + 6 + i) * classes_x + rx >= out_x;
  }
  static __device__ __forceinline__ bool ends(int cell, int i, int rx) {
    return may_end(i, rx) && (cell + i) * classes_x + rx >= out_x;
  }
  // Whether the output has all classes of a row of cells.
  static __device__ __forceinline__ bool is_inside(const Tile& tile, int y) {
    return (tile.z + 1) * classes_z <= out_z && (tile.y + y + 1) * classes_y <= out_y;
  }
  // Calls body(rz, ry) for the classes of the row that the output has.
  template <bool inside, class Body>
  static __device__ __forceinline__ void for_each_row(const Tile& tile, int y, Body&& body) {
    for_constant<classes_z>([&](auto rz_) {
      constexpr int rz = decltype(rz_)::value;
      if (inside || tile.z * classes_z + rz < out_z) {
        for_constant<classes_y>([&](auto ry_) {
          constexpr int ry = decltype(ry_)::value;
          if (inside || (tile.y + y) * classes_y + ry < out_y) body(rz_, ry_);
        });
      }
    });
  }

  // --- Pass 1: sums of distances from a pivot, which is the quad's first value of the channel ---
  struct Distances {
    float pivot[row_tiles][2] = {};
    float sum[row_tiles][2] = {};
    float square[row_tiles][2] = {};
    int count = 0;
  };

  template <bool careful>
  __device__ __forceinline__ void begin(Distances& own, const Weights& w, const Columns& c,
                                        const Operands<Before>& operands, const Tile& tile, int y,
                                        int column) const {
    Sums sum;
    sums_of<careful, 0, 0>(sum, w, c, tile, y, column);
    for_constant<row_tiles * 2>([&](auto half_) {
      constexpr int half = decltype(half_)::value;
      const float value = apply<Before>(sum[half / 2][0][0][half % 2 * 2], operands.row[half / 2][half % 2]);
      own.pivot[half / 2][half % 2] = __shfl_sync(0xffffffffu, value, lane & ~3);
    });
  }

  template <bool careful, bool inside>
  __device__ __forceinline__ void add(Distances& own, const Weights& w, const Columns& c,
                                      const Operands<Before>& operands, const Tile& tile, int y,
                                      int column) const {
    for_each_row<inside>(tile, y, [&](auto rz_, auto ry_) {
      constexpr int rz = decltype(rz_)::value;
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      sums_of<careful, rz, ry>(sum, w, c, tile, y, column);
      for_constant<spans>([&](auto span_) {
        constexpr int span = decltype(span_)::value;
        const int cell = tile.x + (column * spans + span) * 8 + 2 * in_quad;
        for_constant<classes_x>([&](auto rx_) {
          constexpr int rx = decltype(rx_)::value;
          for_constant<row_tiles * 2>([&](auto half_) {
            constexpr int half = decltype(half_)::value;
            constexpr int m = half / 2;
            constexpr int h = half % 2;
            float* pair = sum[m][rx][span] + 2 * h;
            pair[0] = apply<Before>(pair[0], operands.row[m][h]);
            pair[1] = apply<Before>(pair[1], operands.row[m][h]);
            for_constant<2>([&](auto i_) {
              constexpr int i = decltype(i_)::value;
              const float distance = pair[i] - own.pivot[m][h];
              if (!ends(cell, i, rx)) {
                own.sum[m][h] += distance;
                own.square[m][h] = fmaf(distance, distance, own.square[m][h]);
              }
            });
          });
          for_constant<2>([&](auto i_) {
            constexpr int i = decltype(i_)::value;
            own.count += !ends(cell, i, rx);
          });
        });
      });
    });
  }

  template <bool careful>
  __device__ __forceinline__ void measure(const Tile& tile, const Weights& w) const {
    Operands<Before> operands;
    operands.load(p, tile.n, quad);
    Distances own;
    const int rows = cells_y - tile.y < tile_y ? cells_y - tile.y : tile_y;
#pragma unroll 1
    for (int item = warp; item < rows * columns; item += warps) {
      const int y = item / columns;
      const int column = item % columns;
      const Columns c = columns_of(y, column);
      if (item == warp) begin<careful>(own, w, c, operands, tile, y, column);
      if (!careful && is_inside(tile, y)) {
        add<careful, true>(own, w, c, operands, tile, y, column);
      } else {
        add<careful, false>(own, w, c, operands, tile, y, column);
      }
    }
    const float count = lanes_sum<4>(static_cast<float>(own.count));
    const float per_element = 1.0f / count;
#pragma unroll
    for (int half = 0; half < 2 * row_tiles; ++half) {
      const float sum = lanes_sum<4>(own.sum[half / 2][half % 2]);
      const float square = lanes_sum<4>(own.square[half / 2][half % 2]);
      if (in_quad == 0) {
        float* to = s.moments[warp][half * 8 + quad];
        to[0] = count;
        to[1] = fmaf(sum, per_element, own.pivot[half / 2][half % 2]);
        to[2] = fmaf(-sum, sum * per_element, square);
      }
    }
    __syncthreads();
    for (int group = warp; group < groups; group += warps) {
      Moments all;
      for (int i = lane; i < warps * Tail::group_channels; i += 32) {
        const float* from =
            s.moments[i / Tail::group_channels][group * Tail::group_channels + i % Tail::group_channels];
        if (from[0] > 0.0f) all.merge(from[0], from[1], from[2]);
      }
      const float elements = lanes_sum<32>(all.count);
      float mean, m2;
      team_moments<32, threads>(all, elements, nullptr, mean, m2);
      if (lane == 0) {
        float* to = p.parts + ((tile.n * Numbers::tiles + tile.index) * groups + group) * 3;
        to[0] = elements;
        to[1] = mean;
        to[2] = m2;
      }
    }
    uint32* counters = p.control + 4 + tile.n * 4;
    if (arrives_last(counters, Numbers::tiles)) {
      merge(tile.n);
      publish(counters + 2, 1u);
    }
  }

  // The moments of a sample's slabs, a warp for each.
  __device__ __forceinline__ void merge(int64 n) const {
    for (int group = warp; group < groups; group += warps) {
      Moments all;
      for (int i = lane; i < Numbers::tiles; i += 32) {
        const float* from = p.parts + ((n * Numbers::tiles + i) * groups + group) * 3;
        all.merge(load_shared_by_blocks(from), load_shared_by_blocks(from + 1),
                  load_shared_by_blocks(from + 2));
      }
      constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
      float mean, m2;
      team_moments<32, threads>(all, elements, nullptr, mean, m2);
      if (lane == 0) {
        float* to = p.statistics + 2 * (n * groups + group);
        to[0] = mean;
        to[1] = 1.0f / sqrtf(m2 / elements + Tail::eps);
      }
    }
  }

  // --- Pass 2 ---
  struct Scales {
    float scale[row_tiles][2];
    float shift[row_tiles][2];
  };
  __device__ __forceinline__ void load_scales(Scales& own, int64 n) const {
    if constexpr (Tail::has_norm) {
#pragma unroll
      for (int half = 0; half < 2 * row_tiles; ++half) {
        const int channel = half * 8 + quad < channels ? half * 8 + quad : 0;
        const float* slab = p.statistics + 2 * (n * groups + channel / Tail::group_channels);
        const float scale = Tail::weight(p, channel) * load_shared_by_blocks(slab + 1);
        own.scale[half / 2][half % 2] = scale;
        own.shift[half / 2][half % 2] = fmaf(-load_shared_by_blocks(slab), scale, Tail::bias(p, channel));
      }
    }
  }

  // The place in the output of the first element of a tile's row.
  static __device__ __forceinline__ int64 output_index(const Tile& tile, int channel, int z, int y) {
    return (((tile.n * channels + channel) * out_z + z) * out_y + y) * out_x + tile.x * classes_x;
  }
  // Elements from the 16-byte boundary before it.
  __device__ __forceinline__ int phase(int64 index) const {
    return static_cast<int>((static_cast<uint32>(reinterpret_cast<uint64>(p.output) / Output::bytes) +
                             static_cast<uint32>(index)) %
                            width);
  }

  template <bool careful, bool inside>
  __device__ __forceinline__ void put(const Tile& tile, const Weights& w, const Operands<Before>& operands,
                                      const Operands<After>& after, const Scales& scales,
                                      unsigned char* buffer, int first_y, int y, int column) const {
    const Columns c = columns_of(first_y + y, column);
    const int first_row = (tile.y + first_y) * classes_y;
    for_each_row<inside>(tile, first_y + y, [&](auto rz_, auto ry_) {
      constexpr int rz = decltype(rz_)::value;
      constexpr int ry = decltype(ry_)::value;
      const int row = y * classes_y + ry;
      // 8 channels further the phase is the same: a vector has 4 or 8 elements.
      const int64 index =
          output_index(tile, quad, tile.z * classes_z + rz, first_row + (whole_rows ? 0 : row));
      unsigned char* to = buffer + (quad * channel_pitch + rz * plane_pitch + row * row_pitch + phase(index) +
                                    (column * spans * 8 + 2 * in_quad) * classes_x) *
                                       Output::bytes;
      Sums sum;
      sums_of<careful, rz, ry>(sum, w, c, tile, first_y + y, column);
      for_constant<spans>([&](auto span_) {
        constexpr int span = decltype(span_)::value;
        const int cell = tile.x + (column * spans + span) * 8 + 2 * in_quad;
        for_constant<classes_x>([&](auto rx_) {
          constexpr int rx = decltype(rx_)::value;
          for_constant<row_tiles * 2>([&](auto half_) {
            constexpr int half = decltype(half_)::value;
            constexpr int m = half / 2;
            constexpr int h = half % 2;
            float* pair = sum[m][rx][span] + 2 * h;
            pair[0] = apply<Before>(pair[0], operands.row[m][h]);
            pair[1] = apply<Before>(pair[1], operands.row[m][h]);
            for_constant<2>([&](auto i_) {
              constexpr int i = decltype(i_)::value;
              float value = pair[i];
              if constexpr (Tail::has_norm) value = fmaf(value, scales.scale[m][h], scales.shift[m][h]);
              value = apply<After>(value, after.row[m][h]);
              const bool in_range = channels % 16 == 0 || half * 8 + quad < channels;
              if (in_range && !ends(cell, i, rx))
                store_one<Output>(to, half * 8 * channel_pitch + (span * 8 + i) * classes_x + rx, value);
            });
          });
        });
      });
    });
  }

  template <bool careful>
  __device__ __forceinline__ void write(const Tile& tile, const Weights& w) const {
    Operands<Before> operands;
    Operands<After> after;
    Scales scales;
    operands.load(p, tile.n, quad);
    after.load(p, tile.n, quad);
    load_scales(scales, tile.n);
#pragma unroll 1
    for (int first_y = 0, turn = 0; first_y < tile_y; first_y += Numbers::stage_y, ++turn) {
      const int left = (cells_y - tile.y < tile_y ? cells_y - tile.y : tile_y) - first_y;
      if (left <= 0) break;
      const int rows = left < Numbers::stage_y ? left : Numbers::stage_y;
      unsigned char* buffer = s.stage[turn % 2];
#pragma unroll 1
      for (int item = warp; item < rows * columns; item += warps) {
        const int y = item / columns;
        const int column = item % columns;
        if (!careful && is_inside(tile, first_y + y)) {
          put<careful, true>(tile, w, operands, after, scales, buffer, first_y, y, column);
        } else {
          put<careful, false>(tile, w, operands, after, scales, buffer, first_y, y, column);
        }
      }
      send(tile, buffer, first_y, rows);
    }
  }

  // A chunk of a stage: where it lies in the buffer, where it goes, how long it is.
  struct Chunk {
    int from;  // all in elements
    int64 to;
    int length;
    int head;    // before the first whole vector
    int middle;  // in whole vectors
  };
  __device__ __forceinline__ Chunk chunk_of(const Tile& tile, int first_y, int rows, int i) const {
    const int channel = i / (classes_z * chunks_of_plane);
    const int rz = i / chunks_of_plane % classes_z;
    const int row = i % chunks_of_plane;
    const int z = tile.z * classes_z + rz;
    const int y = (tile.y + first_y) * classes_y + row;
    const int rows_left = z < out_z && row < rows * classes_y ? out_y - y : 0;
    const int left = whole_rows ? rows_left * out_x : rows_left > 0 ? out_x - tile.x * classes_x : 0;
    const int most = whole_rows ? rows * classes_y * out_x : tile_x * classes_x;
    Chunk chunk;
    chunk.to = output_index(tile, channel, z, y);
    const int shift = phase(chunk.to);
    chunk.from = channel * channel_pitch + rz * plane_pitch + row * row_pitch + shift;
    chunk.length = left < 0 ? 0 : left < most ? left : most;
    chunk.head = (width - shift) % width;
    chunk.head = chunk.head < chunk.length ? chunk.head : chunk.length;
    chunk.middle = (chunk.length - chunk.head) / width * width;
    return chunk;
  }

  // The rows of a stage to where they belong, a warp for each chunk. Bulk copies took 0.23 ms more on s60: a
  // hundred cycles for each, whatever its size. The buffer may be written again after the next stage's
  // barrier.
  __device__ __forceinline__ void send(const Tile& tile, const unsigned char* buffer, int first_y,
                                       int rows) const {
    using Element = typename Bits<Output::bytes>::Type;
    // Where a warp's chunks are the same one of channels so far apart that phases repeat, only addresses go
    // on.
    constexpr int of_channel = classes_z * chunks_of_plane;
    constexpr int further = warps / of_channel;  // channels
    constexpr bool alike = warps % of_channel == 0 && further * Tail::spatial % width == 0;
    __syncthreads();
    if (warp >= chunks) return;
    Chunk chunk = chunk_of(tile, first_y, rows, warp);
#pragma unroll 1
    for (int i = warp; i < chunks; i += warps) {
      if constexpr (!alike) chunk = chunk_of(tile, first_y, rows, i);
      const auto* from = reinterpret_cast<const Element*>(buffer) + chunk.from;
      auto* to = static_cast<Element*>(p.output) + chunk.to;
#pragma unroll 2
      for (int k = chunk.head + lane * width; k < chunk.head + chunk.middle; k += 32 * width)
        __stcs(reinterpret_cast<uint4*>(to + k), *reinterpret_cast<const uint4*>(from + k));
      const int behind = chunk.head + chunk.middle + lane;
      if (lane < chunk.head) to[lane] = from[lane];
      if (behind < chunk.length) to[behind] = from[behind];
      chunk.from += further * channel_pitch;
      chunk.to += further * Tail::spatial;
    }
  }

  // --- Work ---
  __device__ __forceinline__ uint32 take_ticket() const {
    __syncthreads();
    if (threadIdx.x == 0) s.ticket = atomicAdd(p.control, 1u);
    __syncthreads();
    return s.ticket;
  }

  __device__ __forceinline__ void run() const {
    Weights w;
    load_weights(w);
    const float limit = input_limit();
    const int64 tiles = p.batch * Numbers::tiles;
    const int64 lag = Tail::has_norm ? p.wave_units * Numbers::tiles : 0;
#pragma unroll 1
    for (int64 ticket = take_ticket(); ticket < tiles + lag; ticket = take_ticket()) {
      if (Tail::has_norm && ticket < tiles) {
        const Tile tile(ticket);
        if (load_window(tile, limit)) {
          measure<true>(tile, w);
          if constexpr (in_registers) load_weights(w);  // anew: not kept in memory over the calls there
        } else {
          measure<false>(tile, w);
        }
      }
      if (ticket >= lag) {
        const Tile tile(ticket - lag);
        if (Tail::has_norm && threadIdx.x == 0) wait_for(p.control + 4 + tile.n * 4 + 2, 1u);
        if (load_window(tile, limit)) {
          write<true>(tile, w);
          if constexpr (in_registers) load_weights(w);
        } else {
          write<false>(tile, w);
        }
      }
    }
  }
};

}  // namespace onepass
