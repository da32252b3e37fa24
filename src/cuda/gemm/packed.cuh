// A wide convolution of stride 1 as a matrix product over the positions of all samples, for layers whose
// samples are too small to fill a GPU with tiles of their own. What follows the convolution is a tail's.
//
// Operands are packed first: 16-bit elements, x as [eight channels][position][8] over one flat index of all
// samples, in which rows, planes and samples have pitches that leave zeros between them wherever a tap can
// reach beyond (as gemm.cuh has it for a sample); weights as products read them. A tile is any run of that
// index, across samples, so that tiles can be as many as there are multiprocessors. Everything in the product
// is bulk copies and wgmma, nothing is converted on the way. Of a convolution in groups, those of input and
// of output channels are one after the other, each filled up to whole chunks and tiles: a tile of channels is
// one group's and meets its chunks.
//
//   PackedGemmOperands  packs x and the weights; f32 weights scaled by a power of two that suits most
//   PackedGemmScales    packs rows of f32 weights again whose largest element that does not suit
//   PackedGemm          the product, with the bias, as f32
//   PackedGemmJudge     marks samples that f16 had no room for (f32), which another kernel does again
#pragma once

#include "device/reduce.cuh"
#include "gemm/gemm.cuh"

namespace onepass {

// The flat index and where taps lie in it.
template <class C, class Numbers>
struct PackedGemmGeometry {
  static constexpr __device__ int offset(int d, int m) {
    return static_cast<int>(C::base(d, 0) + m * C::delta(d));
  }
  static constexpr __device__ int shift(int t) {
    const int k1 = static_cast<int>(C::count(1, 0));
    const int k2 = static_cast<int>(C::count(2, 0));
    return offset(0, t / (k1 * k2)) * Numbers::plane + offset(1, t / k2 % k1) * Numbers::pitch +
           offset(2, t % k2);
  }
  // The least shift of a group of taps: whole rows or planes of the kernel, or all of it.
  static constexpr __device__ int first_shift(int group) {
    const int first = group * Numbers::group_taps;
    const int last = first + Numbers::group_taps - 1;
    return shift(first) < shift(last) ? shift(first) : shift(last);
  }

  // Classes of a transposed convolution that meet the same x are rows of the product, as in gemm.cuh; where
  // channels of the values lie side by side, all channels of one class, then of the next.
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr bool by_class = classes > 1 && Numbers::value_stride_c == 1;
  // Of a row of the group.
  static __device__ __forceinline__ int channel_of(int row) {
    return by_class ? row % static_cast<int>(C::channels) : row / classes;
  }
  static __device__ __forceinline__ int class_of(int row) {
    return by_class ? row / static_cast<int>(C::channels) : row - row / classes * classes;
  }
  static constexpr int rows = static_cast<int>(C::channels) * classes;
  using Rows = GroupedRows<C, Numbers::padded_channels, rows>;
  static __device__ __forceinline__ bool exists(int row) { return Rows::exists(row); }
  // Where the weight of an input channel and a tap of the row's class lies.
  static __device__ __forceinline__ int64 weight_index(int row, int c, int t) {
    return Rows::group(row) * group_weights<C> + weight_in_group(Rows::in_group(row), c, t);
  }
  static __device__ __forceinline__ int64 weight_in_group(int row, int c, int t) {
    if constexpr (!C::transposed) return (static_cast<int64>(row) * C::in_channels + c) * Numbers::taps + t;
    const int o = channel_of(row);
    int own = class_of(row);
    int tap = 0;
    int step = 1;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const int count = static_cast<int>(C::count(d, 0));
      const int of_dimension = static_cast<int>(C::classes(d));
      tap += step * static_cast<int>(C::first(d, own % of_dimension) + t % count * C::tap_step(d));
      step *= static_cast<int>(C::kernel(d));
      own /= of_dimension;
      t /= count;
    }
    return (static_cast<int64>(c) * C::channels + o) * C::taps + tap;
  }
  // Which of the block's channels a row is of.
  static __device__ __forceinline__ int channel(int row) {
    return Rows::group(row) * static_cast<int>(C::channels) + channel_of(Rows::in_group(row));
  }
  // Where a row's values begin in a sample.
  static __device__ __forceinline__ int64 value_offset(int row) {
    const int channel = PackedGemmGeometry::channel(row);
    if constexpr (classes == 1) return static_cast<int64>(channel) * Numbers::value_stride_c;
    const int own = class_of(Rows::in_group(row));
    const int r1 = own / static_cast<int>(C::classes(2));
    const int r0 = r1 / static_cast<int>(C::classes(1));
    return static_cast<int64>(channel) * Numbers::value_stride_c + r0 * Numbers::value_stride0 +
           (r1 - r0 * static_cast<int>(C::classes(1))) * Numbers::value_stride1 +
           (own - r1 * static_cast<int>(C::classes(2))) * Numbers::value_stride2;
  }

  template <class Parameters>
  static __device__ __forceinline__ uint32 samples(const Parameters& p) {
    return static_cast<uint32>(p.batch) / static_cast<uint32>(C::groups);
  }

  // Sample and coordinates of a position of the index.
  struct Place {
    uint32 n, z, y, x;
    explicit __device__ __forceinline__ Place(uint32 flat) {
      n = flat / static_cast<uint32>(Numbers::sample);
      const uint32 in_sample = flat - n * static_cast<uint32>(Numbers::sample);
      z = in_sample / static_cast<uint32>(Numbers::plane);
      const uint32 in_plane = in_sample - z * static_cast<uint32>(Numbers::plane);
      y = in_plane / static_cast<uint32>(Numbers::pitch);
      x = in_plane - y * static_cast<uint32>(Numbers::pitch);
    }
  };
};

// --- Operands ---

namespace gemm {

// What f32 elements of x are multiplied by: one of 4,000 fits, and what f16 drops of small ones shows less.
constexpr float input_scale = 16.0f;
// What f32 weights are multiplied by, and between what the largest of a row is to be then: no element
// overflows, and what f16 drops of small ones is 2^-24 of the largest at most.
constexpr float weight_scale = 4096.0f;
constexpr float most_weight = 15.9f;
constexpr float least_weight = 0x1p-12f;

}  // namespace gemm

// Packs weights: a piece of work is 32 rows by a chunk of input channels, through shared memory.
template <class C, class Numbers>
struct PackedGemmWeightPieces {
  using Geometry = PackedGemmGeometry<C, Numbers>;
  static constexpr int rows = 32;
  static constexpr int taps = Numbers::taps;
  static constexpr int terms = C::in_channels * taps;
  static constexpr int chunk_terms = 16 * taps;
  static constexpr int chunks = Numbers::input_channels / 16;
  using Weight = typename C::Weight;
  using Operand = typename Numbers::Operand;
  using Word = typename gemm::Word<Weight::bytes>::Type;
  // An odd number of banks from row to row.
  static constexpr int pitch_words = (chunk_terms * Weight::bytes / 4) | 1;
  static constexpr int pitch = pitch_words * 4 / Weight::bytes;
  static constexpr int shared_bytes = rows * pitch_words * 4;
  static constexpr int blocks = Numbers::padded_channels / rows;
  static constexpr int items = blocks * chunks;

  // By `team.threads` threads, in memory of their own.
  template <class Parameters, class Team>
  static __device__ __forceinline__ void run(const Parameters& p, int block, int chunk, unsigned char* shared,
                                             const Team& team) {
    load(p, block * rows, chunk * 16, reinterpret_cast<Word*>(shared), team);
    team.sync();
    store(p, block * rows, chunk, shared, team);
    team.sync();
  }
  template <class Team>
  static constexpr int bytes_of() {
    return (shared_bytes + 7) / 8 * 8 + Team::threads * static_cast<int>(sizeof(float2));
  }

 private:
  template <class Parameters, class Team>
  static __device__ __forceinline__ void load(const Parameters& p, int first_padded, int first_channel,
                                              Word* shared, const Team& team) {
    constexpr int threads = Team::threads;
    // All rows are of one group.
    const int first_row = Geometry::Rows::in_group(first_padded);
    const auto* from =
        static_cast<const Word*>(p.parameter[0]) + Geometry::Rows::group(first_padded) * group_weights<C>;
    const int left = C::in_channels - first_channel;
    const int count = (left < 16 ? left : 16) * taps;  // of a row
    constexpr int vector = 16 / Weight::bytes;
    if constexpr (C::transposed) {
      constexpr int run = rows * taps;  // of an input channel
#pragma unroll 4
      for (int i = team.thread; i < 16 * run; i += threads) {
        const int c = i / run;
        const int row = (i - c * run) / taps;
        const int tap = i % taps;
        const bool exists = c < left && first_row + row < Geometry::rows;
        shared[row * pitch + c * taps + tap] =
            exists ? from[Geometry::weight_in_group(first_row + row, first_channel + c, tap)] : Word{0};
      }
    } else if (terms % vector == 0 && count == chunk_terms && reinterpret_cast<uint64>(from) % 16 == 0) {
      constexpr int vectors = chunk_terms / vector;  // of a row
      constexpr int at_once = 8;
      auto* const words = reinterpret_cast<uint32*>(shared);
#pragma unroll 1
      for (int begin = team.thread; begin < rows * vectors; begin += at_once * threads) {
        uint4 x[at_once];
#pragma unroll
        for (int r = 0; r < at_once; ++r) {
          const int i = begin + r * threads;
          const int row = i / vectors;
          const bool exists = row < rows && first_row + row < Geometry::rows;
          x[r] = exists ? __ldcs(reinterpret_cast<const uint4*>(
                              from + static_cast<int64>(first_row + row) * terms + first_channel * taps +
                              (i - row * vectors) * vector))
                        : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int r = 0; r < at_once; ++r) {
          const int i = begin + r * threads;
          const int row = i / vectors;
          if (row >= rows) break;
          uint32* const to = words + row * pitch_words + (i - row * vectors) * 4;
          to[0] = x[r].x, to[1] = x[r].y, to[2] = x[r].z, to[3] = x[r].w;
        }
      }
    } else {
      for (int i = team.thread; i < rows * chunk_terms; i += threads) {
        const int row = i / chunk_terms;
        const int at = i - row * chunk_terms;
        const bool exists = at < count && first_row + row < Geometry::rows;
        shared[row * pitch + at] =
            exists ? from[static_cast<int64>(first_row + row) * terms + first_channel * taps + at] : Word{0};
      }
    }
  }

  template <class Parameters, class Team>
  static __device__ __forceinline__ void store(const Parameters& p, int first_row, int chunk,
                                               unsigned char* shared, const Team& team) {
    constexpr int threads = Team::threads;
    static_assert(threads % rows == 0);
    const int row = team.thread % rows;
    float largest = 0.0f, sum = 0.0f;
    for (int i = team.thread / rows; i < 2 * taps; i += threads / rows) {
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        x[k] = load_one<Weight>(shared, row * pitch + (i % 2 * 8 + k) * taps + i / 2);
        largest = gemm::largest_of(largest, x[k]);
        sum += fabsf(x[k]);
      }
      put(p, first_row + row, chunk, i / 2, i % 2, x, Numbers::guards ? gemm::weight_scale : 1.0f);
    }
    if constexpr (Numbers::guards) {
      // Of what the threads of each row have seen.
      auto* const seen = reinterpret_cast<float2*>(shared + (shared_bytes + 7) / 8 * 8);
      seen[team.thread] = {largest, sum};
      team.sync();
      if (team.thread >= rows || !Geometry::exists(first_row + row)) return;
      for (int i = row + rows; i < threads; i += rows) {
        largest = gemm::largest_of(largest, seen[i].x);
        sum += seen[i].y;
      }
      atomicMax(p.row_largest + first_row + row, __float_as_uint(largest));
      // Whole numbers: in any order the same. Rows of larger ones are measured again.
      if (sum < 0x1p40f) atomicAdd(p.row_sums + first_row + row, static_cast<uint64>(sum * 0x1p20f) + 1);
    } else {
      const int any = team.any(!(largest <= 3.4028235e38f));
      if (team.thread == 0)
        p.piece_marks[first_row / rows * chunks + chunk] = any != 0 ? redo_all : redo_none;
    }
  }

 public:
  // Eight input channels of a tap; `chunk`: of 16.
  template <class Parameters>
  static __device__ __forceinline__ void put(const Parameters& p, int o, int chunk, int tap, int half,
                                             const float (&x)[8], float scale) {
    constexpr int stage_chunks = Numbers::chunk_channels / 16;
    const int64 step = static_cast<int64>(o / Numbers::tile_channels) * Numbers::steps +
                       tap / Numbers::group_taps * Numbers::chunks + chunk / stage_chunks;
    const int64 place = (step * Numbers::group_taps + tap % Numbers::group_taps) * stage_chunks * 2 +
                        chunk % stage_chunks * 2 + half;
    static_cast<uint4*>(p.packed_weights)[place * Numbers::tile_channels + o % Numbers::tile_channels] =
        uint4{Operand::pack(x[0] * scale, x[1] * scale), Operand::pack(x[2] * scale, x[3] * scale),
              Operand::pack(x[4] * scale, x[5] * scale), Operand::pack(x[6] * scale, x[7] * scale)};
  }
};

// Blocks for pieces of weights, and behind them of x.
template <class C, class Tail, class Numbers>
struct PackedGemmOperands {
  using Parameters = PackedGemmParameters<Tail::parameters>;
  using Geometry = PackedGemmGeometry<C, Numbers>;
  using Pieces = PackedGemmWeightPieces<C, Numbers>;
  using Input = typename Tail::Input;
  using Operand = typename Numbers::Operand;
  using Weight = typename C::Weight;
  static constexpr int threads = 256;
  static constexpr int group_pairs = Numbers::input_channels / 16;  // of eight channels, in a group
  static constexpr int pairs = static_cast<int>(C::groups) * group_pairs;
  static constexpr bool vectors_fit = C::input_stride(1) == 1 && C::in_channels % 8 == 0 &&
                                      C::input_stride(0) % 8 == 0 && C::input_stride(2) % 8 == 0 &&
                                      C::input_stride(3) % 8 == 0 && C::input_stride(4) % 8 == 0;

  struct Team {
    static constexpr int threads = 256;
    int thread;
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ int any(bool one) const { return __syncthreads_or(one); }
  };
  static_assert(Pieces::template bytes_of<Team>() <= Numbers::piece_bytes);

  const Parameters& p;
  unsigned char* shared;

  __device__ __forceinline__ void run() const {
    const int item = static_cast<int>(blockIdx.x);
    if (!Numbers::guards && item == 0) {
      // Nobody marks samples of 16 bits one by one.
      for (int64 i = threadIdx.x; i < p.batch; i += threads) p.only[i] = 0;
      for (int64 i = threadIdx.x; i < 4 * p.batch + 4; i += threads) p.control[i] = 0;
    }
    if (item < Pieces::items) {
      Pieces::run(p, item / Pieces::chunks, item % Pieces::chunks, shared,
                  Team{static_cast<int>(threadIdx.x)});
    } else if (vectors_fit && reinterpret_cast<uint64>(p.input) % 16 == 0) {
      pack_input<vectors_fit>(item - Pieces::items);
    } else {
      pack_input<false>(item - Pieces::items);
    }
  }

 private:
  // 16 channels of 256 positions.
  template <bool in_vectors>
  __device__ __forceinline__ void pack_input(int item) const {
    const int part = item / pairs;
    const int pair = item - part * pairs;
    const int group = C::groups == 1 ? 0 : pair / group_pairs;
    const int first = (pair - group * group_pairs) * 16;  // channel of the group
    const int64 place = static_cast<int64>(part) * threads + threadIdx.x;
    const int64 flat = place - Numbers::margin;
    const typename Geometry::Place at(static_cast<uint32>(flat));
    const bool inside =
        flat >= 0 && at.n < Geometry::samples(p) && at.z < static_cast<uint32>(C::input_size(0)) &&
        at.y < static_cast<uint32>(C::input_size(1)) && at.x < static_cast<uint32>(C::input_size(2));
    const int64 from = static_cast<int64>(at.n) * C::input_stride(0) +
                       (group * C::in_channels + first) * C::input_stride(1) + at.z * C::input_stride(2) +
                       at.y * C::input_stride(3) + at.x * C::input_stride(4);
    float x[16];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (in_vectors) {
        float(&own)[8] = *reinterpret_cast<float(*)[8]>(x + 8 * half);
        if (inside && first + 8 * half < C::in_channels) {
          Packed<Input, 8> vector;
          vector.load(p.input, from + 8 * half, true);
          vector.unpack(own);
        } else {
#pragma unroll
          for (int k = 0; k < 8; ++k) own[k] = 0.0f;
        }
      } else {
#pragma unroll
        for (int k = 8 * half; k < 8 * half + 8; ++k) {
          const bool exists = inside && (C::in_channels % 16 == 0 || first + k < C::in_channels);
          x[k] = exists ? load_one<Input>(p.input, from + k * C::input_stride(1)) : 0.0f;
        }
      }
    }
    if constexpr (Numbers::guards) {
#pragma unroll
      for (int k = 0; k < 16; ++k) x[k] *= gemm::input_scale;
    }
    if (place < p.length) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        static_cast<uint4*>(p.packed_input)[(2 * pair + half) * p.length + place] = uint4{
            Operand::pack(x[8 * half], x[8 * half + 1]), Operand::pack(x[8 * half + 2], x[8 * half + 3]),
            Operand::pack(x[8 * half + 4], x[8 * half + 5]), Operand::pack(x[8 * half + 6], x[8 * half + 7])};
      }
    }
    if constexpr (Numbers::guards) {
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < 16; ++k) largest = gemm::largest_of(largest, x[k]);
      leave_largest(inside ? static_cast<int>(at.n) * static_cast<int>(C::groups) + group : -1,
                    __float_as_uint(largest));
    }
  }

  // Of each sample that the warp's positions are in; -1: in none.
  __device__ __forceinline__ void leave_largest(int n, uint32 bits) const {
    const int low = static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<uint32>(n)));
    const int high = __reduce_max_sync(0xffffffffu, n);
    // None, where no lane has a sample; they are all of one group.
    for (int own = low < 0 ? 0 : low; own <= high; own += static_cast<int>(C::groups)) {
      const uint32 largest = __reduce_max_sync(0xffffffffu, n == own ? bits : 0u);
      if (threadIdx.x % 32 == 0 && largest > __ldcg(p.guard + own)) atomicMax(p.guard + own, largest);
    }
  }
};

// A block for 32 rows, which most often only says so.
template <class C, class Tail, class Numbers>
struct PackedGemmScales {
  using Parameters = PackedGemmParameters<Tail::parameters>;
  using Geometry = PackedGemmGeometry<C, Numbers>;
  using Pieces = PackedGemmWeightPieces<C, Numbers>;
  static constexpr int threads = 256;
  static constexpr int rows = Pieces::rows;

  const Parameters& p;

  __device__ __forceinline__ void run() const {
    __shared__ uint32 again;
    const int first = static_cast<int>(blockIdx.x) * rows;
    if (threadIdx.x < 32) {
      const int o = first + static_cast<int>(threadIdx.x);
      const bool exists = Geometry::exists(o);
      const uint32 bits = exists ? __ldcg(p.row_largest + o) : 0u;
      const float largest = __uint_as_float(bits);
      const bool suits = bits == 0 || (largest < gemm::most_weight && largest >= gemm::least_weight);
      if (exists) p.scales[o] = 1.0f / (gemm::weight_scale * gemm::input_scale);
      leave_sum(exists && suits ? static_cast<float>(__ldcg(p.row_sums + o)) * 0x1p-20f : 0.0f);
      const uint32 others = __ballot_sync(0xffffffffu, !suits);
      if (threadIdx.x == 0) again = others;
    }
    __syncthreads();
    for (uint32 left = again; left != 0; left &= left - 1) pack(first + __ffs(static_cast<int>(left)) - 1);
  }

 private:
  // The largest of a warp's sums, which are positive: their bits are in order.
  __device__ __forceinline__ void leave_sum(float sum) const {
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(sum));
    if (threadIdx.x % 32 == 0)
      atomicMax(reinterpret_cast<uint32*>(p.scales + Numbers::padded_channels), bits);
  }

  __device__ __forceinline__ void pack(int o) const {
    const uint32 bits = __ldcg(p.row_largest + o);
    float scale = 1.0f;
    if (__uint_as_float(bits) <= 3.4028235e38f) {
      // To [2^13, 2^14), as far as the scale and its inverse are normal numbers.
      int exponent = 13 - (static_cast<int>(bits >> 23) - 127);
      exponent = exponent > 120 ? 120 : exponent < -120 ? -120 : exponent;
      scale = __uint_as_float(static_cast<uint32>(127 + exponent) << 23);
    } else if (threadIdx.x == 0) {
      atomicMax(p.only + p.batch, static_cast<uint32>(redo_all));
    }
    float sum[1] = {};
    for (int i = threadIdx.x; i < Numbers::input_channels / 8 * Numbers::taps; i += threads) {
      const int eight = i / Numbers::taps;
      const int tap = i - eight * Numbers::taps;
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = eight * 8 + k;
        x[k] = c < C::in_channels
                   ? load_one<typename C::Weight>(p.parameter[0], Geometry::weight_index(o, c, tap))
                   : 0.0f;
        sum[0] += fabsf(x[k]);
      }
      Pieces::put(p, o, eight / 2, tap, eight % 2, x, scale);
    }
    __shared__ float scratch[2 * threads / 32];
    block_sum<threads>(sum, scratch);
    if (threadIdx.x < 32) leave_sum(sum[0]);
    if (threadIdx.x == 0) p.scales[o] = 1.0f / scale / gemm::input_scale;
  }
};

// --- The product ---

template <class C, class Tail, class Numbers>
struct PackedGemm {
  using Parameters = PackedGemmParameters<Tail::parameters>;
  using Geometry = PackedGemmGeometry<C, Numbers>;
  using Product = typename Numbers::Product;
  static constexpr int columns = Numbers::columns;  // positions of a warpgroup
  static constexpr bool share = Numbers::groups_share_positions;
  // Each warpgroup has tiles of its own, every second one: one stores while the other multiplies.
  static constexpr bool turns = Numbers::groups_take_turns;
  static constexpr int tile_positions = share || turns ? columns : 2 * columns;
  static constexpr int tile_channels = Numbers::tile_channels;
  static constexpr int channel_tiles = Numbers::padded_channels / tile_channels;
  static constexpr int stages = Numbers::stages;
  static constexpr int halves = Numbers::chunk_channels / 8;
  static constexpr int window_bytes = Numbers::window * 16;  // of eight channels
  static constexpr int x_bytes = halves * window_bytes;
  static constexpr int weight_bytes = Numbers::group_taps * halves * tile_channels * 16;
  static constexpr int groups = Numbers::taps / Numbers::group_taps;
  static constexpr int group_tiles = channel_tiles / static_cast<int>(C::groups);  // of channels
  static constexpr int sums = columns / 2;
  static constexpr int value_pitch = 40;
  struct Shared {
    alignas(128) unsigned char x[stages][(x_bytes + 127) / 128 * 128];
    alignas(128) unsigned char weights[stages][weight_bytes];
    alignas(16) float values[8][8][value_pitch];
    int offsets[share ? columns : 2 * columns];
    uint64 full[stages];
    uint64 empty[stages];
  };
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);

  const Parameters& p;
  Shared& s;

  // The block's tiles, from the `first` on each `step`-th.
  template <class Body>
  __device__ __forceinline__ void for_each_tile(int first, int step, Body&& body) const {
    const int64 count = p.tiles * channel_tiles;
#pragma unroll 1
    for (int64 i = blockIdx.x + static_cast<int64>(first) * gridDim.x; i < count;
         i += static_cast<int64>(step) * gridDim.x) {
      const int64 tile = i / channel_tiles;
      body(tile * tile_positions, static_cast<int>(i - tile * channel_tiles));
    }
  }

  __device__ __forceinline__ void send() const {
    gemm::Ring<stages> ring;
    for_each_tile(0, 1, [&](int64 position, int channel_tile) {
      int64 step = static_cast<int64>(channel_tile) * Numbers::steps;
      const int first_eight = channel_tile / group_tiles * (Numbers::input_channels / 8);
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
        const auto* from = static_cast<const uint4*>(p.packed_input) + Numbers::margin + position +
                           Geometry::first_shift(group);
#pragma unroll 1
        for (int chunk = 0; chunk < Numbers::chunks; ++chunk, ++step) {
          barrier::wait(&s.empty[ring.stage], ring.round ^ 1u);
          barrier::expect(&s.full[ring.stage], x_bytes + weight_bytes);
          barrier::copy(s.weights[ring.stage],
                        static_cast<const unsigned char*>(p.packed_weights) + step * weight_bytes,
                        weight_bytes, &s.full[ring.stage]);
#pragma unroll
          for (int half = 0; half < halves; ++half) {
            barrier::copy(s.x[ring.stage] + half * window_bytes,
                          from + (first_eight + chunk * halves + half) * p.length, window_bytes,
                          &s.full[ring.stage]);
          }
          ring.next();
        }
      }
    });
  }

  // By a warp.
  __device__ __forceinline__ void gather_marks() const {
    uint32 any = redo_none;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x % 32); i < PackedGemmWeightPieces<C, Numbers>::items; i += 32)
      any |= p.piece_marks[i];
    any = __reduce_or_sync(0xffffffffu, any);
    if (threadIdx.x % 32 == 0) p.only[p.batch] = any;
  }

  static __device__ __forceinline__ uint64 descriptor(uint32 address, uint32 leading) {
    return static_cast<uint64>(address >> 4) | static_cast<uint64>(leading >> 4) << 16 |
           static_cast<uint64>(128 >> 4) << 32;
  }

  // By a warp: its stage is free.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) barrier::arrive(&s.empty[stage]);
  }

  // Between those who have a tile together.
  static __device__ __forceinline__ void sync(int warpgroup) {
    if constexpr (turns) {
      gemm::group_sync(warpgroup);
    } else {
      gemm::consumers_sync();
    }
  }

  __device__ __forceinline__ void multiply() const {
    gemm::Ring<stages> ring;
    const int thread = static_cast<int>(threadIdx.x);
    const int warpgroup = thread / 128;
    const uint32 x_begin = barrier::shared_address(s.x[0]) + (share || turns ? 0 : warpgroup * columns * 16);
    const uint32 w_begin = barrier::shared_address(s.weights[0]) + (share ? warpgroup * 64 * 16 : 0);
    if (turns && warpgroup == 1) ring.skip(Numbers::steps);
    // Tiles of the block from this warpgroup's next one on.
    int left =
        static_cast<int>((p.tiles * channel_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x) - warpgroup;
    bool is_first = warpgroup == 0;
    for_each_tile(turns ? warpgroup : 0, turns ? 2 : 1, [&](int64 position, int channel_tile) {
      if constexpr (turns) {
        for (int i = thread % 128; i < columns; i += 128)
          s.offsets[warpgroup * columns + i] = offset(position + i);
      } else {
        for (int i = thread; i < tile_positions; i += gemm::consumer_threads)
          s.offsets[i] = offset(position + i);
      }
      // A stage's barrier tells a round only from the next: nobody waits further ahead.
      if (turns && !is_first) gemm::wait_for_turn(warpgroup);
      is_first = false;
      float d[sums];
      int scale = 0, before = -1;
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
#pragma unroll 1
        for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
          barrier::wait(&s.full[ring.stage], ring.round);
          const uint32 x = x_begin + ring.stage * static_cast<uint32>(sizeof s.x[0]);
          const uint32 w = w_begin + ring.stage * weight_bytes;
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int t = 0; t < Numbers::group_taps; ++t) {
            // In every group of taps alike.
            const uint32 own = Geometry::shift(t) - Geometry::first_shift(0);
#pragma unroll
            for (int k = 0; k < halves / 2; ++k) {
              Product::run(d, descriptor(w + (t * halves + 2 * k) * tile_channels * 16, tile_channels * 16),
                           descriptor(x + own * 16 + 2 * k * window_bytes, window_bytes), scale);
              scale = 1;
            }
          }
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          // The group before is done: its stage is free.
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (before >= 0) release(before);
          before = ring.stage;
          ring.next();
        }
      }
      if (turns && left > 1) gemm::hand_over_turn(warpgroup);
      left -= 2;
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
      release(before);
      if (turns) ring.skip(Numbers::steps);
      sync(warpgroup);
      store(channel_tile * tile_channels, d);
      sync(warpgroup);
    });
  }

  // Where a position of the index lies in a channel of the values, from the first sample's; -1: nowhere.
  __device__ __forceinline__ int offset(int64 position) const {
    const typename Geometry::Place at(static_cast<uint32>(position));
    const bool inside = at.n < Geometry::samples(p) && at.z < static_cast<uint32>(C::positions(0, 0)) &&
                        at.y < static_cast<uint32>(C::positions(1, 0)) &&
                        at.x < static_cast<uint32>(C::positions(2, 0));
    return inside ? static_cast<int>(at.n * Numbers::value_stride_n +
                                     at.z * (Numbers::value_stride0 * C::classes(0)) +
                                     at.y * (Numbers::value_stride1 * C::classes(1)) +
                                     at.x * (Numbers::value_stride2 * C::classes(2)))
                  : -1;
  }

  // Eight rows by 32 columns at a time through shared memory, so that a warp writes whole lines.
  __device__ __forceinline__ void store(int first_channel, const float (&d)[sums]) const {
    constexpr int pairs = columns / 8;
    constexpr bool channels_last = Numbers::value_stride_c == 1 && Numbers::value_stride2 != 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    float(&stage)[8][value_pitch] = s.values[warp];
    const int first_row = first_channel + (share ? warp / 4 * 64 : 0) + warp % 4 * 16;
    const int* const offsets = s.offsets + (share ? 0 : warp / 4 * columns);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = first_row + 8 * h + lane / 4;
      const bool has = Geometry::exists(own);
      const float scale = Numbers::guards && has ? __ldg(p.scales + own) : 1.0f;
      float bias = 0.0f;
      if constexpr (C::has_bias) {
        if (has) bias = load_one<typename C::Bias>(p.parameter[1], Geometry::channel(own));
      }
#pragma unroll
      for (int j = 0; j < pairs; j += 4) {
        const int count = (pairs - j) * 8 < 32 ? (pairs - j) * 8 : 32;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < count / 8; ++k) {
          const int at = (j + k) * 4 + h * 2;
          *reinterpret_cast<float2*>(&stage[lane / 4][8 * k + 2 * (lane % 4)]) =
              float2{fmaf(d[at], scale, bias), fmaf(d[at + 1], scale, bias)};
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          // A lane has a column; where channels are neighbours a row; where classes are, those of a column.
          constexpr int side_by_side = 8 % C::classes(2) == 0 ? static_cast<int>(C::classes(2)) : 1;
          const int of_rows = (i * 32 + lane) % (32 * side_by_side);
          const int column = channels_last ? lane / 8 + 4 * i : of_rows / side_by_side;
          const int r = channels_last ? lane % 8 : i / side_by_side * side_by_side + of_rows % side_by_side;
          const int row = first_row + 8 * h + r;
          const int to = column < count ? offsets[j * 8 + column] : -1;
          if (to >= 0 && Geometry::exists(row)) p.values[to + Geometry::value_offset(row)] = stage[r][column];
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) {
        barrier::initialise(&s.full[i], 1);
        barrier::initialise(&s.empty[i], turns ? gemm::consumer_warps / 2 : gemm::consumer_warps);
      }
    }
    __syncthreads();
    allow_kernel_after();
    wait_for_kernel_before();
    if (threadIdx.x >= gemm::consumer_threads) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      if (threadIdx.x == gemm::consumer_threads) send();
      if (!Numbers::guards && blockIdx.x == 0 && threadIdx.x / 32 == gemm::consumer_warps + 1) gather_marks();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      multiply();
    }
  }
};

// A block for each sample. Clears what the kernel that does samples again wants to be zero.
template <class C, class Tail, class Numbers>
struct PackedGemmJudge {
  using Parameters = PackedGemmParameters<Tail::parameters>;
  const Parameters& p;

  __device__ __forceinline__ void run() const {
    const int64 n = blockIdx.x;
    if (threadIdx.x < (n == 0 ? 8 : 4))
      p.control[threadIdx.x < 4 ? n * 4 + threadIdx.x : p.batch * 4 + threadIdx.x - 4] = 0;
    if constexpr (Tail::has_norm) {
      constexpr int slabs = Tail::channels / Tail::group_channels;
      float largest = 0.0f;
#pragma unroll 4
      for (int c = threadIdx.x; c < Tail::channels; c += blockDim.x) {
        const float deviation = __ldcg(p.statistics + 2 * (n * slabs + c / Tail::group_channels) + 1);
        largest = gemm::largest_of(largest, Tail::weight(p, Tail::channel(n, c)) * deviation);
      }
      gemm::judge<Tail, Numbers>(p, n, largest / gemm::input_scale);
    } else {
      if (threadIdx.x == 0) gemm::judge<Tail, Numbers>(p, n, 1.0f);
    }
  }
};

// All but the product, as one kernel: three take the compiler longer.
template <class C, class Tail, class Numbers>
struct PackedGemmSteps {
  using Parameters = PackedGemmParameters<Tail::parameters>;
  const Parameters& p;
  unsigned char* shared;

  __device__ __forceinline__ void run() const {
    allow_kernel_after();
    wait_for_kernel_before();
    if (p.step == step_pack) {
      PackedGemmOperands<C, Tail, Numbers>{p, shared}.run();
    } else if constexpr (Numbers::guards) {
      if (p.step == step_pack_again) {
        PackedGemmScales<C, Tail, Numbers>{p}.run();
      } else {
        PackedGemmJudge<C, Tail, Numbers>{p}.run();
      }
    }
  }
};

}  // namespace onepass
