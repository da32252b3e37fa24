// gemm_turns.cuh: values that wait for their norm, and what becomes of them then.
#pragma once

#include "gemm_turns_shared.cuh"

namespace onepass {

// What a warpgroup holds of a tile, and stores when the moments of the other tiles have come.
template <class C, class Tail, class Numbers>
struct GemmTurnsOutputs {
  using Parameters = GemmTurnsParameters<Tail::parameters>;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Output = typename Tail::Output;
  using After = typename Tail::After;
  static constexpr int consumers = 128 * Numbers::groups;
  static constexpr int columns = Numbers::columns;
  static constexpr int sums = columns / 2;
  static constexpr int pairs = columns / 8;  // of columns, in each row of a thread
  static constexpr int group_rows = GemmSlabs<C, Tail, Numbers>::group_rows;
  static constexpr int rows = GemmGeometry<C, Numbers>::rows;
  static constexpr int pair_words = Output::bytes / 2;  // of two neighbours in the output

  const Parameters& p;
  Shared& s;
  const int thread;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int group = warp / 4;

  // Values leave by pieces, eight channels of a row of the box, or of 64 columns.
  static constexpr int piece_pairs = Numbers::by_rows ? Numbers::pitch / 8 : 8;
  static constexpr int runs = (pairs + piece_pairs - 1) / piece_pairs;  // of columns
  static constexpr __device__ int pairs_of(int run) {
    return pairs - run * piece_pairs < piece_pairs ? pairs - run * piece_pairs : piece_pairs;
  }

  // Values that wait for the moments of other tiles, as f32, number 4 * j + 2 * h + e of pair j, row h and
  // element e, or in pairs of f16, number 2 * j + h: the first in registers, those after them in shared memory
  // and the last ones in memory, where a thread has places of its own, read when the next tile's are written.
  // They stay in L2.
  static constexpr bool halves = Numbers::halves;
  static constexpr int words = halves ? sums / 2 : sums;
  static constexpr int shared_words = Numbers::waiting_words;
  static constexpr int far_vectors = Numbers::far_words / 4;
  static constexpr int own = words - shared_words - 4 * far_vectors;
  static constexpr int first_far = words - 4 * far_vectors;
  static_assert(Numbers::far_words % 4 == 0 && own >= 0);
  struct Words {
    uint32 value[words];
  };
  struct Held {
    uint32 value[own > 0 ? own : 1];
  };
  struct Far {
    uint4 value[far_vectors > 0 ? far_vectors : 1];
  };

  __device__ __forceinline__ int row(int h) const { return warp % 4 * 16 + lane / 4 + 8 * h; }

  // Values as they wait. Those that become f16 are distances in deviations.
  static __device__ __forceinline__ void pack(const float (&d)[sums], const float (&deviation)[2], Words& to) {
    if constexpr (halves) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float per = pointwise::reciprocal_fast(deviation[h]);
#pragma unroll
        for (int j = 0; j < pairs; ++j)
          to.value[2 * j + h] = f16::pack(d[4 * j + 2 * h] * per, d[4 * j + 2 * h + 1] * per);
      }
    } else {
#pragma unroll
      for (int i = 0; i < sums; ++i) to.value[i] = __float_as_uint(d[i]);
    }
  }

  static constexpr uint64 stays = 0x14f0000000000000;  // createpolicy.fractional.L2::evict_last of all
  __device__ __forceinline__ uint4* place() const {
    return reinterpret_cast<uint4*>(p.values) + static_cast<int64>(blockIdx.x) * (far_vectors * consumers) +
           thread;
  }
  static __device__ __forceinline__ void fetch(const uint4* from, uint4& to) {
    asm volatile("ld.global.cg.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(from), "l"(stays)
                 : "memory");
  }
  __device__ __forceinline__ void fetch(Far& far) const {
    const uint4* const from = place();
#pragma unroll
    for (int v = 0; v < far_vectors; ++v) fetch(from + v * consumers, far.value[v]);
  }
  // Fetches what waits far away and leaves the next tile's values there. Of the first tile it fetches
  // nothing of use.
  __device__ __forceinline__ void exchange(const Words& next, Far& far) const {
    uint4* const at = place();
#pragma unroll
    for (int v = 0; v < far_vectors; ++v) {
      fetch(at + v * consumers, far.value[v]);
      const uint32* const from = next.value + first_far + 4 * v;
      asm volatile("st.global.cg.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at + v * consumers),
                   "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "l"(stays)
                   : "memory");
    }
  }
  // Those held before have been stored.
  __device__ __forceinline__ void hold(const Words& next, Held& held) const {
#pragma unroll
    for (int i = 0; i < first_far; ++i) {
      if (i < own) {
        held.value[i] = next.value[i];
      } else {
        s.waiting[i - own][thread] = next.value[i];
      }
    }
  }
  __device__ __forceinline__ uint32 word(int i, const Held& held, const Far& far) const {
    if (i < own) return held.value[i];
    if (i < first_far) return s.waiting[i - own][thread];
    const uint4& four = far.value[(i - first_far) / 4];
    const int k = (i - first_far) % 4;
    return k == 0 ? four.x : k == 1 ? four.y : k == 2 ? four.z : four.w;
  }
  // Of a piece, as they waited.
  static constexpr int pair_held = halves ? 1 : 2;  // words
  static __device__ __forceinline__ void unpack(const uint32* from, float& low, float& high) {
    if constexpr (halves) {
      f16::unpack(from[0], low, high);
    } else {
      low = __uint_as_float(from[0]);
      high = __uint_as_float(from[1]);
    }
  }

  // What the thread's rows are multiplied by and what is added then.
  struct Norm {
    float scale[2];
    float shift[2];
  };
  __device__ __forceinline__ void finish(uint32 tile, int64 n, const Held& held, const Far& far) const {
    const Norm norm = this->norm(tile);
    finish_from<0>(n, held, far, norm);
  }
  template <int run>
  __device__ __forceinline__ void finish_from(int64 n, const Held& held, const Far& far,
                                              const Norm& norm) const {
    if constexpr (run < runs) {
      if constexpr (Numbers::by_rows) {
        put_row<run>(n, held, far, norm);
      } else {
        put_block<run>(n, held, far, norm);
      }
      finish_from<run + 1>(n, held, far, norm);
    }
  }

  __device__ __forceinline__ Norm norm(uint32 tile) const {
    barrier::wait(&s.statistics_full[tile & 1u], tile >> 1 & 1u);
    Norm norm;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = row(h) < rows ? row(h) : 0;
      const float2 all = s.statistics[tile & 1u][channel / group_rows];
      const float2 held = s.held[tile & 1u][group][channel / group_rows];
      const float4 affine = s.channels[channel];
      const float scale = affine.y * all.y;
      norm.scale[h] = halves ? scale * held.y : scale;
      norm.shift[h] = fmaf(held.x - all.x, scale, affine.z);
    }
    return norm;
  }

  // The thread's pairs of a piece, done, to where the row of its channel is staged.
  template <int run>
  __device__ __forceinline__ void stage_piece(int h, int64 n, const Held& held, const Far& far,
                                              const Norm& norm, uint32* to) const {
    constexpr int count = pairs_of(run);
    ChannelValues<After, 1> channel;
    channel.load(p, n, row(h) < rows ? row(h) : 0);
    // All of them before the first is stored: the compiler does not know that they lie elsewhere.
    uint32 waited[count * pair_held];
#pragma unroll
    for (int i = 0; i < count * pair_held; ++i) {
      const int j = run * piece_pairs + i / pair_held;
      waited[i] = word((2 * j + h) * pair_held + i % pair_held, held, far);
    }
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float two[2];
      unpack(waited + k * pair_held, two[0], two[1]);
#pragma unroll
      for (float& value : two) {
        typename After::template Tensors<1> tensors;
        value = After::value(fmaf(value, norm.scale[h], norm.shift[h]), channel.value[0], tensors, 0);
      }
      uint32* const pair = to + (4 * k + lane % 4) * pair_words;
      if constexpr (Output::bytes == 2) {
        *pair = Output::pack(two[0], two[1]);
      } else {
        pair[0] = __float_as_uint(two[0]);
        pair[1] = __float_as_uint(two[1]);
      }
    }
  }

  // Two neighbouring columns lie side by side in the output, or neither has an output.
  static constexpr bool pairs_fit = Numbers::box_x % 2 == 0 && Numbers::pitch % 2 == 0 &&
                                    C::output_size(2) % 2 == 0 && C::stride(0) % 2 == 0 &&
                                    C::stride(1) % 2 == 0 && C::stride(2) % 2 == 0 && C::stride(3) % 2 == 0;

  // Two neighbours.
  static __device__ __forceinline__ void put(unsigned char* begin, int2 offsets, const uint32* word,
                                             bool in_pairs) {
    if constexpr (Output::bytes == 2) {
      auto* const to = reinterpret_cast<uint16*>(begin);
      if (in_pairs) {
        if (offsets.x >= 0) __stcs(reinterpret_cast<uint32*>(to + offsets.x), *word);
      } else {
        if (offsets.x >= 0) to[offsets.x] = static_cast<uint16>(*word);
        if (offsets.y >= 0) to[offsets.y] = static_cast<uint16>(*word >> 16);
      }
    } else {
      auto* const to = reinterpret_cast<uint32*>(begin);
      if (offsets.x >= 0) __stcs(to + offsets.x, word[0]);
      if (offsets.y >= 0) __stcs(to + offsets.y, word[1]);
    }
  }

  // The held values leave eight channels of 64 columns at a time through shared memory, so that a warp writes
  // whole lines.
  template <int run>
  __device__ __forceinline__ void put_block(int64 n, const Held& held, const Far& far,
                                            const Norm& norm) const {
    constexpr int pitch = Shared::block_pitch;
    constexpr int64 row_bytes = C::stride(1) * Output::bytes;
    uint32* const stage = s.values[warp];
    const int first_row = warp % 4 * 16;
    constexpr int first = run * piece_pairs * 8;
    const bool has = first + 2 * lane < columns;
    const int2 offsets =
        *reinterpret_cast<const int2*>(s.offsets() + group * columns + first + (has ? 2 * lane : 0));
    const bool in_pairs = pairs_fit && reinterpret_cast<uint64>(p.output) % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      __syncwarp();
      stage_piece<run>(h, n, held, far, norm, stage + lane / 4 * pitch);
      __syncwarp();
      unsigned char* to = static_cast<unsigned char*>(p.output) + n * C::stride(0) * Output::bytes +
                          (first_row + 8 * h) * row_bytes;
#pragma unroll 2
      for (int r = 0; r < 8; ++r) {
        if (rows % 64 != 0 && first_row + 8 * h + r >= rows) break;
        if (has) put(to, offsets, stage + r * pitch + lane * pair_words, in_pairs);
        to += row_bytes;
      }
    }
  }

  // The same of a row of the box. A channel's part of it is staged as it lies in memory, modulo 16 bytes, so
  // that it leaves by 16 bytes but for its first and last words.
  static_assert(!Numbers::by_rows || pairs_fit);
  static constexpr int row_pitch = Shared::row_pitch;  // words
  static constexpr int row_vectors = (Numbers::box_x * Output::bytes / 4 + 3 + 3) / 4;
  // Lanes that store a row together.
  static constexpr int row_lanes = row_vectors <= 8 ? 8 : row_vectors <= 16 ? 16 : 32;
  static constexpr int rows_at_once = 32 / row_lanes;
  template <int run>
  __device__ __forceinline__ void put_row(int64 n, const Held& held, const Far& far,
                                          const Norm& norm) const {
    constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
    static_assert((row_bytes / 4 - row_pitch) % 4 == 0);
    const int first_row = warp % 4 * 16;
    const int2 row = s.rows[group * (columns / Numbers::pitch) + run];
    const int words = row.y * pair_words;
    unsigned char* const begin = static_cast<unsigned char*>(p.output) +
                                 n * (C::stride(0) * Output::bytes) + row.x * Output::bytes +
                                 first_row * row_bytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned char* const to = begin + 8 * h * row_bytes;
      // In words modulo four, of the first channel.
      const uint32 shift = static_cast<uint32>(reinterpret_cast<uint64>(to)) / 4 % 4;
      uint32* const stage = s.values[warp] + shift;
      __syncwarp();
      stage_piece<run>(h, n, held, far, norm, stage + lane / 4 * row_pitch);
      __syncwarp();
      if (Output::bytes == 2 && reinterpret_cast<uint64>(p.output) % 4 != 0) {
        put_elements(n, first_row + 8 * h, row, stage);
        continue;
      }
      const int has_rows = rows % 64 == 0 ? 8 : rows - first_row - 8 * h;
      put_vectors(to, stage, shift, words, has_rows);
      put_ends(to, stage, shift, words, has_rows);
    }
  }
  // Those 16 bytes of eight channels' rows that are theirs alone.
  __device__ __forceinline__ void put_vectors(unsigned char* to, const uint32* stage, uint32 shift, int words,
                                              int has_rows) const {
    constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
    // Whether those of the next rows lie as those of the first.
    constexpr bool alike = rows_at_once * row_pitch % 4 == 0;
#pragma unroll
    for (int u = 0; u < (row_vectors + row_lanes - 1) / row_lanes; ++u) {
      int r = lane / row_lanes;
      int word = 0;
      bool has = false;
#pragma unroll
      for (int first = 0; first < 8; first += rows_at_once) {
        if (first == 0 || !alike) {
          word = 4 * (lane % row_lanes + u * row_lanes) -
                 static_cast<int>((shift + static_cast<uint32>((r + first) * row_pitch)) % 4);
          has = word >= 0 && word + 4 <= words;
        }
        if (has && (rows % 64 == 0 || r + first < has_rows)) {
          const float4 vector =
              *reinterpret_cast<const float4*>(stage + r * row_pitch + word + first * row_pitch);
          __stcs(reinterpret_cast<float4*>(to + (r * row_bytes + word * 4) + first * row_bytes), vector);
        }
      }
    }
  }
  // Their first and last words.
  __device__ __forceinline__ void put_ends(unsigned char* to, const uint32* stage, uint32 shift, int words,
                                           int has_rows) const {
    constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
    const int r = lane / 4;
    const int before = static_cast<int>((shift + static_cast<uint32>(r * row_pitch)) % 4);
    const int first = lane % 4 - before;
    const int last = ((before + words) & ~3) + first;
    stage += r * row_pitch;
    to += r * row_bytes;
    if (rows % 64 == 0 || r < has_rows) {
      if (before > 0 && first >= 0 && first < words)
        __stcs(reinterpret_cast<uint32*>(to + first * 4), stage[first]);
      if (last >= (before > 0 ? 4 - before : 0) && last < words)
        __stcs(reinterpret_cast<uint32*>(to + last * 4), stage[last]);
    }
  }
  // Where the output is not on 4 bytes: eight channels from `first` on.
  __device__ __forceinline__ void put_elements(int64 n, int first, int2 row, const uint32* stage) const {
#pragma unroll 1
    for (int r = 0; r < 8 && first + r < rows; ++r) {
      uint16* const to =
          static_cast<uint16*>(p.output) + n * C::stride(0) + (first + r) * C::stride(1) + row.x;
      const auto* const from = reinterpret_cast<const uint16*>(stage + r * row_pitch);
#pragma unroll 1
      for (int i = lane; i < 2 * row.y; i += 32) to[i] = from[i];
    }
  }
};

}  // namespace onepass
