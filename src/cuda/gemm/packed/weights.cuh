// Packs weights for the row "gemm_packed", piece by piece through shared memory.
#pragma once

#include "gemm/packed/geometry.cuh"

namespace onepass {

namespace gemm {

// The scale of f32 elements of x: 4,000 still fits in f16, and underflow of small elements shows less.
constexpr float input_scale = 16.0f;
// The scale of f32 weights, and the range of a row's largest weight that it suits: no element overflows, and
// what underflows is at most 2^-24 of the largest.
constexpr float weight_scale = 4096.0f;
constexpr float most_weight = 15.9f;
constexpr float least_weight = 0x1p-12f;

// A block that packs.
struct PackTeam {
  static constexpr int threads = 256;
  int thread;
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ int any(bool one) const { return __syncthreads_or(one); }
};

}  // namespace gemm

// Where eight input channels of a tap lie in the packed weights of the row "gemm_packed", in units of 16
// bytes of all rows of a tile. A chunk of a stage has `stage_chunks` pieces of 16 channels.
template <class Numbers>
struct PackedGemmPlaces {
  static __device__ __forceinline__ int64 place(int tile, int chunk, int tap, int half) {
    constexpr int stage_chunks = Numbers::chunk_channels / 16;
    const int64 step = static_cast<int64>(tile) * Numbers::steps +
                       tap / Numbers::group_taps * Numbers::chunks + chunk / stage_chunks;
    return (step * Numbers::group_taps + tap % Numbers::group_taps) * stage_chunks * 2 +
           chunk % stage_chunks * 2 + half;
  }
};

// A piece is 32 rows by a chunk of 16 input channels by some of the taps.
template <class C, class Numbers, class Places = PackedGemmPlaces<Numbers>>
struct PackedGemmWeightPieces {
  using Geometry = PackedGemmGeometry<C, Numbers>;
  static constexpr int rows = 32;
  static constexpr int taps = Numbers::taps;
  static constexpr int terms = C::in_channels * taps;
  static constexpr int part_taps = Numbers::part_taps;
  static constexpr int parts = (taps + part_taps - 1) / part_taps;
  static constexpr int chunk_terms = 16 * part_taps;
  static constexpr int chunks = Numbers::input_channels / 16;
  using Weight = typename C::Weight;
  using Operand = typename Numbers::Operand;
  using Word = ElementBits<Weight>;
  // An odd number of banks from row to row.
  static constexpr int pitch_words = (chunk_terms * Weight::bytes / 4) | 1;
  static constexpr int pitch = pitch_words * 4 / Weight::bytes;
  static constexpr int shared_bytes = rows * pitch_words * 4;
  static constexpr int blocks = (Numbers::padded_channels + rows - 1) / rows;
  static constexpr int items = blocks * chunks * parts;

  // By a team of threads with shared memory of its own.
  template <class Parameters, class Team>
  static __device__ __forceinline__ void run(const Parameters& p, int item, unsigned char* shared,
                                             const Team& team) {
    const int of_block = item / parts;
    const int first_tap = (item - of_block * parts) * part_taps;
    const int first_row = of_block / chunks * rows;
    const int chunk = of_block % chunks;
    load(p, first_row, chunk * 16, first_tap, reinterpret_cast<Word*>(shared), team);
    team.sync();
    const bool are_finite = store(p, first_row, chunk, first_tap, shared, team);
    if (!Numbers::guards && team.thread == 0) p.piece_marks[item] = are_finite ? redo_none : redo_all;
    team.sync();
  }
  template <class Team>
  static constexpr int bytes_of() {
    return (shared_bytes + 7) / 8 * 8 + Team::threads * static_cast<int>(sizeof(float2));
  }

 private:
  template <class Parameters, class Team>
  static __device__ __forceinline__ void load(const Parameters& p, int first_padded, int first_channel,
                                              int first_tap, Word* shared, const Team& team) {
    constexpr int threads = Team::threads;
    // All rows belong to one group.
    const int first_row = Geometry::Rows::in_group(first_padded);
    const auto* from =
        static_cast<const Word*>(p.parameter[0]) + Geometry::Rows::group(first_padded) * group_weights<C>;
    const int left = C::in_channels - first_channel;
    const int count = (left < 16 ? left : 16) * part_taps;  // of a row
    constexpr int vector = 16 / Weight::bytes;
    if constexpr (C::transposed) {
      constexpr int run = rows * part_taps;  // of an input channel
#pragma unroll 4
      for (int i = team.thread; i < 16 * run; i += threads) {
        const int c = i / run;
        const int row = (i - c * run) / part_taps;
        const int own = i % part_taps;
        const int tap = first_tap + own;
        const int padded = first_padded + row;
        const bool exists =
            c < left && tap < taps && Geometry::exists(padded) && Geometry::has_tap(padded, tap);
        shared[row * pitch + c * part_taps + own] =
            exists ? from[Geometry::weight_in_group(first_row + row, first_channel + c, tap)] : Word{0};
      }
    } else if (parts == 1 && terms % vector == 0 && count == chunk_terms &&
               reinterpret_cast<uint64>(from) % 16 == 0) {
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
        const int c = at / part_taps;
        const int tap = first_tap + at - c * part_taps;
        const bool exists = at < count && tap < taps && first_row + row < Geometry::rows;
        shared[row * pitch + at] =
            exists ? from[static_cast<int64>(first_row + row) * terms + (first_channel + c) * taps + tap]
                   : Word{0};
      }
    }
  }

  // Whether all weights are finite, of 16-bit ones: the others' magnitudes tell.
  template <class Parameters, class Team>
  static __device__ __forceinline__ bool store(const Parameters& p, int first_row, int chunk, int first_tap,
                                               unsigned char* shared, const Team& team) {
    constexpr int threads = Team::threads;
    static_assert(threads % rows == 0);
    const int row = team.thread % rows;
    float largest = 0.0f, sum = 0.0f;
    for (int i = team.thread / rows; i < 2 * part_taps && first_tap + i / 2 < taps; i += threads / rows) {
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        x[k] = load_one<Weight>(shared, row * pitch + (i % 2 * 8 + k) * part_taps + i / 2);
        largest = gemm::largest_of(largest, x[k]);
        sum += fabsf(x[k]);
      }
      put(p, first_row + row, chunk, first_tap + i / 2, i % 2, x,
          Numbers::guards ? gemm::weight_scale : 1.0f);
    }
    if constexpr (Numbers::guards) {
      // Maximum and sum over the threads of a row.
      auto* const seen = reinterpret_cast<float2*>(shared + (shared_bytes + 7) / 8 * 8);
      seen[team.thread] = {largest, sum};
      team.sync();
      if (team.thread >= rows || !Geometry::exists(first_row + row)) return true;
      for (int i = row + rows; i < threads; i += rows) {
        largest = gemm::largest_of(largest, seen[i].x);
        sum += seen[i].y;
      }
      atomicMax(p.row_largest + first_row + row, __float_as_uint(largest));
      // Integers, so that the order of additions does not matter. Rows with a larger sum are measured again.
      if (sum < 0x1p40f) atomicAdd(p.row_sums + first_row + row, static_cast<uint64>(sum * 0x1p20f) + 1);
      return true;
    } else {
      return team.any(!(largest <= 3.4028235e38f)) == 0;
    }
  }

 public:
  // Stores eight input channels of a tap. A chunk has 16 channels.
  template <class Parameters>
  static __device__ __forceinline__ void put(const Parameters& p, int o, int chunk, int tap, int half,
                                             const float (&x)[8], float scale) {
    if (Numbers::padded_channels % rows != 0 && o >= Numbers::padded_channels) return;
    const int64 place = Places::place(o / Numbers::tile_channels, chunk, tap, half);
    static_cast<uint4*>(p.packed_weights)[place * Numbers::tile_channels + o % Numbers::tile_channels] =
        uint4{pack_operands<C, Operand>(x[0] * scale, x[1] * scale),
              pack_operands<C, Operand>(x[2] * scale, x[3] * scale),
              pack_operands<C, Operand>(x[4] * scale, x[5] * scale),
              pack_operands<C, Operand>(x[6] * scale, x[7] * scale)};
  }
};

}  // namespace onepass
