// A wide convolution with what follows it up to the norm, as an implicit matrix product by instructions that
// every GPU from sm_80 on has. What the norm needs of other tiles comes in a launch of its own
// (gemm_finish.cuh, or GemmMmaMean below).
//
// A tile is a box of outputs of one class by `tile_rows` output channels, and a block's work. What it meets
// of x (its window) lies in shared memory as [vector of channels][place], a vector being 16 bytes of operands
// (eight of 16 bits, or four of tf32): any eight vectors are a matrix of a product, so that a tap is a number
// added to their addresses, whatever stride and dilation are. Places of one dimension are ordered so that
// neighbouring outputs meet neighbouring places. Weights, packed by a launch before, are the left operand.
//
//   weights   by asynchronous copies, a ring of stages of a group of taps of one chunk of input channels
//   x         through registers, where it is rounded or split: while a group of this chunk is multiplied, a
//             part of the next chunk's window is on its way. Two windows.
//
// f32 operands are rounded to f16 in tf32's precision, as exactly as to tf32, or split in two of them
// otherwise: three products, and sums that leave the tensor cores, which truncate, after at most 64 terms. A
// sample that f16 has no room for is marked, and done again by another kernel; all are where a weight is not
// finite, for it would meet the zeros beside the input. Where the classes of a transposed convolution are
// tiles of their own, operands are tf32, or two of them.
#pragma once

#include "device/mma.cuh"
#include "gemm/gemm.cuh"
#include "gemm/store/finish.cuh"

namespace onepass {

// The largest that has two parts of tf32.
constexpr float most_split = 0x1.ffep127f;

// Where things lie.
template <class C, class Numbers>
struct GemmMmaGeometry {
  // Classes whose outputs meet the same x are rows of one product (row `channel * row_classes + class`),
  // others are tiles of their own.
  static constexpr int all_classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr int row_classes = Numbers::merges_classes ? all_classes : 1;
  static constexpr int classes = Numbers::merges_classes ? 1 : all_classes;
  static constexpr int rows = static_cast<int>(C::channels) * row_classes;

  static __device__ __forceinline__ int64 sample_offset(int64 n) {
    return origin<C>(n, Numbers::stride(0), Numbers::stride(1), static_cast<int>(C::channels));
  }
  // Where a row's outputs begin in a sample.
  static __device__ __forceinline__ int64 row_offset(int row) {
    if constexpr (row_classes == 1) return row * Numbers::stride(1);
    const int channel = row / row_classes;
    const ThinClass<C> own(row - channel * row_classes);
    int64 offset = channel * Numbers::stride(1);
#pragma unroll
    for (int d = 0; d < 3; ++d) offset += own.r[d] * Numbers::stride(d + 2);
    return offset;
  }

  // Places of a dimension: `width` of them are a step of the convolution apart, and the next `width` begin
  // `unit` further.
  static __device__ __forceinline__ int place(int d, int entry) {
    const int run = entry / Numbers::width(d);
    return (entry - run * Numbers::width(d)) * static_cast<int>(C::step(d)) + run * Numbers::unit(d);
  }
  static constexpr __device__ int spread(int d) {
    return static_cast<int>(C::delta(d) < 0 ? -C::delta(d) : C::delta(d));
  }
  // How many places tap `m` is after the first of the window.
  static __device__ __forceinline__ int tap_shift(const ThinClass<C>& own, int d, int m) {
    const int index = C::delta(d) < 0 ? own.count[d] - 1 - m : m;
    if (Numbers::compact(d)) return index * Numbers::width(d);
    const int distance = index * spread(d);
    const int step = static_cast<int>(C::step(d));
    return distance % step * Numbers::width(d) + distance / step;
  }
  // Where the window of a box that begins at output 0 begins.
  static __device__ __forceinline__ int low(const ThinClass<C>& own, int d) {
    return own.base[d] - (C::delta(d) < 0 ? (own.count[d] - 1) * spread(d) : 0);
  }
  static constexpr int window = Numbers::entries(0) * Numbers::entries(1) * Numbers::entries(2);

  // Taps of the classes before.
  static __device__ __forceinline__ int taps_before(int index) {
    int taps = 0;
    for (int i = 0; i < index; ++i) {
      const ThinClass<C> own(i);
      taps += own.count[0] * own.count[1] * own.count[2];
    }
    return taps;
  }
};

template <class C, class Tail, class Numbers>
struct alignas(16) GemmMmaShared {
  static constexpr int warps = Numbers::threads / 32;
  // 32 columns, and as many more that pairs of four rows lie in different banks; so are 16 rows of columns.
  static constexpr int value_pitch = 40;
  struct Rings {
    uint4 x[2][Numbers::parts][Numbers::vectors][Numbers::window_pitch];
    uint4 weights[Numbers::stages][Numbers::group_taps][Numbers::parts][Numbers::vectors][Numbers::tile_rows];
  };
  // After the products.
  struct Finish {
    float4 rows[Numbers::warps_n][Numbers::tile_rows];  // moments
    float values[warps][16][value_pitch];               // on their way to memory
  };
  union {
    Rings rings;
    Finish finish;
  };
  int sources[Numbers::window_pitch];    // where places of the window lie in a channel of x, -1: nowhere
  int targets[Numbers::tile_positions];  // where positions of the tile lie in a channel, -1: nowhere
  int tap_shifts[Numbers::most_taps];    // in bytes
};

template <class C, class Tail, class Numbers>
struct GemmMma {
  using Parameters = GemmMmaParameters<Tail::parameters>;
  using Shared = GemmMmaShared<C, Tail, Numbers>;
  using Geometry = GemmMmaGeometry<C, Numbers>;
  using Input = typename Tail::Input;
  using Output = typename Tail::Output;
  using Product = typename Numbers::Product;
  // What is computed here: without a norm everything.
  using Chain = typename gemm::If<Tail::has_norm, typename Tail::Before, typename Tail::After>::Type;
  static constexpr int threads = Numbers::threads;
  static constexpr int row_tiles = Numbers::row_tiles;        // of 16, of a warp
  static constexpr int column_tiles = Numbers::column_tiles;  // of 8
  static constexpr int warp_rows = 16 * row_tiles;
  static constexpr int warp_columns = 8 * column_tiles;
  static constexpr int vectors = Numbers::vectors;      // of a chunk
  static constexpr int of_vector = Numbers::of_vector;  // channels
  static constexpr int steps = vectors / 2;             // products of a tap
  static constexpr bool splits = Numbers::parts == 2;
  static constexpr int window = Geometry::window;
  static constexpr int rows = Geometry::rows;
  static constexpr int padded_rows = Numbers::channel_tiles * Numbers::tile_rows;
  static constexpr int group_rows = Tail::group_channels * Geometry::row_classes;
  static constexpr int slabs_of_sample = Tail::channels / Tail::group_channels;
  static constexpr int spans = Numbers::spans;  // channel tiles a slab may have channels in
  static constexpr int position_parts = Geometry::classes * Numbers::position_tiles;
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);
  static_assert(column_tiles % 4 == 0 && vectors % 2 == 0);

  const Parameters& p;
  Shared& s;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int first_row = warp / Numbers::warps_n * warp_rows;  // of the warp, in the tile
  const int first_column = warp % Numbers::warps_n * warp_columns;

  struct Item {
    int64 n;
    int class_index;
    int channel_tile;
    int position_tile;

    // Tiles that read the same x run together.
    __device__ __forceinline__ explicit Item(uint32 index) {
      constexpr uint32 of_sample = Geometry::classes * Numbers::channel_tiles * Numbers::position_tiles;
      const uint32 sample = index / of_sample;
      uint32 rest = index - sample * of_sample;
      n = sample;
      class_index = static_cast<int>(rest / (Numbers::channel_tiles * Numbers::position_tiles));
      rest -= static_cast<uint32>(class_index * Numbers::channel_tiles * Numbers::position_tiles);
      position_tile = static_cast<int>(rest / Numbers::channel_tiles);
      channel_tile = static_cast<int>(rest) - position_tile * Numbers::channel_tiles;
    }
  };

  // --- Where the tile's elements lie ---
  __device__ __forceinline__ void prepare(const Item& item, const ThinClass<C>& own) const {
    const int y = item.position_tile / Numbers::boxes_x;
    const int z = y / Numbers::boxes_y;
    const int first[3] = {z * Numbers::box(0), (y - z * Numbers::boxes_y) * Numbers::box(1),
                          (item.position_tile - y * Numbers::boxes_x) * Numbers::box(2)};
    for (int i = thread; i < window; i += threads) {
      const int row = i / Numbers::entries(2);
      const int plane = row / Numbers::entries(1);
      const int entry[3] = {plane, row - plane * Numbers::entries(1), i - row * Numbers::entries(2)};
      int offset = 0;
      bool inside = true;
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        const int at =
            first[d] * static_cast<int>(C::step(d)) + Geometry::low(own, d) + Geometry::place(d, entry[d]);
        inside &= static_cast<unsigned>(at) < static_cast<unsigned>(C::input_size(d));
        offset += at * static_cast<int>(C::input_stride(d + 2));
      }
      s.sources[i] = inside ? offset : -1;
    }
    for (int i = thread; i < Numbers::tile_positions; i += threads) {
      const int row = i / Numbers::box(2);
      const int plane = row / Numbers::box(1);
      const int in_box[3] = {plane, row - plane * Numbers::box(1), i - row * Numbers::box(2)};
      int offset = 0;
      bool inside = plane < Numbers::box(0);
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        const int j = first[d] + in_box[d];
        inside &= j < own.positions[d];
        offset += (own.r[d] + static_cast<int>(C::classes(d)) * j) * static_cast<int>(Numbers::stride(d + 2));
      }
      s.targets[i] = inside ? offset : -1;
    }
    const int taps = own.count[0] * own.count[1] * own.count[2];
    for (int t = thread; t < taps; t += threads) {
      const int m1 = t / own.count[2];
      const int m0 = m1 / own.count[1];
      s.tap_shifts[t] = ((Geometry::tap_shift(own, 0, m0) * Numbers::entries(1) +
                          Geometry::tap_shift(own, 1, m1 - m0 * own.count[1])) *
                             Numbers::entries(2) +
                         Geometry::tap_shift(own, 2, t - m1 * own.count[2])) *
                        16;
    }
  }
  // Where the window of the tile's i-th position begins.
  static __device__ __forceinline__ int first_place(int i) {
    const int row = i / Numbers::box(2);
    int plane = row / Numbers::box(1);
    // Positions that only fill the tile stand for one of it.
    if (plane >= Numbers::box(0)) return 0;
    return (plane * Numbers::entries(1) + row - plane * Numbers::box(1)) * Numbers::entries(2) + i -
           row * Numbers::box(2);
  }

  // --- x ---
  // A vector as it comes: one element a word, or words as they lie in memory.
  struct Vector {
    uint32 word[of_vector];
    int to;  // where it goes in the window; -1: nowhere
  };
  static constexpr bool vectors_fit =
      C::input_stride(1) == 1 && C::in_channels % of_vector == 0 && C::input_stride(0) % of_vector == 0 &&
      C::input_stride(2) % of_vector == 0 && C::input_stride(3) % of_vector == 0 &&
      C::input_stride(4) % of_vector == 0;
  static constexpr bool interleaved = C::input_stride(1) == 1;
  // The block's threads have neighbours in memory: places of one vector of channels, or vectors of a place.
  static constexpr int places_at_once = interleaved ? threads / vectors : threads;
  static constexpr int turns =
      (window + places_at_once - 1) / places_at_once * (interleaved ? 1 : vectors);  // of a chunk
  static constexpr int rounds = (turns + Numbers::batch_vectors - 1) / Numbers::batch_vectors;

  __device__ __forceinline__ void load(const Item& item, bool in_vectors, int chunk, int number,
                                       Vector (&x)[Numbers::batch_vectors]) const {
    using Word = typename gemm::Word<Input::bytes>::Type;
    using Offset = typename gemm::If<Numbers::small_samples, uint32, int64>::Type;  // in bytes
    constexpr Offset channel_bytes = static_cast<Offset>(C::input_stride(1) * Input::bytes);
    const unsigned char* from =
        static_cast<const unsigned char*>(p.input) +
        (input_origin<C>(item.n) + static_cast<int64>(chunk * vectors * of_vector) * C::input_stride(1)) *
            Input::bytes;
#pragma unroll
    for (int k = 0; k < Numbers::batch_vectors; ++k) {
#pragma unroll
      for (int j = 0; j < of_vector; ++j) x[k].word[j] = 0;
      x[k].to = -1;
      const int turn = number * Numbers::batch_vectors + k;
      const int vector = interleaved ? thread % vectors : turn % vectors;
      const int place =
          interleaved ? turn * places_at_once + thread / vectors : turn / vectors * places_at_once + thread;
      if (turn >= turns || place >= window) continue;
      x[k].to = vector * Numbers::window_pitch + place;
      const int offset = s.sources[place];
      const int channel = (chunk * vectors + vector) * of_vector;
      if (offset < 0) continue;
      const auto* first = reinterpret_cast<const Word*>(
          from + (static_cast<Offset>(vector * of_vector) * channel_bytes +
                  static_cast<Offset>(offset) * static_cast<Offset>(Input::bytes)));
      if (vectors_fit && in_vectors) {
        if (channel >= C::in_channels) continue;
#pragma unroll
        for (int j = 0; j < of_vector * Input::bytes / 4; j += 4) {
          const uint4 four = *reinterpret_cast<const uint4*>(first + j);
          x[k].word[j] = four.x, x[k].word[j + 1] = four.y, x[k].word[j + 2] = four.z,
          x[k].word[j + 3] = four.w;
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < of_vector; ++j) {
        if (C::in_channels % (vectors * of_vector) == 0 || channel + j < C::in_channels)
          x[k].word[j] = first[j * C::input_stride(1)];
      }
    }
  }

  // To the window of stage `stage`. `largest`: the largest magnitude, NaN where there is one, of what is
  // rounded to f16 or split.
  __device__ __forceinline__ void store(bool in_vectors, int stage, const Vector (&x)[Numbers::batch_vectors],
                                        float& largest) const {
#pragma unroll
    for (int k = 0; k < Numbers::batch_vectors; ++k) {
      if (x[k].to < 0) continue;
      const uint32(&word)[of_vector] = x[k].word;
      constexpr int part_vectors = vectors * Numbers::window_pitch;
      uint4* const to = &s.rings.x[stage][0][0][0] + x[k].to;
      if constexpr (Input::bytes == 2) {
        uint4 four;
        if (vectors_fit && in_vectors) {
          four = {word[0], word[1], word[2], word[3]};
        } else {
          four = {word[0] | word[1] << 16, word[2] | word[3] << 16, word[4] | word[5] << 16,
                  word[6] | word[7] << 16};
        }
        *to = four;
      } else {
        float value[of_vector];
#pragma unroll
        for (int j = 0; j < of_vector; ++j) {
          value[j] = __uint_as_float(word[j]);
          if constexpr (Numbers::guards && splits) value[j] *= gemm::split_scale;
          if constexpr (Numbers::guards || splits) largest = gemm::largest_of(largest, value[j]);
        }
#pragma unroll
        for (int part = 0; part < Numbers::parts; ++part) {
          uint32 operand[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if constexpr (Numbers::guards) {
              operand[j] = f16::pack(value[2 * j], value[2 * j + 1]);
              if constexpr (splits) {
                float first, second;
                f16::unpack(operand[j], first, second);
                value[2 * j] -= first;
                value[2 * j + 1] -= second;
              }
            } else {
              const float rounded = round_to_tf32(value[j]);
              operand[j] = __float_as_uint(rounded);
              if constexpr (splits) value[j] -= rounded;
            }
          }
          to[part * part_vectors] = {operand[0], operand[1], operand[2], operand[3]};
        }
      }
    }
  }

  // --- Weights ---
  static constexpr int of_tap = Numbers::parts * vectors * Numbers::tile_rows;  // vectors
  static constexpr int of_group = Numbers::group_taps * of_tap;

  // `from`: the first vector of this thread.
  __device__ __forceinline__ void send_weights(const uint4* from, int stage) const {
    const uint32 to = barrier::shared_address(&s.rings.weights[stage][0][0][0][0]) + thread * 16;
#pragma unroll
    for (int i = 0; i < (of_group + threads - 1) / threads; ++i) {
      if (of_group % threads == 0 || i * threads + thread < of_group)
        mma::copy_vector(to + i * threads * 16, from + i * threads);
    }
  }

  // --- Products ---
  using Sums = float[row_tiles][column_tiles][4];

  __device__ __forceinline__ void multiply(Sums& d, uint32 weights, uint32 x,
                                           const uint32 (&places)[column_tiles / 2]) const {
    constexpr uint32 weights_part = vectors * Numbers::tile_rows * 16;
    constexpr uint32 x_part = vectors * Numbers::window_pitch * 16;
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      uint32 b[Numbers::parts][column_tiles / 2][4];
#pragma unroll
      for (int part = 0; part < Numbers::parts; ++part) {
#pragma unroll
        for (int j = 0; j < column_tiles / 2; ++j)
          mma::load_matrices(b[part][j], x + places[j] + part * x_part + k * 2 * Numbers::window_pitch * 16);
      }
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        uint32 a[Numbers::parts][4];
        const uint32 own = weights + (k * 2 * Numbers::tile_rows + i * 16) * 16;
#pragma unroll
        for (int part = 0; part < Numbers::parts; ++part)
          mma::load_matrices(a[part], own + part * weights_part);
          // Small products first.
#pragma unroll
        for (int product = splits ? 2 : 0; product >= 0; --product) {
          const int of_weights = product == 1 ? Numbers::parts - 1 : 0;
          const int of_x = product == 2 ? Numbers::parts - 1 : 0;
#pragma unroll
          for (int j = 0; j < column_tiles; ++j)
            Product::run(d[i][j], a[of_weights], &b[of_x][j / 2][j % 2 * 2]);
        }
      }
    }
  }

  static __device__ __forceinline__ void clear(Sums& d) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) d[i][j][k] = 0.0f;
      }
    }
  }
  static __device__ __forceinline__ void add(Sums& to, const Sums& d) {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < column_tiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) to[i][j][k] += d[i][j][k];
      }
    }
  }

  __device__ __forceinline__ void convolve(const Item& item, const ThinClass<C>& own, Sums& sums) const {
    const int taps = own.count[0] * own.count[1] * own.count[2];
    const uint4* weights =
        static_cast<const uint4*>(p.packed) +
        (static_cast<int64>(group_of<C>(item.n) * Geometry::taps_before(Geometry::classes) +
                            Geometry::taps_before(item.class_index)) *
             Numbers::channel_tiles +
         static_cast<int64>(item.channel_tile) * taps) *
            (Numbers::chunks * of_tap) +
        thread;
    const int groups = taps / Numbers::group_taps;
    const int all = groups * Numbers::chunks;
    constexpr int ahead = Numbers::stages - 1;
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (i < all) send_weights(weights, i);
      weights += of_group;
      mma::commit();
    }
    const bool in_vectors = vectors_fit && reinterpret_cast<uint64>(p.input) % 16 == 0;
    float largest = 0.0f;
    Vector x[Numbers::batch_vectors];
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
      load(item, in_vectors, 0, i, x);
      store(in_vectors, 0, x, largest);
    }
    uint32 places[column_tiles / 2];
#pragma unroll
    for (int j = 0; j < column_tiles / 2; ++j) {
      places[j] = static_cast<uint32>(lane / 8 % 2 * Numbers::window_pitch +
                                      first_place(first_column + j * 16 + lane / 16 * 8 + lane % 8)) *
                  16;
    }
    const uint32 weights_begin =
        barrier::shared_address(&s.rings.weights[0][0][0][0][0]) +
        static_cast<uint32>(lane / 16 * Numbers::tile_rows + first_row + lane % 16) * 16;
    const uint32 x_begin = barrier::shared_address(&s.rings.x[0][0][0][0]);
    constexpr uint32 x_bytes = Numbers::parts * vectors * Numbers::window_pitch * 16;
    // Split operands: sums of at most 64 terms stay in the tensor cores.
    Sums partial;
    Sums& d = splits ? partial : sums;
    constexpr int most_terms = 64;
    constexpr int taps_together =
        most_terms / (vectors * of_vector) > 0 ? most_terms / (vectors * of_vector) : 1;
    clear(sums);
    if constexpr (splits) clear(partial);
    int together = 0;
    int step = 0;
    int stage = 0;
    constexpr int batches = Numbers::group_batches;  // of x, beside a group
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      const uint32 window_begin = x_begin + (chunk % 2) * x_bytes;
      const bool more = chunk + 1 < Numbers::chunks;
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
        mma::wait<ahead - 1>();
        // This step's weights and window are there, and the stage of the step before is free.
        __syncthreads();
        const int free = stage == 0 ? ahead : stage - 1;
        if (step + ahead < all) send_weights(weights, free);
        weights += of_group;
        mma::commit();
#pragma unroll
        for (int t = 0; t < Numbers::group_taps; ++t) {
          // A single batch has the time of the whole group.
          const int number = group * batches + t;
          const bool loads = t < batches && more && number < rounds;
          if (loads) load(item, in_vectors, chunk + 1, number, x);
          multiply(d, weights_begin + (stage * of_group + t * of_tap) * 16,
                   window_begin + s.tap_shifts[group * Numbers::group_taps + t], places);
          if (batches > 1 && loads) store(in_vectors, (chunk + 1) % 2, x, largest);
          if constexpr (splits) {
            if (++together == taps_together) {
              add(sums, partial);
              clear(partial);
              together = 0;
            }
          }
        }
        if (batches == 1 && more && group < rounds) store(in_vectors, (chunk + 1) % 2, x, largest);
        ++step;
        stage = stage == ahead ? 0 : stage + 1;
      }
      if (more && taps > 0) {
#pragma unroll 1
        for (int i = groups * batches; i < rounds; ++i) {
          load(item, in_vectors, chunk + 1, i, x);
          store(in_vectors, (chunk + 1) % 2, x, largest);
        }
      }
    }
    if constexpr (splits) add(sums, partial);
    if constexpr (Numbers::guards) {
      // Magnitudes in order are their bits in order, and NaN is beyond infinity.
      const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      if (lane == 0 && item.channel_tile == 0) atomicMax(p.guard + item.n, bits);
    } else if constexpr (splits) {
      if (!(largest <= most_split)) {
        p.only[item.n] = 1;
        atomicMax(p.only + p.batch, static_cast<uint32>(redo_some));
      }
    }
    mma::wait<0>();
  }

  // --- What follows ---
  // A thread has rows lane / 4 + 8 h of each 16, and of each eight columns two.
  __device__ __forceinline__ int row(int i, int h) const { return first_row + i * 16 + lane / 4 + 8 * h; }
  __device__ __forceinline__ int column(int j) const {
    return first_column + j / 2 * 8 + 2 * (lane % 4) + j % 2;
  }

  // Bias and chain, in place.
  __device__ __forceinline__ void activate(const Item& item, uint32 inside, Sums& d) const {
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int own = item.channel_tile * Numbers::tile_rows + row(i, h);
        const int existing = own < rows ? own : 0;
        const int channel = existing / Geometry::row_classes;
        const float scale =
            Numbers::guards ? __ldg(p.scales + group_of<C>(item.n) * padded_rows + existing) : 1.0f;
        float bias = 0.0f;
        if constexpr (C::has_bias)
          bias = load_one<typename C::Bias>(p.parameter[1], Tail::channel(item.n, channel));
        ChannelValues<Chain, 1> values;
        values.load(p, item.n, channel);
        const int64 begin = Geometry::sample_offset(item.n) + Geometry::row_offset(existing);
#pragma unroll
        for (int j = 0; j < 2 * column_tiles; ++j) {
          float& value = d[i][j / 2][2 * h + j % 2];
          typename Chain::template Tensors<1> tensors;
          if constexpr (Numbers::chain_reads_tensors) {
            if (inside >> j & 1u) tensors.load(p, begin + s.targets[column(j)]);
          }
          value = Chain::value(Numbers::guards ? fmaf(value, scale, bias) : value + bias, values.value[0],
                               tensors, 0);
        }
      }
    }
  }

  // The tile's values to memory: 16 rows by 32 columns of a warp at a time through shared memory.
  template <class Type>
  __device__ __forceinline__ void store_values(void* to, const Item& item, const Sums& d) const {
    constexpr bool rows_are_neighbours = Numbers::stride(1) == 1 && Numbers::stride(4) != 1;
    float(&stage)[16][Shared::value_pitch] = s.finish.values[warp];
    const int64 sample = Geometry::sample_offset(item.n);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
      const int first = item.channel_tile * Numbers::tile_rows + first_row + i * 16;
#pragma unroll
      for (int half = 0; half < column_tiles / 4; ++half) {
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            *reinterpret_cast<float2*>(&stage[lane / 4 + 8 * h][8 * j + 2 * (lane % 4)]) =
                float2{d[i][half * 4 + j][2 * h], d[i][half * 4 + j][2 * h + 1]};
          }
        }
        __syncwarp();
        if constexpr (rows_are_neighbours) {
          // A lane has a row, of every other column.
          const int own = first + lane % 16;
          const int64 begin = sample + Geometry::row_offset(own < rows ? own : 0);
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            const int in_stage = 2 * j + lane / 16;
            const int offset = s.targets[first_column + half * 32 + in_stage];
            if (offset >= 0 && own < rows) store_one<Type>(to, begin + offset, stage[lane % 16][in_stage]);
          }
        } else {
          // A lane has a column.
          const int offset = s.targets[first_column + half * 32 + lane];
#pragma unroll
          for (int r = 0; r < 16; ++r) {
            if (offset >= 0 && first + r < rows)
              store_one<Type>(to, sample + Geometry::row_offset(first + r) + offset, stage[r][lane]);
          }
        }
      }
    }
  }

  // Of the tile's rows, left in shared memory; a barrier follows.
  __device__ __forceinline__ void row_moments(uint32 inside, const Sums& d) const {
    const int count = __popc(inside);
    const float own_count = static_cast<float>(count);
    const float quad_count = lanes_sum<4>(own_count);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Distances from a value: of equal ones they are 0.
        PivotSums<2> sums;
#pragma unroll
        for (int j = 2 * column_tiles - 1; j >= 0; --j)
          sums.pivot = (inside >> j & 1u) != 0 ? d[i][j / 2][2 * h + j % 2] : sums.pivot;
#pragma unroll
        for (int j = 0; j < 2 * column_tiles; ++j)
          sums.add_distance(
              (inside >> j & 1u) != 0 ? distance_from(d[i][j / 2][2 * h + j % 2], sums.pivot) : 0.0f, j);
        Moments own{own_count, 0.0f, 0.0f};
        float moved;
        sums.finish(own_count, moved, own.m2);
        own.mean = sums.pivot + moved;
        float mean, all_m2;
        team_moments<4, threads>(own, quad_count, nullptr, mean, all_m2);
        if (lane % 4 == 0)
          s.finish.rows[warp % Numbers::warps_n][row(i, h)] = float4{quad_count, mean, all_m2, 0.0f};
      }
    }
  }

  static __device__ __forceinline__ void merge(Moments& own, const float4& other) {
    if (other.x > 0.0f) own.merge(other.x, other.y, other.z);
  }
  __device__ __forceinline__ float4* parts_of(int64 n, int slab) const {
    return p.parts + (n * slabs_of_sample + slab) * (spans * position_parts);
  }

  // A warp for each slab of the tile: its rows here become one part.
  __device__ __forceinline__ void store_parts(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_rows;
    const int end = begin + Numbers::tile_rows < rows ? begin + Numbers::tile_rows : rows;
    const int first_slab = begin / group_rows;
    const int last_slab = (end - 1) / group_rows;
    for (int slab = first_slab + warp; slab <= last_slab; slab += threads / 32) {
      int first = slab * group_rows - begin;
      int last = first + group_rows;
      first = first < 0 ? 0 : first;
      last = last < Numbers::tile_rows ? last : Numbers::tile_rows;
      Moments own;
      for (int i = lane; i < (last - first) * Numbers::warps_n; i += 32)
        merge(own, s.finish.rows[i % Numbers::warps_n][first + i / Numbers::warps_n]);
      const float elements = lanes_sum<32>(own.count);
      float mean, m2;
      team_moments<32, threads>(own, elements, nullptr, mean, m2);
      const int span = item.channel_tile - slab * group_rows / Numbers::tile_rows;
      if (lane == 0)
        __stcg(parts_of(item.n, slab) +
                   (span * Geometry::classes + item.class_index) * Numbers::position_tiles +
                   item.position_tile,
               float4{elements, mean, m2, 0.0f});
    }
  }

  // Of the tile's rows, for means.
  __device__ __forceinline__ void store_sums(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_rows;
    for (int r = thread; r < Numbers::tile_rows && begin + r < rows; r += threads) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Numbers::warps_n; ++i) sum += s.finish.rows[i][r].x * s.finish.rows[i][r].y;
      __stcg(p.sums + (item.n * Tail::channels + begin + r) * position_parts +
                 item.class_index * Numbers::position_tiles + item.position_tile,
             sum);
    }
  }
  __device__ __forceinline__ float row_mean(int64 row) const {
    double total = 0.0;
    for (int i = 0; i < position_parts; ++i)
      total += static_cast<double>(__ldcg(p.sums + row * position_parts + i));
    return static_cast<float>(total / static_cast<double>(Tail::spatial));
  }

  // By the last block of a sample: statistics, and means where they follow from them.
  __device__ __forceinline__ void finish_sample(int64 n) const {
    if constexpr (Tail::has_norm) {
      constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
      for (int slab = warp; slab < slabs_of_sample; slab += threads / 32) {
        const int tiles =
            ((slab + 1) * group_rows - 1) / Numbers::tile_rows - slab * group_rows / Numbers::tile_rows + 1;
        const float4* parts = parts_of(n, slab);
        Moments own;
#pragma unroll 4
        for (int i = lane; i < tiles * position_parts; i += 32) merge(own, __ldcg(parts + i));
        float mean, m2;
        team_moments<32, threads>(own, elements, nullptr, mean, m2);
        const float per_deviation = 1.0f / sqrtf(m2 / elements + Tail::eps);
        if (lane == 0) {
          float* to = p.statistics + 2 * (n * slabs_of_sample + slab);
          to[0] = mean;
          to[1] = per_deviation;
        }
        for (int i = lane; i < Tail::group_channels; i += 32) {
          const int c = slab * Tail::group_channels + i;
          const int of_norm = Tail::channel(n, c);
          const float weight = Tail::weight(p, of_norm);
          if constexpr (Numbers::guards) gemm::judge<Tail, Numbers>(p, n, fabsf(weight * per_deviation));
          if constexpr (Tail::mean_follows_norm) {
            const int64 row = n * Tail::channels + c;
            const float scale = weight * norm_factor<Tail>(per_deviation, mean, m2);
            store_one<Output>(p.output, row, fmaf(row_mean(row) - mean, scale, Tail::bias(p, of_norm)));
          }
        }
      }
    } else {
      if constexpr (Numbers::guards) {
        if (thread == 0) gemm::judge<Tail, Numbers>(p, n, 1.0f);
      }
      if constexpr (Tail::has_mean) {
        for (int c = thread; c < Tail::channels; c += threads) {
          const int64 row = n * Tail::channels + c;
          store_one<Output>(p.output, row, row_mean(row));
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const Item item(blockIdx.x);
    const ThinClass<C> own(item.class_index);
    prepare(item, own);
    __syncthreads();
    Sums d;
    convolve(item, own, d);
    uint32 inside = 0;
#pragma unroll
    for (int j = 0; j < 2 * column_tiles; ++j) inside |= static_cast<uint32>(s.targets[column(j)] >= 0) << j;
    activate(item, inside, d);
    __syncthreads();  // the rings are free
    if constexpr (Tail::has_norm || Tail::has_mean) row_moments(inside, d);
    if constexpr (!Tail::has_norm && !Tail::has_mean) store_values<Output>(p.output, item, d);
    if constexpr (Tail::has_norm && !Tail::mean_follows_norm) store_values<f32>(p.values, item, d);
    if constexpr (Tail::has_norm || Tail::has_mean) {
      __syncthreads();
      if constexpr (Tail::has_norm) store_parts(item);
      if constexpr (Tail::mean_follows_norm || (Tail::has_mean && !Tail::has_norm)) store_sums(item);
    }
    if constexpr (Tail::has_norm || Tail::has_mean || Numbers::guards) {
      constexpr uint32 tiles = Numbers::channel_tiles * position_parts;
      if (arrives_last(p.control + item.n, tiles)) finish_sample(item.n);
    }
  }
};

// A mean after the norm and a chain: a block for each channel of each sample.
template <class Tail, class Numbers>
struct GemmMmaMean {
  using Finish = GemmFinish<Tail, Numbers>;
  using Parameters = typename Finish::Parameters;
  const Parameters& p;

  __device__ __forceinline__ void run() const {
    __shared__ float scratch[Numbers::threads / 32];
    const int64 row = blockIdx.x;
    const int64 n = row / Tail::channels;
    const int c = static_cast<int>(row - n * Tail::channels);
    const typename Finish::Channel channel(p, n, c);
    const int64 first = Numbers::interleaved ? n * Tail::channels * Tail::spatial + c : row * Tail::spatial;
    constexpr int64 step = Numbers::interleaved ? Tail::channels : 1;
    float sum[1] = {0.0f};
    for (int64 i = threadIdx.x; i < Tail::spatial; i += Numbers::threads) {
      typename Tail::After::template Tensors<1> tensors;
      tensors.load(p, first + i * step);
      sum[0] += channel.value(p.values[first + i * step], tensors, 0);
    }
    block_sum<Numbers::threads>(sum, scratch);
    if (threadIdx.x == 0)
      store_one<typename Tail::Output>(p.output, row, sum[0] / static_cast<float>(Tail::spatial));
  }
};

}  // namespace onepass
