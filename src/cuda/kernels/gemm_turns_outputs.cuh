// gemm_turns.cuh: values that wait for their norm, and what becomes of them then.
#pragma once

#include "gemm_turns_shared.cuh"

namespace onepass {

// What a warpgroup holds of a tile, as halves, and stores when the moments of the other tiles have come.
template <class C, class Tail, class Numbers>
struct GemmTurnsOutputs {
  using Parameters = GemmTurnsParameters<Tail::parameters>;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Output = typename Tail::Output;
  using After = typename Tail::After;
  static constexpr int columns = Numbers::columns;
  static constexpr int sums = columns / 2;
  static constexpr int pairs = columns / 8;  // of columns, in each row of a thread
  static constexpr int group_rows = GemmSlabs<C, Tail, Numbers>::group_rows;
  static constexpr int rows = GemmGeometry<C, Numbers>::rows;
  static constexpr int waiting_words = Numbers::waiting_words;  // of a thread's held ones, in shared memory

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / 4;

  // Values that wait for the moments of other tiles: words of pair j and row h, number 2 * j + h. Those that
  // registers have no room for lie in shared memory, the last ones.
  struct Held {
    static constexpr int own = 2 * pairs - waiting_words;  // in registers
    uint32 value[own];
  };

  __device__ __forceinline__ int row(int h) const { return warp % 4 * 16 + lane / 4 + 8 * h; }

  static __device__ __forceinline__ void pack(const float (&d)[sums], const float (&mean)[2],
                                              const float (&deviation)[2], uint32 (&halves)[2 * pairs]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float per = pointwise::reciprocal_fast(deviation[h]);
      const float shift = -mean[h] * per;
#pragma unroll
      for (int j = 0; j < pairs; ++j)
        halves[2 * j + h] =
            f16::pack(fmaf(d[j * 4 + h * 2], per, shift), fmaf(d[j * 4 + h * 2 + 1], per, shift));
    }
  }
  // Those held before have been stored.
  __device__ __forceinline__ void hold(const uint32 (&halves)[2 * pairs], Held& held) const {
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      if (i < Held::own) {
        held.value[i] = halves[i];
      } else {
        s.waiting[i - Held::own][threadIdx.x] = halves[i];
      }
    }
  }

  __device__ __forceinline__ void finish(uint32 tile, int64 n, const Held& held) const {
    const Norm norm = this->norm(tile);
    if constexpr (Numbers::by_rows) {
#pragma unroll
      for (int r = 0; r < columns / Numbers::pitch; ++r) put_row(r, n, held, norm);
    } else {
#pragma unroll
      for (int b = 0; b < blocks; ++b) put_block(b, n, held, norm);
    }
  }

  // What the thread's rows are multiplied by and what is added then.
  struct Norm {
    float scale[2];
    float shift[2];
  };
  __device__ __forceinline__ Norm norm(uint32 tile) const {
    barrier::wait(&s.statistics_full[tile & 1u], tile >> 1 & 1u);
    Norm norm;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = row(h) < rows ? row(h) : 0;
      const float2 own = s.statistics[tile & 1u][channel / group_rows];
      const float2 held = s.held[tile & 1u][group][channel / group_rows];
      const float4 affine = s.channels[channel];
      const float scale = affine.y * own.y;
      norm.scale[h] = scale * held.y;
      norm.shift[h] = fmaf(held.x - own.x, scale, affine.z);
    }
    return norm;
  }

  __device__ __forceinline__ uint32 held_word(const Held& held, int i) const {
    return i < Held::own ? held.value[i] : s.waiting[i - Held::own][threadIdx.x];
  }

  // A pair of columns of the thread's row h, done.
  static __device__ __forceinline__ void finished(uint32 word, const Norm& norm,
                                                  const ChannelValues<After, 1>& values, int h,
                                                  float (&two)[2]) {
    f16::unpack(word, two[0], two[1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      typename After::template Tensors<1> tensors;
      two[e] = After::value(fmaf(two[e], norm.scale[h], norm.shift[h]), values.value[0], tensors, 0);
    }
  }

  // Two neighbouring columns lie side by side in the output, or neither has an output.
  static constexpr bool pairs_fit = Numbers::box_x % 2 == 0 && Numbers::pitch % 2 == 0 &&
                                    C::output_size(2) % 2 == 0 && C::stride(0) % 2 == 0 &&
                                    C::stride(1) % 2 == 0 && C::stride(2) % 2 == 0 && C::stride(3) % 2 == 0;

  // Two neighbours.
  static __device__ __forceinline__ void put(unsigned char* begin, int2 offsets, uint32 word, bool in_pairs) {
    auto* const to = reinterpret_cast<uint16*>(begin);
    if (in_pairs) {
      if (offsets.x >= 0) __stcs(reinterpret_cast<uint32*>(to + offsets.x), word);
    } else {
      if (offsets.x >= 0) to[offsets.x] = static_cast<uint16>(word);
      if (offsets.y >= 0) to[offsets.y] = static_cast<uint16>(word >> 16);
    }
  }

  // The held values leave eight channels of 64 columns at a time through shared memory, so that a warp writes
  // whole lines.
  static constexpr int block_pairs = 8;
  static constexpr int blocks = (pairs + block_pairs - 1) / block_pairs;

  __device__ __forceinline__ void put_block(int block, int64 n, const Held& held, const Norm& norm) const {
    constexpr int pitch = Shared::block_pitch;
    constexpr int64 row_bytes = C::stride(1) * Output::bytes;
    uint32* const stage = s.values[warp];
    const int first_row = warp % 4 * 16;
    const int first = block * block_pairs;
    const bool has = first * 8 + 2 * lane < columns;
    const int2 offsets =
        *reinterpret_cast<const int2*>(s.offsets() + group * columns + first * 8 + (has ? 2 * lane : 0));
    const bool in_pairs = pairs_fit && reinterpret_cast<uint64>(p.output) % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ChannelValues<After, 1> values;
      values.load(p, n, row(h) < rows ? row(h) : 0);
      __syncwarp();
#pragma unroll
      for (int k = 0; k < block_pairs; ++k) {
        if (first + k >= pairs) break;
        float two[2];
        finished(held_word(held, 2 * (first + k) + h), norm, values, h, two);
        stage[lane / 4 * pitch + 4 * k + lane % 4] = Output::pack(two[0], two[1]);
      }
      __syncwarp();
      unsigned char* to = static_cast<unsigned char*>(p.output) + n * C::stride(0) * Output::bytes +
                          (first_row + 8 * h) * row_bytes;
#pragma unroll 2
      for (int r = 0; r < 8; ++r) {
        if (rows % 64 != 0 && first_row + 8 * h + r >= rows) break;
        if (has) put(to, offsets, stage[r * pitch + lane], in_pairs);
        to += row_bytes;
      }
    }
  }

  // The same of a row of the box, two neighbours at a time, by whole sectors of memory but for the row's
  // first and last: parts of sectors cost more.
  static_assert(!Numbers::by_rows || pairs_fit);
  __device__ __forceinline__ void put_row(int box_row, int64 n, const Held& held, const Norm& norm) const {
    constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
    uint32* const stage = s.values[warp];
    const int first_row = warp % 4 * 16;
    const int2 row = s.rows[group * (columns / Numbers::pitch) + box_row];
    const int bytes = row.y * 4;
    // Of the sample: a sector's begin, and offsets from there.
    const uint64 sample =
        reinterpret_cast<uint64>(p.output) + static_cast<uint64>(n) * (C::stride(0) * Output::bytes);
    unsigned char* const sector = reinterpret_cast<unsigned char*>(sample & ~uint64{31});
    const uint32 begin = (static_cast<uint32>(sample) & 31u) + static_cast<uint32>(row.x * Output::bytes) +
                         static_cast<uint32>(first_row * row_bytes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ChannelValues<After, 1> values;
      values.load(p, n, this->row(h) < rows ? this->row(h) : 0);
      __syncwarp();
      // All words before the first is stored: the compiler does not know that they lie elsewhere.
      uint32 words[Numbers::pitch / 8];
#pragma unroll
      for (int k = 0; k < Numbers::pitch / 8; ++k)
        words[k] = held_word(held, 2 * (box_row * (Numbers::pitch / 8) + k) + h);
#pragma unroll
      for (int k = 0; k < Numbers::pitch / 8; ++k) {
        float two[2];
        finished(words[k], norm, values, h, two);
        stage[lane / 4 * Shared::row_pitch + 4 * k + lane % 4] = Output::pack(two[0], two[1]);
      }
      __syncwarp();
      if (reinterpret_cast<uint64>(p.output) % 4 != 0) {
        put_elements(n, first_row + 8 * h, row, stage);
        continue;
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (rows % 64 != 0 && first_row + 8 * h + r >= rows) break;
        const uint32 to = begin + static_cast<uint32>((8 * h + r) * row_bytes);
        const uint32 lane_to = (to & ~31u) + static_cast<uint32>(lane * 4);
        const uint32 u = lane_to - to;  // negative before the row
        const uint32 from = barrier::shared_address(stage + r * Shared::row_pitch) + u;
        put_pieces(sector + lane_to, from, u, bytes);
      }
    }
  }
  // Where the output is not on 4 bytes: eight channels from `first` on.
  __device__ __forceinline__ void put_elements(int64 n, int first, int2 row, const uint32* stage) const {
#pragma unroll 1
    for (int r = 0; r < 8 && first + r < rows; ++r) {
      uint16* const to =
          static_cast<uint16*>(p.output) + n * C::stride(0) + (first + r) * C::stride(1) + row.x;
      const auto* const from = reinterpret_cast<const uint16*>(stage + r * Shared::row_pitch);
#pragma unroll 1
      for (int i = lane; i < 2 * row.y; i += 32) to[i] = from[i];
    }
  }
  // A word of each 128 bytes of a row, if it has one there: `u` bytes from its begin, of `bytes`. Loaded it
  // is from wherever it would be.
  static __device__ __forceinline__ void put_pieces(unsigned char* to, uint32 from, uint32 u, int bytes) {
    asm volatile(
        "{\n.reg .pred has;\n.reg .b32 word;\nsetp.lt.u32 has, %0, %1;\n"
        "ld.shared.b32 word, [%2];\n@has st.global.cs.b32 [%3], word;\n}" ::"r"(u),
        "r"(bytes), "r"(from), "l"(to)
        : "memory");
    put_pieces_from<128>(to, from, u, bytes);
  }
  template <int first>
  static __device__ __forceinline__ void put_pieces_from(unsigned char* to, uint32 from, uint32 u,
                                                         int bytes) {
    if constexpr (first < Numbers::box_x * Output::bytes + 28) {
      asm volatile(
          "{\n.reg .pred has;\n.reg .b32 word;\nsetp.lt.s32 has, %0, %1;\n"
          "ld.shared.b32 word, [%2 + %4];\n@has st.global.cs.b32 [%3 + %4], word;\n}" ::"r"(u),
          "r"(bytes - first), "r"(from), "l"(to), "n"(first)
          : "memory");
      put_pieces_from<first + 128>(to, from, u, bytes);
    }
  }
};

}  // namespace onepass
