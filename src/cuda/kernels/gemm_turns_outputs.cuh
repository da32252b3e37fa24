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
  // element e, or in pairs of f16, number 2 * j + h: the first in registers, those after them in shared
  // memory and the last ones in memory, where a thread has places of its own, read when the next tile's are
  // written. They stay in L2.
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
  static __device__ __forceinline__ void pack(const float (&d)[sums], const float (&deviation)[2],
                                              Words& to) {
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
    if constexpr (Numbers::by_rows) {
      uint32 piece[piece_pairs * pair_words];
      make_piece<0>(0, n, held, far, norm, piece);
      put_rows_from<0>(n, held, far, norm, piece);
    } else {
      finish_from<0>(n, held, far, norm);
    }
  }
  template <int run>
  __device__ __forceinline__ void finish_from(int64 n, const Held& held, const Far& far,
                                              const Norm& norm) const {
    if constexpr (run < runs) {
      put_block<run>(n, held, far, norm);
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

  // The thread's pairs of a piece, done.
  template <int run>
  __device__ __forceinline__ void make_piece(int h, int64 n, const Held& held, const Far& far,
                                             const Norm& norm,
                                             uint32 (&to)[pairs_of(run) * pair_words]) const {
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
      if constexpr (Output::bytes == 2) {
        to[k] = Output::pack(two[0], two[1]);
      } else {
        to[2 * k] = __float_as_uint(two[0]);
        to[2 * k + 1] = __float_as_uint(two[1]);
      }
    }
  }
  // To where the row of its channel is staged.
  template <int count>
  __device__ __forceinline__ void stage_piece(const uint32 (&piece)[count], uint32* to) const {
#pragma unroll
    for (int i = 0; i < count; ++i)
      to[(4 * (i / pair_words) + lane % 4) * pair_words + i % pair_words] = piece[i];
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
      uint32 piece[pairs_of(run) * pair_words];
      make_piece<run>(h, n, held, far, norm, piece);
      __syncwarp();
      stage_piece(piece, stage + lane / 4 * pitch);
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
  // Pieces from this one on, which has been made: the next one is made while this one is read back.
  template <int number>
  __device__ __forceinline__ void put_rows_from(int64 n, const Held& held, const Far& far, const Norm& norm,
                                                uint32 (&piece)[piece_pairs * pair_words]) const {
    constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
    static_assert((row_bytes / 4 - row_pitch) % 4 == 0 && columns % Numbers::pitch == 0);
    if constexpr (number < 2 * runs) {
      constexpr int h = number % 2;
      const int first_row = warp % 4 * 16 + 8 * h;
      const int2 row = s.rows[group * runs + number / 2];
      unsigned char* const to = static_cast<unsigned char*>(p.output) + n * (C::stride(0) * Output::bytes) +
                                row.x * Output::bytes + first_row * row_bytes;
      // In words modulo four, of the first channel.
      const uint32 shift = static_cast<uint32>(reinterpret_cast<uint64>(to)) / 4 % 4;
      uint32* const stage = s.values[warp] + shift;
      __syncwarp();
      stage_piece(piece, stage + lane / 4 * row_pitch);
      __syncwarp();
      int words = row.y * pair_words;
      if (Output::bytes == 2 && reinterpret_cast<uint64>(p.output) % 4 != 0) {
        put_elements(n, first_row, row, stage);
        words = 0;
      }
      const Leaving leaving(*this, stage, shift, words);
      if constexpr (number + 1 < 2 * runs)
        make_piece<(number + 1) / 2>((number + 1) % 2, n, held, far, norm, piece);
      leaving.store(*this, to, words, rows % 64 == 0 ? 8 : rows - first_row);
      put_rows_from<number + 1>(n, held, far, norm, piece);
    }
  }
  // What a lane stores of eight channels' rows: 16 bytes that are theirs alone, and first and last words. It
  // loads what it does not store, too.
  struct Leaving {
    static constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
    static constexpr int count = (row_vectors + row_lanes - 1) / row_lanes;  // of vectors in a row
    static constexpr int times = 8 / rows_at_once;
    float4 vector[count][times];
    uint32 end[2];
    uint32 shift;

    // Words of its row before a vector, or before the first word, of which is the 16 bytes' first.
    __device__ __forceinline__ int before(int row) const {
      return static_cast<int>((shift + static_cast<uint32>(row * row_pitch)) % 4);
    }
    // Where those of the next rows lie as those of the first, this is known.
    __device__ __forceinline__ int word(const GemmTurnsOutputs& of, int u, int i) const {
      constexpr bool alike = rows_at_once * row_pitch % 4 == 0;
      const int row = of.lane / row_lanes + (alike ? 0 : i * rows_at_once);
      return 4 * (of.lane % row_lanes + u * row_lanes) - before(row);
    }
    __device__ __forceinline__ int end_word(const GemmTurnsOutputs& of, int k, int words) const {
      const int first = before(of.lane / 4);
      return of.lane % 4 - first + (k > 0 ? (first + words) & ~3 : 0);
    }

    __device__ __forceinline__ Leaving(const GemmTurnsOutputs& of, const uint32* stage, uint32 of_first,
                                       int words)
        : shift(of_first) {
#pragma unroll
      for (int u = 0; u < count; ++u) {
#pragma unroll
        for (int i = 0; i < times; ++i)
          vector[u][i] = *reinterpret_cast<const float4*>(stage + of.lane / row_lanes * row_pitch +
                                                          word(of, u, i) + i * rows_at_once * row_pitch);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) end[k] = stage[of.lane / 4 * row_pitch + end_word(of, k, words)];
    }
    __device__ __forceinline__ void store(const GemmTurnsOutputs& of, unsigned char* to, int words,
                                          int has_rows) const {
      const int r = of.lane / row_lanes;
#pragma unroll
      for (int u = 0; u < count; ++u) {
#pragma unroll
        for (int i = 0; i < times; ++i) {
          const int at = word(of, u, i);
          if (at >= 0 && at + 4 <= words && (rows % 64 == 0 || r + i * rows_at_once < has_rows))
            __stcs(reinterpret_cast<float4*>(to + (r * row_bytes + at * 4) + i * rows_at_once * row_bytes),
                   vector[u][i]);
        }
      }
      const int row = of.lane / 4;
      const int first = before(row);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = end_word(of, k, words);
        const bool has = k == 0 ? first > 0 && at >= 0 : at >= (first > 0 ? 4 - first : 0);
        if (has && at < words && (rows % 64 == 0 || row < has_rows))
          __stcs(reinterpret_cast<uint32*>(to + row * row_bytes + at * 4), end[k]);
      }
    }
  };
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
