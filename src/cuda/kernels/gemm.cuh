// A wide convolution and all that follows it in one launch, as an implicit matrix product on Hopper's tensor
// cores.
//
// The positions of a sample are one flat index: rows and planes of x are given pitches (in thought) at which
// a tap is a shift of the index, whatever the padding: `pitch` positions a row, those beyond the input zero.
// A tile is `tile_positions` neighbours of that index by `tile_channels` output channels. Its window of x
// lies in shared memory as 16-bit elements, [eight channels][position], 16 bytes a position: a product of 16
// input channels at any tap then begins at a legal address. Weights are the left operand, positions the
// right.
//
//   three warps     x -> 16 bits -> a ring of stages, `chunk_channels` input channels each. Where x lies
//                   dense with channels before space, it comes to them by bulk copies of eight channels, in a
//                   ring of its own; else a fourth warp helps to load it
//   one thread      sends those copies, and packed weights to another ring, a group of taps of such a chunk
//                   each
//   two warpgroups  products of every tap, then the epilogue, while the rings fill for the next tile
//
// Where the block has a norm, the tiles of a unit (channels of a sample that are whole slabs) either are all
// on the chip at a time: each holds its values in registers until it has read the moments of the others
// ("held"). Or there are two passes, pass 1 of a wave of units, then pass 2 of the wave before, which finds
// values in the output, mostly in the second-level cache, where pass 1 left them ("stored"), or computes them
// again.
//
// f32 operands are rounded to f16 in tf32's precision, as exactly as to tf32, or split in two of them
// otherwise: three products, and sums that leave the tensor cores, which truncate, after at most 64 terms. A
// sample that f16 has no room for is marked, and done again by another kernel.
//
// Items go to blocks in turn, so that producers and consumers know them without asking each other; blocks
// that wait for each other are launched to run at the same time.
#pragma once

#include "barrier.cuh"
#include "thin.cuh"

namespace onepass {

template <int Count>
struct GemmParameters {
  const void* input;
  void* output;
  float* statistics;    // [batch][groups][2]: mean, 1 / deviation
  uint32* control;      // zero: two counters and a flag for each unit, four words
  float4* parts;        // of slabs, for each tile that has channels of it: count, mean, M2
  float* sums;          // of rows, for each range of positions
  uint32* only;         // zero: a word for each sample that is to be done again, then one for all (RedoWord)
  uint32* guard;        // zero: the bits of the largest magnitude in each sample
  const void* packed;   // weights as gemm_pack.cuh leaves them
  const float* scales;  // what a channel's sums are multiplied by, then the largest sum of magnitudes
  int64 batch;
  int64 wave_units;
  const void* parameter[Count > 0 ? Count : 1];

  // Elements go one by one.
  __device__ __forceinline__ bool is_aligned(int) const { return false; }
};

// The flat index: pitches, where taps lie, and which window of x a tile stages.
template <class C, class Numbers>
struct GemmGeometry {
  // Of stride s, every s-th position of x from a phase on is a window by itself: tap m is `offset` positions
  // of phase `phase` further.
  static constexpr __device__ int step(int d) { return static_cast<int>(C::step(d)); }
  static constexpr __device__ int place(int d, int m) {
    return static_cast<int>(C::base(d, 0) + m * C::delta(d));
  }
  static constexpr __device__ int offset(int d, int m) { return (place(d, m) - phase(d, m)) / step(d); }
  static constexpr __device__ int phase(int d, int m) { return (place(d, m) % step(d) + step(d)) % step(d); }
  static constexpr __device__ int low(int d) {
    return C::delta(d) < 0 ? offset(d, static_cast<int>(C::kernel(d)) - 1) : offset(d, 0);
  }
  // Which of the phases that taps meet it is.
  static constexpr __device__ int phase_index(int d, int m) {
    int before = 0;
    for (int i = 0; i < Numbers::phases(d); ++i) before += Numbers::phase(d, i) < phase(d, m) ? 1 : 0;
    return before;
  }
  static constexpr bool has_stride = C::step(0) * C::step(1) * C::step(2) > 1;
  static constexpr int pitch = Numbers::pitch;  // positions of a row
  static constexpr int plane = Numbers::plane;  // of a plane
  static constexpr int positions = Numbers::positions;
  // The flat index is the output's own.
  static constexpr bool contiguous =
      pitch == static_cast<int>(C::output_size(2)) && plane == pitch * static_cast<int>(C::output_size(1)) &&
      C::stride(4) == 1 && C::stride(3) == pitch && (C::output_size(0) == 1 || C::stride(2) == plane);
  // Windows of this many neighbours: one; one for each tap of the first dimension; or of the first two.
  static constexpr int split = Numbers::window_split;
  static constexpr int window = Numbers::window;
  static constexpr int windows = Numbers::windows;

  // Where the first position of a window lies from the tile's.
  static __device__ __forceinline__ int window_shift(int w) {
    if constexpr (has_stride) return low(0) * plane + low(1) * pitch + low(2);
    const int m0 = split == 0 ? 0 : split == 1 ? w : w / static_cast<int>(C::kernel(1));
    const int m1 = split == 2 ? w - m0 * static_cast<int>(C::kernel(1)) : 0;
    return (split == 0 ? low(0) : offset(0, m0)) * plane + (split == 2 ? offset(1, m1) : low(1)) * pitch +
           low(2);
  }
  // Where the tile's first position lies in its windows at a tap.
  static constexpr __device__ int tap_shift(int t) {
    const int k1 = static_cast<int>(C::kernel(1));
    const int k2 = static_cast<int>(C::kernel(2));
    const int m0 = t / (k1 * k2);
    const int m1 = t / k2 % k1;
    const int m2 = t % k2;
    if (has_stride) {
      const int w = (phase_index(0, m0) * Numbers::phases(1) + phase_index(1, m1)) * Numbers::phases(2) +
                    phase_index(2, m2);
      return w * window + (offset(0, m0) - low(0)) * plane + (offset(1, m1) - low(1)) * pitch +
             offset(2, m2) - low(2);
    }
    const int z = split == 0 ? (offset(0, m0) - low(0)) * plane : split == 1 ? m0 * window : m0 * k1 * window;
    const int y = split == 2 ? m1 * window : (offset(1, m1) - low(1)) * pitch;
    return z + y + offset(2, m2) - low(2);
  }
  // Where x of a flat position of window w lies in a channel; -1 where there is none.
  static __device__ __forceinline__ int input_offset(int flat, int w) {
    // Not negative: planes before the first are counted from further back.
    constexpr int back = low(0) < 0 ? 2 - low(0) : 2;
    const auto shifted = static_cast<unsigned>(flat + back * plane);
    const unsigned z = shifted / static_cast<unsigned>(plane);
    const unsigned in_plane = shifted - z * static_cast<unsigned>(plane);
    const unsigned y = in_plane / static_cast<unsigned>(pitch);
    const unsigned x = in_plane - y * static_cast<unsigned>(pitch);
    if constexpr (has_stride) {
      const int w1 = w / Numbers::phases(2);
      const int i0 = (static_cast<int>(z) - back) * step(0) +
                     static_cast<int>(Numbers::phase(0, w1 / Numbers::phases(1)));
      const int i1 =
          static_cast<int>(y) * step(1) + static_cast<int>(Numbers::phase(1, w1 % Numbers::phases(1)));
      const int i2 =
          static_cast<int>(x) * step(2) + static_cast<int>(Numbers::phase(2, w % Numbers::phases(2)));
      const bool inside = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) &&
                          i1 < static_cast<int>(C::input_size(1)) && i2 < static_cast<int>(C::input_size(2));
      return inside ? static_cast<int>(i0 * C::input_stride(2) + i1 * C::input_stride(3) +
                                       i2 * C::input_stride(4))
                    : -1;
    }
    const bool inside = z - back < static_cast<unsigned>(C::input_size(0)) &&
                        y < static_cast<unsigned>(C::input_size(1)) &&
                        x < static_cast<unsigned>(C::input_size(2));
    return inside ? static_cast<int>((z - back) * C::input_stride(2) + y * C::input_stride(3) +
                                     x * C::input_stride(4))
                  : -1;
  }
  // Where x of the first position at or after `flat` that has one lies in a dense channel.
  static __device__ __forceinline__ int input_from(int flat) {
    constexpr int back = low(0) < 0 ? 2 - low(0) : 2;
    constexpr int rows = static_cast<int>(C::input_size(1));
    constexpr int columns = static_cast<int>(C::input_size(2));
    const auto shifted = static_cast<unsigned>(flat + back * plane);
    const unsigned plane_index = shifted / static_cast<unsigned>(plane);
    const unsigned in_plane = shifted - plane_index * static_cast<unsigned>(plane);
    const int y = static_cast<int>(in_plane / static_cast<unsigned>(pitch));
    const int x = static_cast<int>(in_plane) - y * pitch;
    const int z = static_cast<int>(plane_index) - back;
    if (z < 0) return 0;
    if (z >= static_cast<int>(C::input_size(0))) return static_cast<int>(C::input_size(0)) * rows * columns;
    if (y >= rows) return (z + 1) * rows * columns;
    return (z * rows + y) * columns + (x < columns ? x : columns);
  }
  // Where the output of a flat position lies in a channel; -1 where there is none.
  static __device__ __forceinline__ int output_offset(int flat) {
    if constexpr (contiguous) return flat < positions ? flat : -1;
    const auto whole = static_cast<unsigned>(flat);
    const unsigned z = whole / static_cast<unsigned>(plane);
    const unsigned in_plane = whole - z * static_cast<unsigned>(plane);
    const unsigned y = in_plane / static_cast<unsigned>(pitch);
    const unsigned x = in_plane - y * static_cast<unsigned>(pitch);
    const bool inside = z < static_cast<unsigned>(C::output_size(0)) &&
                        y < static_cast<unsigned>(C::output_size(1)) &&
                        x < static_cast<unsigned>(C::output_size(2));
    return inside ? static_cast<int>(z * C::stride(2) + y * C::stride(3) + x * C::stride(4)) : -1;
  }
};

// What a block works on: one tile of a unit, in one of the passes.
template <class Tail, class Numbers>
struct GemmItem {
  static constexpr int unit_tiles = Numbers::unit_channel_tiles * Numbers::position_tiles;
  static constexpr int units_of_sample = Numbers::channel_tiles / Numbers::unit_channel_tiles;
  static constexpr bool twice = Tail::has_norm && !Numbers::held;
  using Items = Schedule<twice ? unit_tiles : 0, twice && Tail::mean_follows_norm ? 0 : unit_tiles>;

  // Whether values are computed; else they are loaded.
  __device__ __forceinline__ bool is_computed() const { return is_first || !Numbers::stored; }

  bool is_first;
  int64 unit;
  int64 n;
  int channel_tile;
  int position_tile;

  static __device__ __forceinline__ int64 count(int64 batch, int64 wave_units) {
    const int64 units = batch * units_of_sample;
    return twice ? Items::tickets(units, wave_units) : units * unit_tiles;
  }

  __device__ __forceinline__ GemmItem(int64 index, int64 wave_units) {
    int tile;
    if constexpr (twice) {
      const Items item(index, wave_units);
      is_first = item.is_first;
      unit = item.unit;
      tile = item.tile;
    } else {
      is_first = false;
      unit = static_cast<int64>(static_cast<uint32>(index) / static_cast<uint32>(unit_tiles));
      tile = static_cast<int>(static_cast<uint32>(index) % static_cast<uint32>(unit_tiles));
    }
    n = static_cast<int64>(static_cast<uint32>(unit) / static_cast<uint32>(units_of_sample));
    const int of_sample = static_cast<int>(unit - n * units_of_sample);
    position_tile = tile / Numbers::unit_channel_tiles;
    channel_tile =
        of_sample * Numbers::unit_channel_tiles + (tile - position_tile * Numbers::unit_channel_tiles);
  }
};

// The shared memory of a block.
template <class Tail, class Numbers>
struct alignas(128) GemmShared {
  static constexpr int slabs = Numbers::tile_channels;  // the most that a tile has channels of

  alignas(128) unsigned char x[Numbers::x_stages][Numbers::x_stage_bytes];
  alignas(128) unsigned char weights[Numbers::weight_stages][Numbers::weight_stage_bytes];
  alignas(128) unsigned char raw[Numbers::raw_slots][Numbers::raw_slot_bytes];  // x as it comes
  float4 rows[2][64];  // moments of the rows of each warpgroup
  float2 statistics[slabs];
  uint64 x_full[Numbers::x_stages];
  uint64 x_empty[Numbers::x_stages];
  uint64 weights_full[Numbers::weight_stages];
  uint64 weights_empty[Numbers::weight_stages];
  uint64 raw_full[Numbers::raw_slots];
  uint64 raw_empty[Numbers::raw_slots];
  uint32 tap_shifts[Numbers::taps];  // in bytes
  uint32 last;
};

namespace gemm {

// The bits of an element.
template <int Bytes>
struct Word {
  using Type = uint32;
};
template <>
struct Word<2> {
  using Type = uint16;
};

constexpr int consumer_threads = 256;
constexpr int consumer_warps = 8;
constexpr int staging_warps = 4;
constexpr int converting_warps = 3;  // of those, where x comes by copies

// Split operands are multiplied by this: the second part of an element of 1 is then far from f16's least
// numbers, and one of 4,000 fits.
constexpr float split_scale = 16.0f;

// Between the two warpgroups of consumers alone.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ __forceinline__ float largest_of(float largest, float x) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(largest), "f"(fabsf(x)));
  return result;
}

// Adds one to a counter of the launch, as count_up, without waiting for what it was.
__device__ __forceinline__ void arrive(uint32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// A place in a ring and how often it came round.
template <int Stages>
struct Ring {
  int stage = 0;
  uint32 round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      round ^= 1u;
    }
  }
};

}  // namespace gemm

// Fills the ring of windows.
template <class C, class Tail, class Numbers>
struct GemmStaging {
  using Parameters = GemmParameters<Tail::parameters>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Input = typename Tail::Input;
  using Operand = typename Numbers::Operand;
  static constexpr bool guards = Numbers::guards;
  static constexpr int threads = gemm::staging_warps * 32;
  static constexpr int window_positions = Geometry::window * Geometry::windows;
  static constexpr int rounds = (window_positions + threads - 1) / threads;
  static constexpr int halves = Numbers::chunk_channels / 8;

  // --- x by copies ---
  static constexpr int converters = gemm::converting_warps * 32;
  static constexpr int converting_rounds = (window_positions + converters - 1) / converters;
  static constexpr int raw_channel_bytes = Geometry::windows * Numbers::raw_pitch * Input::bytes;
  static constexpr int vector = 16 / Input::bytes;

  const Parameters& p;
  GemmShared<Tail, Numbers>& s;

  // What of a channel a window of the tile meets: elements from `first`, so many; on 16 bytes.
  struct Range {
    int first;
    int count;
    __device__ __forceinline__ Range(const Item& item, int w) {
      const int begin = item.position_tile * Numbers::tile_positions + Geometry::window_shift(w);
      const int from = Geometry::input_from(begin);
      const int to = Geometry::input_from(begin + Geometry::window);
      first = from / vector * vector;
      count = to > from ? (to + vector - 1) / vector * vector - first : 0;
    }
  };

  // One thread: the copies of eight channels of the tile.
  __device__ __forceinline__ void send_copies(const Item& item, int channel,
                                              gemm::Ring<Numbers::raw_slots>& ring) const {
    const int left = C::in_channels - channel;
    const int count = left < 8 ? left : 8;
    barrier::wait(&s.raw_empty[ring.stage], ring.round ^ 1u);
    uint32 bytes = 0;
    for (int w = 0; w < Geometry::windows; ++w)
      bytes += static_cast<uint32>(Range(item, w).count * count) * Input::bytes;
    barrier::expect(&s.raw_full[ring.stage], bytes);
#pragma unroll 1
    for (int w = 0; w < Geometry::windows; ++w) {
      const Range range(item, w);
      if (range.count == 0) continue;
      const auto* from =
          static_cast<const unsigned char*>(p.input) +
          (item.n * C::input_stride(0) + channel * C::input_stride(1) + range.first) * Input::bytes;
      unsigned char* to = s.raw[ring.stage] + w * Numbers::raw_pitch * Input::bytes;
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        barrier::copy(to + k * raw_channel_bytes, from + k * C::input_stride(1) * Input::bytes,
                      static_cast<uint32>(range.count) * Input::bytes, &s.raw_full[ring.stage]);
      }
    }
    ring.next();
  }

  // The converting warps.
  __device__ __forceinline__ void convert_tile(const Item& item, gemm::Ring<Numbers::x_stages>& ring,
                                               gemm::Ring<Numbers::raw_slots>& raw) const {
    const int thread = static_cast<int>(threadIdx.x) - gemm::consumer_threads;
    uint32 at[converting_rounds];
    uint32 inside = 0;
#pragma unroll
    for (int r = 0; r < converting_rounds; ++r) {
      const int place = r * converters + thread;
      const int w = Geometry::windows == 1 ? 0 : place / Geometry::window;
      const int offset = Geometry::input_offset(item.position_tile * Numbers::tile_positions +
                                                    Geometry::window_shift(w) + place - w * Geometry::window,
                                                w);
      const bool has = offset >= 0 && place < window_positions;
      at[r] = has ? static_cast<uint32>(w * Numbers::raw_pitch + offset - Range(item, w).first) * Input::bytes
                  : 0u;
      inside |= static_cast<uint32>(has) << r;
    }
    float largest = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      barrier::wait(&s.x_empty[ring.stage], ring.round ^ 1u);
      unsigned char* const stage = s.x[ring.stage] + thread * 16;
#pragma unroll 1
      for (int half = 0; half < halves; ++half) {
        const int channel = chunk * Numbers::chunk_channels + half * 8;
        const bool exists = C::in_channels % Numbers::chunk_channels == 0 || channel < C::in_channels;
        if (exists) barrier::wait(&s.raw_full[raw.stage], raw.round);
        const unsigned char* const from = s.raw[raw.stage];
        constexpr int at_once = 3;
#pragma unroll
        for (int first = 0; first < converting_rounds; first += at_once) {
          Eight x[at_once];
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            if (first + i >= converting_rounds) break;
            x[i].load_copied(from + at[first + i], exists && (inside >> (first + i) & 1u), channel);
          }
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            const int r = first + i;
            if (r >= converting_rounds) break;
            if ((r + 1) * converters > window_positions && r * converters + thread >= window_positions) break;
#pragma unroll
            for (int part = 0; part < Numbers::parts; ++part) {
              *reinterpret_cast<uint4*>(stage + ((part * halves + half) * window_positions + r * converters) *
                                                    16) = x[i].pack(largest, part == Numbers::parts - 1);
            }
          }
        }
        // What was read may be overwritten by copies, what was written read by products.
        barrier::release_to_copies();
        if (exists) {
          __syncwarp();
          if (threadIdx.x % 32 == 0) barrier::arrive(&s.raw_empty[raw.stage]);
          raw.next();
        }
      }
      if constexpr (guards) {
        if (chunk == Numbers::chunks - 1) leave_guard(item, largest, gemm::converting_warps);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier::arrive(&s.x_full[ring.stage]);
      ring.next();
    }
  }

  // --- x by loads ---
  // Eight channels of a position: on their way from memory, then as 16 bytes.
  struct Eight {
    typename gemm::Word<Input::bytes>::Type bits[8];

    // `from`: the channel's first element, the same in all threads; `bytes`: from there to the position.
    template <bool in_vectors>
    __device__ __forceinline__ void load(const unsigned char* from, uint32 bytes, bool inside, int channel) {
      using Word = typename gemm::Word<Input::bytes>::Type;
      if constexpr (in_vectors) {
        const auto* own = reinterpret_cast<const uint4*>(from + bytes);
#pragma unroll
        for (int v = 0; v < Input::bytes / 2; ++v) {
          const uint4 four = inside ? __ldg(own + v) : uint4{0, 0, 0, 0};
          const uint32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if constexpr (Input::bytes == 4) {
              bits[4 * v + k] = word[k];
            } else {
              bits[2 * k] = static_cast<Word>(word[k]);
              bits[2 * k + 1] = static_cast<Word>(word[k] >> 16);
            }
          }
        }
      } else {
        const auto* own = reinterpret_cast<const Word*>(from + bytes);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const bool exists = inside && (C::in_channels % 8 == 0 || channel + k < C::in_channels);
          bits[k] = exists ? __ldg(own + k * C::input_stride(1)) : Word{0};
        }
      }
    }
    // From copies of eight channels.
    __device__ __forceinline__ void load_copied(const unsigned char* from, bool inside, int channel) {
      using Word = typename gemm::Word<Input::bytes>::Type;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool exists = inside && (C::in_channels % 8 == 0 || channel + k < C::in_channels);
        bits[k] = exists ? *reinterpret_cast<const Word*>(from + k * raw_channel_bytes) : Word{0};
      }
    }
    // The part that one 16-bit number holds of each; what is left stays.
    __device__ __forceinline__ uint4 pack(float& largest, bool is_last) {
      if constexpr (Input::bytes == 4) {
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          v[k] = __uint_as_float(bits[k]);
          if (!is_last) v[k] *= gemm::split_scale;
        }
        const uint4 packed{Operand::pack(v[0], v[1]), Operand::pack(v[2], v[3]), Operand::pack(v[4], v[5]),
                           Operand::pack(v[6], v[7])};
        if (!is_last || Numbers::parts == 1) {
#pragma unroll
          for (int k = 0; k < 8; ++k) largest = gemm::largest_of(largest, v[k]);
        }
        if (!is_last) {
          float high[8];
          Operand::unpack(packed.x, high[0], high[1]);
          Operand::unpack(packed.y, high[2], high[3]);
          Operand::unpack(packed.z, high[4], high[5]);
          Operand::unpack(packed.w, high[6], high[7]);
#pragma unroll
          for (int k = 0; k < 8; ++k) bits[k] = __float_as_uint(v[k] - high[k]);
        }
        return packed;
      } else {
        const auto pair = [&](int k) {
          return static_cast<uint32>(bits[k]) | static_cast<uint32>(bits[k + 1]) << 16;
        };
        return uint4{pair(0), pair(2), pair(4), pair(6)};
      }
    }
  };

  // Whether eight channels of a position may lie side by side, as vectors.
  static constexpr bool vectors_fit = C::input_stride(1) == 1 && C::in_channels % 8 == 0 &&
                                      C::input_stride(0) % 8 == 0 && C::input_stride(2) % 8 == 0 &&
                                      C::input_stride(3) % 8 == 0 && C::input_stride(4) % 8 == 0;

  // `send_weights(chunk)` is called by the last warp when it has staged a chunk.
  template <bool in_vectors, class SendWeights>
  __device__ __forceinline__ void tile(const Item& item, gemm::Ring<Numbers::x_stages>& ring,
                                       SendWeights&& send_weights) const {
    const int thread = static_cast<int>(threadIdx.x) - gemm::consumer_threads;
    const int64 sample = item.n * C::input_stride(0);
    uint32 bytes[rounds];
    uint32 inside = 0;  // a bit for each round
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const int place = r * threads + thread;
      const int w = place / Geometry::window;
      const int offset = Geometry::input_offset(item.position_tile * Numbers::tile_positions +
                                                    Geometry::window_shift(w) + place - w * Geometry::window,
                                                w);
      bytes[r] = offset < 0 ? 0u : static_cast<uint32>(offset) * Input::bytes;
      if (offset >= 0) inside |= 1u << r;  // as a sum of shifted bits, ptxas 13.0 crashes for strides
    }
    float largest = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      barrier::wait(&s.x_empty[ring.stage], ring.round ^ 1u);
      unsigned char* const stage = s.x[ring.stage] + thread * 16;
      // Positions at a time: 32 loads on their way.
      constexpr int at_once = 2;
#pragma unroll 1
      for (int half = 0; half < halves; half += 2) {
        const int channel = chunk * Numbers::chunk_channels + half * 8;
        const bool exists = C::in_channels % Numbers::chunk_channels == 0 || channel < C::in_channels;
        const bool has_second = C::in_channels % 16 == 0 || channel + 8 < C::in_channels;
        const unsigned char* const from = static_cast<const unsigned char*>(p.input) +
                                          (sample + channel * C::input_stride(1)) * Input::bytes;
#pragma unroll
        for (int first = 0; first < rounds; first += at_once) {
          Eight x[at_once][2];
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            if (first + i >= rounds) break;
            const bool has = inside >> (first + i) & 1u;
            x[i][0].template load<in_vectors>(from, bytes[first + i], exists && has, channel);
            x[i][1].template load<in_vectors>(from + 8 * C::input_stride(1) * Input::bytes, bytes[first + i],
                                              exists && has_second && has, channel + 8);
          }
          // Keeps the compiler from loading some when others have come.
          __syncwarp();
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            const int r = first + i;
            if (r >= rounds) break;
            if ((r + 1) * threads > window_positions && r * threads + thread >= window_positions) break;
#pragma unroll
            for (int part = 0; part < Numbers::parts; ++part) {
              unsigned char* const to =
                  stage + ((part * halves + half) * window_positions + r * threads) * 16;
              const bool is_last = part == Numbers::parts - 1;
              *reinterpret_cast<uint4*>(to) = x[i][0].pack(largest, is_last);
              *reinterpret_cast<uint4*>(to + window_positions * 16) = x[i][1].pack(largest, is_last);
            }
          }
        }
      }
      barrier::release_to_copies();
      if constexpr (guards) {
        if (chunk == Numbers::chunks - 1) leave_guard(item, largest, gemm::staging_warps);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier::arrive(&s.x_full[ring.stage]);
        if (thread == threads - 32) send_weights(chunk);
      }
      __syncwarp();
      ring.next();
    }
  }

  __device__ __forceinline__ void leave_guard(const Item& item, float largest, int warps) const {
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (threadIdx.x % 32 != 0) return;
    atomicMax(p.guard + item.n, bits);
    if constexpr (!Tail::has_norm) {
      // Nobody else waits for the sample's last tile: the last warp judges.
      if (item.channel_tile == 0 &&
          count_up(p.control + item.unit * 4 + 2) == static_cast<uint32>(Numbers::position_tiles * warps) - 1)
        judge(p, item.n, 1.0f);
    }
  }

  // Marks a sample that f16 has no room for. Of a magnitude below 2^-14 f16 drops up to 2^-25: what becomes
  // of that, at most, must not show where values are of the order of 1 (after a norm), or beside what is
  // dropped of the largest (without one).
  static __device__ __forceinline__ void judge(const Parameters& p, int64 n, float scale) {
    const float largest = __uint_as_float(__ldcg(p.guard + n));
    constexpr float limit = 65504.0f;
    bool redo = !(largest <= limit);
    if (largest > 0.0f) {
      constexpr bool splits = Numbers::parts == 2;
      if constexpr (Tail::has_norm) {
        const float lost = (splits ? 0x1p-25f / gemm::split_scale : 0x1p-25f) *
                           __ldcg(p.scales + Numbers::padded_channels) * Numbers::steepness * scale;
        redo |= !(lost <= (splits ? 1e-6f : 1e-5f));
      } else {
        redo |= largest < (splits ? 0x1p-7f * gemm::split_scale : 0x1p-4f);
      }
    }
    if (redo) {
      p.only[n] = 1;
      atomicMax(p.only + p.batch, static_cast<uint32>(redo_some));
    }
  }
};

// Computes a tile's sums: rows are output channels, columns positions.
template <class C, class Tail, class Numbers>
struct GemmMainloop {
  using Geometry = GemmGeometry<C, Numbers>;
  using Shared = GemmShared<Tail, Numbers>;
  using Product = typename Numbers::Product;
  static constexpr int sums = Numbers::columns / 2;
  static constexpr int steps = Numbers::chunk_channels / 16;
  static constexpr int group_taps = Numbers::group_taps;
  static constexpr int groups = Numbers::taps / group_taps;
  static constexpr int window_bytes = Geometry::window * Geometry::windows * 16;

  Shared& s;
  gemm::Ring<Numbers::x_stages> x;
  gemm::Ring<Numbers::weight_stages> weights;

  // Of an operand by rows of 16 bytes, eight of them together, the next eight channels `leading` bytes on.
  static __device__ __forceinline__ uint64 descriptor(uint32 address, uint32 leading) {
    return static_cast<uint64>(address >> 4) | static_cast<uint64>(leading >> 4) << 16 |
           static_cast<uint64>(128 >> 4) << 32;
  }

  __device__ __forceinline__ void run(float (&d)[sums]) {
    if constexpr (Numbers::parts == 1) {
      multiply(d, [] {});
    } else {
      float part[sums];
#pragma unroll
      for (int i = 0; i < sums; ++i) d[i] = 0.0f;
      multiply(part, [&] {
#pragma unroll
        for (int i = 0; i < sums; ++i) d[i] += part[i];
      });
    }
  }

 private:
  // All products. Sums of several parts are taken out of the tensor cores after each group: `take` is called.
  template <class Take>
  __device__ __forceinline__ void multiply(float (&d)[sums], Take&& take) {
    const int lane = threadIdx.x % 32;
    const int group = threadIdx.x / 128;
    const uint32 x_begin = barrier::shared_address(s.x[0]) +
                           (Numbers::groups_share_positions ? 0u : group * Numbers::columns * 16);
    const uint32 weights_begin =
        barrier::shared_address(s.weights[0]) + (Numbers::groups_share_positions ? group * 64 * 16 : 0u);
    int scale = 0;  // the first product has no sums before it
    int x_before = -1, weights_before = -1;
    const auto release = [&] {
      if (lane == 0) {
        if (!Numbers::weights_stay && weights_before >= 0) barrier::arrive(&s.weights_empty[weights_before]);
        if (x_before >= 0) barrier::arrive(&s.x_empty[x_before]);
      }
    };
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      barrier::wait(&s.x_full[x.stage], x.round);
      const uint32 x_stage = x_begin + x.stage * Numbers::x_stage_bytes;
#pragma unroll 1
      for (int g = 0; g < groups; ++g) {
        // Weights that stay are loaded once: the first round of their barriers is over for good.
        barrier::wait(&s.weights_full[weights.stage], Numbers::weights_stay ? 0u : weights.round);
        const uint32 w_stage = weights_begin + weights.stage * Numbers::weight_stage_bytes;
        if constexpr (Numbers::parts == 2) scale = 0;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int t = 0; t < group_taps; ++t) {
          const uint32 shift = groups == 1 ? Geometry::tap_shift(t) * 16u : s.tap_shifts[g * group_taps + t];
#pragma unroll
          for (int k = 0; k < steps; ++k) {
            // Small products first, then that of the first parts.
#pragma unroll
            for (int product = Numbers::parts == 2 ? 2 : 0; product >= 0; --product) {
              const int of_weights = product == 1 ? 1 : 0;
              const int of_x = product == 2 ? 1 : 0;
              Product::run(d,
                           descriptor(w_stage + ((t * Numbers::parts + of_weights) * steps + k) *
                                                    Numbers::tile_channels * 32,
                                      Numbers::tile_channels * 16),
                           descriptor(x_stage + shift + (of_x * steps + k) * 2 * window_bytes, window_bytes),
                           scale);
              scale = 1;
            }
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if constexpr (Numbers::parts == 1) {
          // The group before is done: its stages are free.
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          release();
          weights_before = weights.stage;
          x_before = g == groups - 1 ? x.stage : -1;
        } else {
          wait_for_products(d);
          weights_before = weights.stage;
          x_before = g == groups - 1 ? x.stage : -1;
          release();
          take();
        }
        weights.next();
      }
      x.next();
    }
    if constexpr (Numbers::parts == 1) {
      wait_for_products(d);
      release();
    }
  }

  static __device__ __forceinline__ void wait_for_products(float (&d)[sums]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }
};

// The columns of a thread: every fourth pair. Column i is at position first + i / 2 * 8 + i % 2.
template <class Geometry, int Columns, bool contiguous = Geometry::contiguous>
struct GemmColumns {
  int first;
  uint32 inside[(Columns + 31) / 32] = {};  // a bit for each that has an output

  explicit __device__ __forceinline__ GemmColumns(int first_position) : first(first_position) {
#pragma unroll
    for (int i = 0; i < Columns; ++i)
      inside[i / 32] |= static_cast<uint32>(Geometry::output_offset(at(i)) >= 0) << (i % 32);
  }
  __device__ __forceinline__ int at(int i) const { return first + i / 2 * 8 + i % 2; }
  __device__ __forceinline__ bool has(int i) const { return inside[i / 32] >> (i % 32) & 1u; }
  // Where it lies in its channel; of a column without output, anywhere there.
  __device__ __forceinline__ int offset(int i) const {
    const int own = Geometry::output_offset(at(i));
    return own < 0 ? 0 : own;
  }
  __device__ __forceinline__ int count() const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < (Columns + 31) / 32; ++i) sum += __popc(inside[i]);
    return sum;
  }
};
template <class Geometry, int Columns>
struct GemmColumns<Geometry, Columns, true> {
  int first;
  int left;

  explicit __device__ __forceinline__ GemmColumns(int first_position)
      : first(first_position), left(Geometry::positions - first_position) {}
  __device__ __forceinline__ bool has(int i) const { return left > i / 2 * 8 + i % 2; }
  __device__ __forceinline__ int offset(int i) const { return first + i / 2 * 8 + i % 2; }
  __device__ __forceinline__ int count() const {
    const int whole = left <= 0 ? 0 : left / 8 * 2 + (left % 8 < 2 ? left % 8 : 2);
    return whole < Columns ? whole : Columns;
  }
};

// What becomes of a tile's sums. A thread has two rows, and of each every fourth pair of columns.
template <class C, class Tail, class Numbers>
struct GemmEpilogue {
  using Parameters = GemmParameters<Tail::parameters>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Shared = GemmShared<Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Output = typename Tail::Output;
  using Staging = GemmStaging<C, Tail, Numbers>;
  static constexpr int sums = Numbers::columns / 2;
  static constexpr int pairs = Numbers::columns / 8;  // of columns, in each row of a thread
  using Columns = GemmColumns<Geometry, 2 * pairs>;
  static constexpr int slabs_of_sample = Tail::channels / Tail::group_channels;
  // Channel tiles a slab may have channels in.
  static constexpr int spans = (Tail::group_channels - 1) / Numbers::tile_channels + 2;
  static constexpr bool one_span = Numbers::tile_channels % Tail::group_channels == 0;

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / 4;

  __device__ __forceinline__ int row(int h) const {
    return (Numbers::groups_share_positions ? group * 64 : 0) + warp % 4 * 16 + lane / 4 + 8 * h;
  }
  __device__ __forceinline__ int first_position(const Item& item) const {
    return item.position_tile * Numbers::tile_positions +
           (Numbers::groups_share_positions ? 0 : group * Numbers::columns) + 2 * (lane % 4);
  }
  static __device__ __forceinline__ int first_slab(const Item& item) {
    return item.channel_tile * Numbers::tile_channels / Tail::group_channels;
  }
  // The slabs that this tile has channels of.
  static __device__ __forceinline__ int slab_count(const Item& item) {
    const int end = (item.channel_tile + 1) * Numbers::tile_channels;
    const int last = ((end < Tail::channels ? end : Tail::channels) - 1) / Tail::group_channels;
    return last - first_slab(item) + 1;
  }

  // Scale and bias, then the chain before the norm, in place.
  __device__ __forceinline__ void activate(const Item& item, const Columns& columns, float (&d)[sums]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const int channel = c < Tail::channels ? c : 0;
      const float scale = Numbers::guards ? __ldg(p.scales + channel) : 1.0f;
      float bias = 0.0f;
      if constexpr (C::has_bias) bias = load_one<typename C::Bias>(p.parameter[1], channel);
      ChannelValues<Before, 1> values;
      values.load(p, item.n, channel);
      const int64 begin = item.n * C::stride(0) + channel * C::stride(1);
#pragma unroll
      for (int i = 0; i < 2 * pairs; ++i) {
        float& value = d[i / 2 * 4 + h * 2 + i % 2];
        typename Before::template Tensors<1> tensors;
        if constexpr (Numbers::before_reads_tensors) {
          if (columns.has(i)) tensors.load(p, begin + columns.offset(i));
        }
        value = Before::value(Numbers::guards ? fmaf(value, scale, bias) : value + bias, values.value[0],
                              tensors, 0);
      }
    }
  }

  // Pairs of columns lie side by side in the output, at even offsets; then also on so many bytes.
  static constexpr bool pairs_fit =
      Geometry::contiguous && Tail::spatial % 2 == 0 && C::stride(1) % 2 == 0 && C::stride(0) % 2 == 0;
  __device__ __forceinline__ int are_paired() const {
    return pairs_fit && reinterpret_cast<uint64>(p.output) % (2 * Output::bytes) == 0;
  }

  // Values between the passes, where the output will be: body(address, the first of two values, whether each
  // is there, whether both may go at once).
  template <class Body>
  __device__ __forceinline__ void for_each_pair(const Item& item, const Columns& columns, Body&& body) const {
    int paired = are_paired();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      float* row_begin = static_cast<float*>(p.output) + item.n * C::stride(0) + c * C::stride(1);
#pragma unroll
      for (int j = 0; j < pairs; ++j) {
        asm volatile("" : "+r"(paired));
        const bool first = c < Tail::channels && columns.has(2 * j);
        const bool second = c < Tail::channels && columns.has(2 * j + 1);
        body(row_begin + columns.offset(2 * j), row_begin + columns.offset(2 * j + 1), j * 4 + h * 2, first,
             second, pairs_fit && paired);
      }
    }
  }
  __device__ __forceinline__ void store_values(const Item& item, const Columns& columns,
                                               const float (&d)[sums]) const {
    for_each_pair(item, columns, [&](float* a, float* b, int i, bool first, bool second, bool paired) {
      if (paired) {
        if (first) __stcg(reinterpret_cast<float2*>(a), float2{d[i], d[i + 1]});
      } else {
        if (first) __stcg(a, d[i]);
        if (second) __stcg(b, d[i + 1]);
      }
    });
  }
  __device__ __forceinline__ void load_values(const Item& item, const Columns& columns,
                                              float (&d)[sums]) const {
    for_each_pair(item, columns, [&](float* a, float* b, int i, bool first, bool second, bool paired) {
      float2 value{0.0f, 0.0f};
      if (paired) {
        if (first) value = __ldcg(reinterpret_cast<const float2*>(a));
      } else {
        if (first) value.x = __ldcg(a);
        if (second) value.y = __ldcg(b);
      }
      d[i] = value.x;
      d[i + 1] = value.y;
    });
  }

  // --- Moments ---
  // Of the tile's rows, left in shared memory; every consumer, and a barrier follows.
  __device__ __forceinline__ void row_moments(const Columns& columns, const float (&d)[sums]) const {
    const int count = columns.count();
    const float own_count = static_cast<float>(count);
    const float quad_count = lanes_sum<4>(own_count);
    const float per_count = count > 0 ? 1.0f / own_count : 0.0f;
    const bool all = __all_sync(0xffffffffu, count == 2 * pairs);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Moments own{own_count, 0.0f, 0.0f};
      if (all) {
        moments<true>(d, h, columns, per_count, own);
      } else {
        moments<false>(d, h, columns, per_count, own);
      }
      float mean, m2;
      team_moments<4, gemm::consumer_threads>(own, quad_count, nullptr, mean, m2);
      if (lane % 4 == 0) s.rows[group][warp % 4 * 16 + lane / 4 + 8 * h] = float4{quad_count, mean, m2, 0.0f};
    }
  }

  template <bool all>
  static __device__ __forceinline__ void moments(const float (&d)[sums], int h, const Columns& columns,
                                                 float per_count, Moments& own) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      const float value = d[i / 2 * 4 + h * 2 + i % 2];
      sum[i % 4] += all || columns.has(i) ? value : 0.0f;
    }
    own.mean = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * per_count;
    float m2[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      const float distance = d[i / 2 * 4 + h * 2 + i % 2] - own.mean;
      const float counted = all || columns.has(i) ? distance : 0.0f;
      m2[i % 4] = fmaf(counted, counted, m2[i % 4]);
    }
    own.m2 = (m2[0] + m2[1]) + (m2[2] + m2[3]);
  }

  // A warp for each slab of the tile: its rows here become one part.
  __device__ __forceinline__ void store_parts(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_channels;
    const int count = slab_count(item);
    for (int i = warp; i < count; i += gemm::consumer_warps) {
      const int slab = first_slab(item) + i;
      int first = slab * Tail::group_channels - begin;
      int last = first + Tail::group_channels;
      first = first < 0 ? 0 : first;
      last = last < Numbers::tile_channels ? last : Numbers::tile_channels;
      Moments own;
      if constexpr (Numbers::groups_share_positions) {
        for (int r = first + lane; r < last; r += 32) merge(own, s.rows[r / 64][r % 64]);
      } else {
        for (int r = 2 * first + lane; r < 2 * last; r += 32) merge(own, s.rows[r % 2][r / 2]);
      }
      const float elements = lanes_sum<32>(own.count);
      float mean, m2;
      team_moments<32, gemm::consumer_threads>(own, elements, nullptr, mean, m2);
      if (lane == 0)
        __stcg(part(item.n, slab, item.channel_tile, item.position_tile), float4{elements, mean, m2, 0.0f});
    }
    if constexpr (Tail::mean_follows_norm) {
      // The means of channels are wanted too.
      for (int r = static_cast<int>(threadIdx.x); r < Numbers::tile_channels; r += gemm::consumer_threads) {
        if (begin + r >= Tail::channels) break;
        float sum;
        if constexpr (Numbers::groups_share_positions) {
          sum = s.rows[r / 64][r % 64].x * s.rows[r / 64][r % 64].y;
        } else {
          sum = s.rows[0][r].x * s.rows[0][r].y + s.rows[1][r].x * s.rows[1][r].y;
        }
        p.sums[(item.n * Tail::channels + begin + r) * Numbers::position_tiles + item.position_tile] = sum;
      }
    }
  }
  static __device__ __forceinline__ void merge(Moments& own, const float4& other) {
    if (other.x > 0.0f) own.merge(other.x, other.y, other.z);
  }
  __device__ __forceinline__ float4* part(int64 n, int slab, int channel_tile, int position_tile) const {
    const int span = one_span ? 0 : channel_tile - slab * Tail::group_channels / Numbers::tile_channels;
    return p.parts +
           ((n * slabs_of_sample + slab) * (one_span ? 1 : spans) + span) * Numbers::position_tiles +
           position_tile;
  }

  // By one warp: mean and 1 / deviation of a slab from all its parts.
  __device__ __forceinline__ float2 slab_statistics(int64 n, int slab) const {
    const int first_tile = slab * Tail::group_channels / Numbers::tile_channels;
    const int last_tile = ((slab + 1) * Tail::group_channels - 1) / Numbers::tile_channels;
    const int count = (last_tile - first_tile + 1) * Numbers::position_tiles;
    const float4* parts = part(n, slab, first_tile, 0);
    Moments own;
#pragma unroll 4
    for (int i = lane; i < count; i += 32) merge(own, __ldcg(parts + i));
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    float mean, m2;
    team_moments<32, gemm::consumer_threads>(own, elements, nullptr, mean, m2);
    return {mean, 1.0f / sqrtf(m2 / elements + Tail::eps)};
  }

  // --- After the last tile of a unit ---
  __device__ __forceinline__ bool arrives_last(uint32* counter) const {
    gemm::consumers_sync();
    if (threadIdx.x == 0) s.last = count_up(counter) == static_cast<uint32>(Item::unit_tiles) - 1;
    gemm::consumers_sync();
    return s.last;
  }

  // All slabs of the unit, by the block that came last.
  __device__ __forceinline__ void finish_moments(const Item& item) const {
    constexpr int slabs = slabs_of_sample * Numbers::unit_channel_tiles / Numbers::channel_tiles;
    const int first = Numbers::unit_channel_tiles == Numbers::channel_tiles ? 0 : first_slab(item);
    const int end =
        first + (Numbers::unit_channel_tiles == Numbers::channel_tiles ? slabs_of_sample : slab_count(item));
    for (int slab = first + warp; slab < end; slab += gemm::consumer_warps) {
      const float2 statistics = slab_statistics(item.n, slab);
      float* to = p.statistics + 2 * (item.n * slabs_of_sample + slab);
      if (lane == 0) {
        to[0] = statistics.x;
        to[1] = statistics.y;
      }
      for (int i = lane; i < Tail::group_channels; i += 32) {
        const int c = slab * Tail::group_channels + i;
        const float scale = Tail::weight(p, c) * statistics.y;
        if constexpr (Numbers::guards) Staging::judge(p, item.n, fabsf(scale));
        if constexpr (Tail::mean_follows_norm) {
          const float mean = row_sum(item.n * Tail::channels + c) / static_cast<float>(Tail::spatial);
          store_one<Output>(p.output, item.n * Tail::channels + c,
                            fmaf(mean - statistics.x, scale, Tail::bias(p, c)));
        }
      }
    }
    (void)slabs;
  }

  __device__ __forceinline__ float row_sum(int64 row) const {
    double total = 0.0;
    for (int i = 0; i < Numbers::position_tiles; ++i)
      total += static_cast<double>(__ldcg(p.sums + row * Numbers::position_tiles + i));
    return static_cast<float>(total);
  }

  __device__ __forceinline__ void finish_mean(const Item& item) const {
    const int first = item.channel_tile / Numbers::unit_channel_tiles * Numbers::unit_channel_tiles *
                      Numbers::tile_channels;
    const int end = first + Numbers::unit_channel_tiles * Numbers::tile_channels;
    for (int c = first + static_cast<int>(threadIdx.x); c < end && c < Tail::channels;
         c += gemm::consumer_threads) {
      const int64 row = item.n * Tail::channels + c;
      store_one<Output>(p.output, row, row_sum(row) / static_cast<float>(Tail::spatial));
    }
  }

  // --- The norm and what follows ---
  // Statistics of the tile's slabs, in shared memory; every consumer.
  __device__ __forceinline__ void load_statistics(const Item& item) const {
    const int first = first_slab(item);
    const int count = slab_count(item);
    if constexpr (Numbers::held) {
      for (int i = warp; i < count; i += gemm::consumer_warps) {
        const float2 statistics = slab_statistics(item.n, first + i);
        if (lane != 0) continue;
        s.statistics[i] = statistics;
        if (item.position_tile == 0) {
          float* to = p.statistics + 2 * (item.n * slabs_of_sample + first + i);
          to[0] = statistics.x;
          to[1] = statistics.y;
        }
      }
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < count; i += gemm::consumer_threads) {
        const float* from = p.statistics + 2 * (item.n * slabs_of_sample + first + i);
        s.statistics[i] = {load_shared_by_blocks(from), load_shared_by_blocks(from + 1)};
      }
    }
    gemm::consumers_sync();
  }

  __device__ __forceinline__ void apply(const Item& item, const Columns& columns, float (&d)[sums]) const {
    int paired = are_paired();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const bool in_range = c < Tail::channels;
      const int channel = in_range ? c : 0;
      float scale = 1.0f, shift = 0.0f;
      if constexpr (Tail::has_norm) {
        const int slab = in_range ? c / Tail::group_channels - first_slab(item) : 0;
        const float2 statistics = s.statistics[slab];
        scale = Tail::weight(p, channel) * statistics.y;
        shift = fmaf(-statistics.x, scale, Tail::bias(p, channel));
        if constexpr (Numbers::guards && Numbers::held) {
          if (item.position_tile == 0 && in_range && lane % 4 == 0) Staging::judge(p, item.n, fabsf(scale));
        }
      }
      ChannelValues<After, 1> values;
      values.load(p, item.n, channel);
      const int64 begin = item.n * C::stride(0) + channel * C::stride(1);
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < pairs; ++j) {
        // Asked again for each pair: two loops would keep all values of both in registers.
        asm volatile("" : "+r"(paired));
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 2 * j + e;
          typename After::template Tensors<1> tensors;
          if constexpr (Numbers::after_reads_tensors) {
            if (columns.has(i)) tensors.load(p, begin + columns.offset(i));
          }
          value[e] = d[j * 4 + h * 2 + e];
          if constexpr (Tail::has_norm) value[e] = fmaf(value[e], scale, shift);
          value[e] = After::value(value[e], values.value[0], tensors, 0);
          if constexpr (Tail::has_mean) {
            total += columns.has(i) ? value[e] : 0.0f;
          } else if (!(pairs_fit && paired)) {
            if (in_range && columns.has(i)) store_one<Output>(p.output, begin + columns.offset(i), value[e]);
          }
        }
        if constexpr (!Tail::has_mean && pairs_fit) {
          if (paired && in_range && columns.has(2 * j)) {
            Packed<Output, 2> packed;
            packed.pack(value);
            packed.store(p.output, begin + columns.offset(2 * j), true);
          }
        }
      }
      if constexpr (Tail::has_mean) {
        total = lanes_sum<4>(total);
        if (lane % 4 == 0) s.rows[group][warp % 4 * 16 + lane / 4 + 8 * h].x = total;
      }
    }
    if constexpr (Tail::has_mean) {
      gemm::consumers_sync();
      const int begin = item.channel_tile * Numbers::tile_channels;
      for (int r = static_cast<int>(threadIdx.x); r < Numbers::tile_channels; r += gemm::consumer_threads) {
        if (begin + r >= Tail::channels) break;
        const float sum = Numbers::groups_share_positions ? s.rows[r / 64][r % 64].x
                                                          : s.rows[0][r % 64].x + s.rows[1][r % 64].x;
        p.sums[(item.n * Tail::channels + begin + r) * Numbers::position_tiles + item.position_tile] = sum;
      }
    }
  }

  __device__ __forceinline__ void run(const Item& item, float (&d)[sums]) const {
    uint32* counters = p.control + item.unit * 4;
    const Columns columns(first_position(item));
    if (item.is_computed()) activate(item, columns, d);
    if constexpr (Tail::has_norm) {
      if (Numbers::held || item.is_first) {
        row_moments(columns, d);
        if constexpr (Numbers::stored) store_values(item, columns, d);
        gemm::consumers_sync();
        store_parts(item);
        if constexpr (Numbers::held && !Tail::mean_follows_norm) {
          gemm::consumers_sync();
          if (threadIdx.x == 0) {
            gemm::arrive(counters);
            wait_for(counters, Item::unit_tiles);
          }
        } else {
          if (arrives_last(counters)) {
            finish_moments(item);
            gemm::consumers_sync();
            if (threadIdx.x == 0)
              asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counters + 2), "r"(1u) : "memory");
          }
          return;
        }
      } else if (threadIdx.x == 0) {
        wait_for(counters + 2, 1u);
      }
      gemm::consumers_sync();
      load_statistics(item);
      if constexpr (Numbers::stored) load_values(item, columns, d);
    }
    apply(item, columns, d);
    if constexpr (Tail::has_mean) {
      if (arrives_last(counters + 1)) finish_mean(item);
    }
    // Rows and statistics in shared memory are free before the next tile writes them.
    if constexpr (Tail::has_norm || Tail::has_mean) gemm::consumers_sync();
  }
};

// The block: what each warp does.
template <class C, class Tail, class Numbers>
struct Gemm {
  using Parameters = GemmParameters<Tail::parameters>;
  using Shared = GemmShared<Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr int threads = gemm::consumer_threads + gemm::staging_warps * 32;
  static constexpr int groups = Numbers::taps / Numbers::group_taps;
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);
  static_assert(Numbers::chunk_channels % 16 == 0 && Numbers::columns % 8 == 0);

  const Parameters& p;
  Shared& s;

  template <class Body>
  __device__ __forceinline__ void for_each_item(Body&& body) const {
    const int64 count = Item::count(p.batch, p.wave_units);
    const int64 units = p.batch * Item::units_of_sample;
#pragma unroll 1
    for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
      const Item item(i, p.wave_units);
      if (item.unit < units) body(item);
    }
  }

  // Whether x comes by copies: they begin on 16 bytes.
  __device__ __forceinline__ bool copies() const {
    return Numbers::copies && reinterpret_cast<uint64>(p.input) % 16 == 0;
  }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Numbers::x_stages; ++i) {
        barrier::initialise(&s.x_full[i], copies() ? gemm::converting_warps : gemm::staging_warps);
        barrier::initialise(&s.x_empty[i], gemm::consumer_warps);
      }
      for (int i = 0; i < Numbers::weight_stages; ++i) {
        barrier::initialise(&s.weights_full[i], 1);
        barrier::initialise(&s.weights_empty[i], gemm::consumer_warps);
      }
      for (int i = 0; i < Numbers::raw_slots; ++i) {
        barrier::initialise(&s.raw_full[i], 1);
        barrier::initialise(&s.raw_empty[i], gemm::converting_warps);
      }
    }
    for (int t = static_cast<int>(threadIdx.x); t < Numbers::taps; t += threads)
      s.tap_shifts[t] = Geometry::tap_shift(t) * 16;
    __syncthreads();
  }

  // One thread. A stage it waits for is freed by products whose x it has staged before, so that it is freed.
  __device__ __forceinline__ void send_weights(const Item& item, int chunk,
                                               gemm::Ring<Numbers::weight_stages>& ring) const {
    const auto* from = static_cast<const unsigned char*>(p.packed) +
                       (static_cast<int64>(item.channel_tile) * Numbers::chunks + chunk) * groups *
                           Numbers::weight_stage_bytes;
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      barrier::wait(&s.weights_empty[ring.stage], ring.round ^ 1u);
      barrier::expect(&s.weights_full[ring.stage], Numbers::weight_stage_bytes);
      barrier::copy(s.weights[ring.stage], from + g * Numbers::weight_stage_bytes,
                    Numbers::weight_stage_bytes, &s.weights_full[ring.stage]);
      ring.next();
    }
  }

  // Copies and weights in the order in which products need them.
  __device__ __forceinline__ void send() const {
    const GemmStaging<C, Tail, Numbers> staging{p, s};
    gemm::Ring<Numbers::raw_slots> raw;
    gemm::Ring<Numbers::weight_stages> weights;
    bool first = true;
    for_each_item([&](const Item& item) {
      if (!item.is_computed()) return;
#pragma unroll 1
      for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
        for (int half = 0; half < Numbers::chunk_channels; half += 8) {
          const int channel = chunk * Numbers::chunk_channels + half;
          if (channel < C::in_channels) staging.send_copies(item, channel, raw);
        }
        if (!Numbers::weights_stay || first) send_weights(item, chunk, weights);
      }
      first = false;
    });
  }

  __device__ __forceinline__ void convert() const {
    const GemmStaging<C, Tail, Numbers> staging{p, s};
    gemm::Ring<Numbers::x_stages> x;
    gemm::Ring<Numbers::raw_slots> raw;
    for_each_item([&](const Item& item) {
      if (item.is_computed()) staging.convert_tile(item, x, raw);
    });
  }

  template <bool in_vectors>
  __device__ __forceinline__ void produce() const {
    const GemmStaging<C, Tail, Numbers> staging{p, s};
    gemm::Ring<Numbers::x_stages> x;
    gemm::Ring<Numbers::weight_stages> weights;
    bool first = true;
    for_each_item([&](const Item& item) {
      if (!item.is_computed()) return;
      staging.template tile<in_vectors>(item, x, [&](int chunk) {
        if (!Numbers::weights_stay || first) send_weights(item, chunk, weights);
      });
      first = false;
    });
  }

  __device__ __forceinline__ void run() const {
    start();
    // Together what the launch gives a block of 384 threads: 168 each.
    constexpr bool many_sums = Numbers::columns > 256;
    if (threadIdx.x >= gemm::consumer_threads) {
      if constexpr (many_sums) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
      } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
      }
      constexpr bool vectors_fit = GemmStaging<C, Tail, Numbers>::vectors_fit;
      if (Numbers::copies && copies()) {
        if constexpr (Numbers::copies) {
          if (threadIdx.x < gemm::consumer_threads + gemm::converting_warps * 32) {
            convert();
          } else if (threadIdx.x % 32 == 0) {
            send();
          }
        }
      } else if (vectors_fit && reinterpret_cast<uint64>(p.input) % 16 == 0) {
        produce<vectors_fit>();
      } else {
        produce<false>();
      }
    } else {
      if constexpr (many_sums) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
      } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
      }
      GemmMainloop<C, Tail, Numbers> mainloop{s, {}, {}};
      const GemmEpilogue<C, Tail, Numbers> epilogue{p, s};
      float d[Numbers::columns / 2];
      for_each_item([&](const Item& item) {
        if (item.is_computed()) mainloop.run(d);
        epilogue.run(item, d);
      });
    }
  }
};

}  // namespace onepass
