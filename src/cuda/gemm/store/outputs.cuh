// Stores a tile's values, for gemm/wgmma.cuh: through shared memory, so that warps write whole lines. 16-bit
// values may be stored during the next tile's mainloop.
#pragma once

#include "gemm/store/consumer.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmOutputs {
  const GemmConsumer<C, Tail, Numbers> thread;

  using Geometry = GemmGeometry<C, Numbers>;
  using Shared = GemmShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Output = typename Tail::Output;
  static constexpr int pairs = Numbers::columns / 8;  // of columns, in each row of a thread

  // Four neighbouring columns lie side by side in the output, at offsets that are multiples of four.
  static constexpr bool vectors_fit =
      Geometry::contiguous && Tail::spatial % 4 == 0 && C::stride(1) % 4 == 0 && C::stride(0) % 4 == 0;
  static constexpr bool channels_last = C::stride(1) == 1 && C::stride(4) != 1;

  // Stores the tile's values, eight rows by 32 columns at a time. `again`: they are read again soon.
  template <class Type, bool again>
  __device__ __forceinline__ void store(void* to, const Item& item, const GemmSums<Numbers>& d) const {
    if constexpr (Type::bytes == 2 && vectors_fit) {
      store_halves<Type>(to, item, d);
      return;
    }
    float(&stage)[8][Shared::value_pitch] = thread.s.stage(thread.warp);
    int in_vectors = vectors_fit && reinterpret_cast<uint64>(to) % (4 * Type::bytes) == 0;
    const int first_row = thread.first_row(item);
    const int first_position = thread.first_position(item);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_row + 8 * h;
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(channel);
#pragma unroll
      for (int j = 0; j < pairs; j += 4) {
        constexpr int all = 32;
        const int columns = (pairs - j) * 8 < all ? (pairs - j) * 8 : all;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < columns / 8; ++k) {
          *reinterpret_cast<float2*>(&stage[thread.lane / 4][8 * k + 2 * (thread.lane % 4)]) =
              float2{d[(j + k) * 4 + h * 2], d[(j + k) * 4 + h * 2 + 1]};
        }
        __syncwarp();
        // Tested at each step: two loops would keep the values of both in registers.
        asm volatile("" : "+r"(in_vectors));
        if (vectors_fit && in_vectors) {
          const int column = thread.lane % 8 * 4;
          const int position = first_position + j * 8 + column;
          const bool has = position < Geometry::positions && column < columns;
#pragma unroll
          for (int r = thread.lane / 8; r < 8; r += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&stage[r][column]);
            if (has && thread.exists(channel + r)) {
              const float value[4] = {four.x, four.y, four.z, four.w};
              Packed<Type, 4> packed;
              packed.pack(value);
              put<Type, again>(to, begin + r * C::stride(1) + position, packed);
            }
          }
        } else {
          store_ones<Type>(to, channel, begin, first_position, j);
        }
      }
    }
  }
  // --- Stores deferred to the next tile's mainloop ---
  // A warp has all columns of its 16 rows. At the end of a tile of 16-bit values, the first vectors of each
  // row stay in shared memory, as many as fit, and the others in registers. They are stored 32 at a time
  // during the next mainloop; those in registers pass through shared memory when it is free.
  static constexpr int late_vectors = Numbers::late_vectors;
  static constexpr int kept_vectors = late_vectors > 0 ? pairs - late_vectors : 0;
  static constexpr int late_steps = late_vectors / 2;  // 16 rows by 32 lanes
  static constexpr int all_steps = late_steps + (kept_vectors + 1) / 2;
  static_assert(late_vectors % 2 == 0 && kept_vectors <= late_vectors);

  struct Deferred {
    unsigned char* to = nullptr;  // address of the first row
    int bytes = 0;                // of a row with outputs
    int rows = 0;                 // that exist
    int step = all_steps;
    uint32 kept[2 * kept_vectors + 1];
  };

  __device__ __forceinline__ bool stores_late() const {
    return late_vectors > 0 && reinterpret_cast<uint64>(thread.p.output) % 16 == 0;
  }

  // By a warp: step `i` of storing `vectors` of each row.
  template <int vectors>
  __device__ __forceinline__ void store_vectors(const Deferred& deferred, int i) const {
    const int v = i * 32 + thread.lane;
    const int r = v / vectors;
    const int column = (v - r * vectors) * 16;
    if (r < deferred.rows && column < deferred.bytes && (vectors % 2 == 0 || r < 16)) {
      const uint4 vector =
          *reinterpret_cast<const uint4*>(thread.s.values[thread.warp] + r * Numbers::late_pitch + column);
      __stcs(reinterpret_cast<uint4*>(deferred.to + r * (C::stride(1) * Output::bytes) + column), vector);
    }
  }
  // By a warp: the next step.
  __device__ __forceinline__ void store_some(Deferred& deferred) const {
    if (deferred.step >= all_steps) return;
    if (deferred.step < late_steps) {
      store_vectors<late_vectors>(deferred, deferred.step);
    } else if constexpr (kept_vectors > 0) {
      if (deferred.step == late_steps) {
        __syncwarp();
        stage_words<kept_vectors>([&](int j, int h) { return deferred.kept[2 * j + h]; });
        deferred.to += late_vectors * 16;
        deferred.bytes -= late_vectors * 16;
      }
      store_vectors<kept_vectors>(deferred, deferred.step - late_steps);
    }
    ++deferred.step;
  }
  // By a warp: all steps that are left. Shared memory is free afterwards.
  __device__ __forceinline__ void store_rest(Deferred& deferred) const {
#pragma unroll 1
    while (deferred.step < all_steps) store_some(deferred);
    __syncwarp();
  }

  // Stages `vectors` of the warp's rows. `word(j, h)`: two neighbours of vector j in the thread's row h.
  template <int vectors, class Word>
  __device__ __forceinline__ void stage_words(Word&& word) const {
    // Rows begin in different banks if they have an odd number of vectors. If only half that number is odd,
    // the last four rows swap pairs of vectors.
    constexpr int row_vectors = Numbers::late_pitch / 16;
    constexpr bool in_turn = row_vectors % 2 == 0;
    static_assert(row_vectors % 4 != 0);
    const int late = in_turn ? thread.lane / 16 : 0;
    unsigned char* const own =
        thread.s.values[thread.warp] + thread.lane / 4 * Numbers::late_pitch + thread.lane % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < vectors; j += in_turn ? 2 : 1) {
        unsigned char* const place = own + h * 8 * Numbers::late_pitch + j * 16;
        const uint32 first = word(j, h);
        if (in_turn && j + 1 < vectors) {
          const uint32 second = word(j + 1, h);
          *reinterpret_cast<uint32*>(place + late * 16) = late ? second : first;
          *reinterpret_cast<uint32*>(place + 16 - late * 16) = late ? first : second;
        } else {
          *reinterpret_cast<uint32*>(place) = first;
        }
      }
    }
    __syncwarp();
  }

  // Keeps the tile's values to be stored later.
  __device__ __forceinline__ void defer(const Item& item, const GemmSums<Numbers>& d,
                                        Deferred& deferred) const {
    const int first_row = thread.first_row(item);
    const int first_position = thread.first_position(item);
    deferred.to = static_cast<unsigned char*>(thread.p.output) +
                  (output_origin<C>(item.n) + first_row * C::stride(1) + first_position) * Output::bytes;
    deferred.bytes = (Geometry::positions - first_position) * Output::bytes;
    deferred.rows = Geometry::rows - first_row;
    deferred.step = 0;
    const auto word = [&](int j, int h) { return Output::pack(d[j * 4 + h * 2], d[j * 4 + h * 2 + 1]); };
    stage_words<late_vectors>(word);
#pragma unroll
    for (int j = 0; j < kept_vectors; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) deferred.kept[2 * j + h] = word(late_vectors + j, h);
    }
  }

  // Stores contiguous 16-bit elements, 64 columns at a time.
  template <class Type>
  __device__ __forceinline__ void store_halves(void* to, const Item& item, const GemmSums<Numbers>& d) const {
    constexpr bool by_eights = Tail::spatial % 8 == 0 && C::stride(1) % 8 == 0 && C::stride(0) % 8 == 0;
    constexpr int width = by_eights ? 8 : 4;  // of a lane's vector
    constexpr int lanes = 64 / width;         // that have a row
    constexpr int pitch = 64 + 8;             // words of eight rows lie in different banks
    static_assert(Shared::value_bytes >= 8 * pitch * 2);
    auto* const stage = reinterpret_cast<uint16*>(thread.s.values[thread.warp]);
    int in_vectors = reinterpret_cast<uint64>(to) % (width * 2) == 0;
    const int first_position = thread.first_position(item);
    const int column = thread.lane % lanes * width;
    const int first_row = thread.first_row(item);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_row + 8 * h;
      const int64 begin = output_origin<C>(item.n) + Geometry::row_offset(channel);
#pragma unroll
      for (int j = 0; j < pairs; j += 8) {
        asm volatile("" : "+r"(in_vectors));
        if (in_vectors) {
          __syncwarp();
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            if (j + k >= pairs) break;
            *reinterpret_cast<uint32*>(stage + thread.lane / 4 * pitch + 8 * k + 2 * (thread.lane % 4)) =
                Type::pack(d[(j + k) * 4 + h * 2], d[(j + k) * 4 + h * 2 + 1]);
          }
          __syncwarp();
          const int position = first_position + j * 8 + column;
          const bool has = position < Geometry::positions && j * 8 + column < Numbers::columns;
#pragma unroll
          for (int r = 0; r < 8; r += 32 / lanes) {
            const int own = r + thread.lane / lanes;
            Packed<Type, width> some;
            some.load(stage + own * pitch, column, true);
            if (has && thread.exists(channel + own))
              some.store(to, begin + own * C::stride(1) + position, true);
          }
        } else {
#pragma unroll
          for (int i = j; i < j + 8; i += 4) {
            if (i >= pairs) break;
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (i + k >= pairs) break;
              *reinterpret_cast<float2*>(
                  &thread.s.stage(thread.warp)[thread.lane / 4][8 * k + 2 * (thread.lane % 4)]) =
                  float2{d[(i + k) * 4 + h * 2], d[(i + k) * 4 + h * 2 + 1]};
            }
            __syncwarp();
            store_ones<Type>(to, channel, begin, first_position, i);
          }
        }
      }
    }
  }
  // Stores staged values one by one. A lane has a column; a row where channels are neighbours; the classes of
  // a column where those are neighbours.
  template <class Type>
  __device__ __forceinline__ void store_ones(void* to, int channel, int64 begin, int first_position,
                                             int j) const {
    const int columns = (pairs - j) * 8 < 32 ? (pairs - j) * 8 : 32;
    constexpr int side_by_side = 8 % C::classes(2) == 0 ? static_cast<int>(C::classes(2)) : 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int of_rows = (i * 32 + thread.lane) % (32 * side_by_side);
      const int column = channels_last ? thread.lane / 8 + 4 * i : of_rows / side_by_side;
      const int r =
          channels_last ? thread.lane % 8 : i / side_by_side * side_by_side + of_rows % side_by_side;
      int offset;
      if constexpr (Geometry::contiguous) {
        offset = first_position + j * 8 + column;
        if (offset >= Geometry::positions) offset = -1;
      } else {
        offset = column < columns ? thread.s.offsets[thread.first_column() + j * 8 + column] : -1;
      }
      const float value = thread.s.stage(thread.warp)[r][column];
      if (offset >= 0 && column < columns && thread.exists(channel + r))
        store_one<Type>(to, first_of(channel, begin, r) + offset, value);
    }
  }
  // Offset of the r-th row after the one that begins at `begin`.
  static __device__ __forceinline__ int64 first_of(int row, int64 begin, int r) {
    if constexpr (Geometry::classes == 1) return begin + r * C::stride(1);
    return begin - Geometry::row_offset(row) + Geometry::row_offset(row + r);
  }
  template <class Type, bool again>
  static __device__ __forceinline__ void put(void* to, int64 index, const Packed<Type, 4>& four) {
    if constexpr (again) {
      __stcg(reinterpret_cast<uint4*>(static_cast<float*>(to) + index),
             uint4{four.word[0], four.word[1], four.word[2], four.word[3]});
    } else {
      four.store(to, index, true);
    }
  }
};

}  // namespace onepass
