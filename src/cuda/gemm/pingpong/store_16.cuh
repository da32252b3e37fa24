// Stores 16-bit outputs of the ping-pong kernel through shared memory, so that a warp writes whole lines.
#pragma once

#include "gemm/pingpong/norm.cuh"

namespace onepass::pingpong {

// Makes outputs from held pairs of f16: the thread's pairs of a piece, in its row h.
template <int run, class L>
__device__ __forceinline__ void make_piece(const HeldTile<L>& tile, int h, int64 n,
                                           const typename Hold<L>::Registers& held, const Affine& affine,
                                           uint32 (&to)[Pieces<L>::pairs_of(run)]) {
  constexpr int count = Pieces<L>::pairs_of(run);
  const auto channel = tile.norm.channel_values(n, h);
  // All words are read before the first output is staged: the compiler cannot prove that they do not alias.
  uint32 words[count];
#pragma unroll
  for (int k = 0; k < count; ++k) words[k] = tile.hold.word(2 * (run * Pieces<L>::pairs + k) + h, held);
  if constexpr (norms_in_f16<L>) {
    if (affine.in_f16) {
#pragma unroll
      for (int k = 0; k < count; ++k) to[k] = f16::multiply_add(words[k], affine.scales[h], affine.shifts[h]);
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < count; ++k) {
    float two[2];
    f16::unpack(words[k], two[0], two[1]);
#pragma unroll
    for (float& value : two) value = Norm<L>::value(value, affine, h, channel);
    to[k] = L::Output::pack(two[0], two[1]);
  }
}

// Any columns: eight channels of 64 columns at a time, by a table of their offsets.
template <class L>
struct StoreColumns16 {
  using Held = typename Hold<L>::Registers;

  const HeldTile<L> tile;

  __device__ __forceinline__ void run(int64 n, const Held& held, const Affine& affine) const {
    put_from<0>(n, held, affine);
  }

 private:
  template <int run>
  __device__ __forceinline__ void put_from(int64 n, const Held& held, const Affine& affine) const {
    if constexpr (run < Pieces<L>::runs) {
      put_block<run>(n, held, affine);
      put_from<run + 1>(n, held, affine);
    }
  }

  template <int run>
  __device__ __forceinline__ void put_block(int64 n, const Held& held, const Affine& affine) const {
    constexpr int pitch = Shared<L>::block_pitch;
    constexpr int64 row_bytes = L::C::stride(1) * L::Output::bytes;
    const int lane = tile.thread.lane;
    uint32* const stage = tile.s.staged[tile.thread.warp];
    const int first_row = tile.thread.first_row();
    constexpr int first = run * Pieces<L>::pairs * 8;
    const bool has = first + 2 * lane < L::columns;
    const int2 offsets = *reinterpret_cast<const int2*>(tile.s.offsets() + tile.thread.group * L::columns +
                                                        first + (has ? 2 * lane : 0));
    const bool in_pairs = pairs_fit<L> && reinterpret_cast<uint64>(tile.p.output) % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32 piece[Pieces<L>::pairs_of(run)];
      make_piece<run>(tile, h, n, held, affine, piece);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < Pieces<L>::pairs_of(run); ++i)
        stage[lane / 4 * pitch + 4 * i + lane % 4] = piece[i];
      __syncwarp();
      unsigned char* to = static_cast<unsigned char*>(tile.p.output) +
                          n * L::C::stride(0) * L::Output::bytes + (first_row + 8 * h) * row_bytes;
#pragma unroll 2
      for (int r = 0; r < 8; ++r) {
        if (!L::has_row(first_row + 8 * h + r)) break;
        if (has) put(to, offsets, stage[r * pitch + lane], in_pairs);
        to += row_bytes;
      }
    }
  }

  // Two neighbouring columns.
  static __device__ __forceinline__ void put(unsigned char* begin, int2 offsets, uint32 word, bool in_pairs) {
    auto* const to = reinterpret_cast<uint16*>(begin);
    if (in_pairs) {
      if (offsets.x >= 0) __stcs(reinterpret_cast<uint32*>(to + offsets.x), word);
    } else {
      if (offsets.x >= 0) to[offsets.x] = static_cast<uint16>(word);
      if (offsets.y >= 0) to[offsets.y] = static_cast<uint16>(word >> 16);
    }
  }
};

// Whole rows of the box. A channel's row is staged with the same alignment modulo 16 bytes as in memory. It
// is stored as 16-byte vectors except for its first and last words. Both pieces of a row have the same
// alignment: the stride of eight channels is a multiple of 16 bytes.
template <class L>
struct StoreRows16 {
  using Held = typename Hold<L>::Registers;
  static constexpr int runs = Pieces<L>::runs;
  static constexpr int piece_pairs = Pieces<L>::pairs;

  const HeldTile<L> tile;

  __device__ __forceinline__ void run(int64 n, const Held& held, const Affine& affine) const {
    uint32 piece[piece_pairs];
    make_piece<0>(tile, 0, n, held, affine, piece);
    put_rows_from<0>(n, held, affine, piece);
  }

 private:
  static_assert(pairs_fit<L> && L::columns % L::Numbers::pitch == 0);
  static constexpr int row_pitch = Shared<L>::row_pitch;  // words
  static constexpr int row_bytes = static_cast<int>(L::C::stride(1) * L::Output::bytes);
  static_assert((row_bytes / 4 - row_pitch) % 4 == 0);
  static constexpr int row_vectors = (L::Numbers::box_x / 2 + 3 + 3) / 4;
  static constexpr __device__ int lanes_of_row() {
    int lanes = row_vectors <= 8 ? 8 : row_vectors <= 16 ? 16 : 32;
    while (32 / lanes * row_pitch % 4 != 0) lanes /= 2;
    return lanes;
  }
  static constexpr __device__ bool is_four_ends(int outputs) { return (outputs / 2 + 1) % 4 < 2; }
  // Lanes that store a row together. The rows of the next step have the same alignment modulo 16 bytes.
  static constexpr int row_lanes = lanes_of_row();
  static constexpr int rows_at_once = 32 / row_lanes;
  static constexpr int lane_vectors = (row_vectors + row_lanes - 1) / row_lanes;  // of a row
  static constexpr int times = 8 / rows_at_once;
  // Whether four lanes suffice for the words outside of a row's vectors, whatever its alignment.
  static constexpr bool four_ends =
      is_four_ends(L::Numbers::box_x) && is_four_ends((L::Geometry::outputs(2) - 1) % L::Numbers::box_x + 1);

  // Lanes beyond a row's vectors load its first words, from the same banks: behind it the next warp may
  // stage.
  static constexpr __device__ int folded_words() {
    int words = 32;
    while (words > rows_at_once * row_pitch) words /= 2;
    return words;
  }
  static constexpr int folded = folded_words();
  static_assert(folded >= 4);

  // Addresses of a lane's words of a row of the box.
  struct Places {
    unsigned char* output;         // of the warp's first channel
    uint32 staged;                 // where the lane stages its words
    uint32 vectors[lane_vectors];  // of its first row, staged
    int vector_bytes;              // distance of the first of them in the output
    uint32 ends;                   // its word outside of vectors
    int end_bytes;
    uint32 ends_again;  // a second one, where four lanes do not suffice
    int end_bytes_again;
    bool is_odd;  // the output is not on 4 bytes: elements are stored one by one
    bool has_vector[lane_vectors];
    bool has_end, has_end_again;

    __device__ __forceinline__ Places(const StoreRows16& of, int64 n, int run) {
      const int2 row = of.tile.s.rows[of.tile.thread.group * runs + run];
      is_odd = reinterpret_cast<uint64>(of.tile.p.output) % 4 != 0;
      const int words = is_odd ? 0 : row.y;
      output = static_cast<unsigned char*>(of.tile.p.output) + n * (L::C::stride(0) * L::Output::bytes) +
               static_cast<int64>(of.tile.thread.first_row() * row_bytes + row.x * L::Output::bytes);
      // Alignment of the first channel, in words modulo four.
      const uint32 shift = static_cast<uint32>(reinterpret_cast<uint64>(output)) / 4 % 4;
      const uint32 values = barrier::shared_address(of.tile.s.staged[of.tile.thread.warp]);
      const uint32 stage = values + 4 * shift;
      const auto lane = static_cast<uint32>(of.tile.thread.lane);
      staged = stage + (lane / 4 * row_pitch + lane % 4) * 4;
      // Words of the row before its first whole vector.
      const uint32 r = lane / row_lanes;
      const int before = static_cast<int>((shift + r * row_pitch) % 4);
      const int first = 4 * static_cast<int>(lane % row_lanes) - before;
      vector_bytes = static_cast<int>(r) * row_bytes + 4 * first;
#pragma unroll
      for (int u = 0; u < lane_vectors; ++u) {
        const int own = first + 4 * u * row_lanes;
        has_vector[u] = own >= 0 && own + 4 <= words;
        const uint32 from = (shift + r * row_pitch + static_cast<uint32>(own)) * 4;
        vectors[u] = values + (has_vector[u] ? from : from % (4 * folded));
      }
      // The first words of a row and the last ones, four lanes for each.
      const uint32 e = lane / 4;
      const int begins = static_cast<int>(-(shift + e * row_pitch) % 4u);
      const int head = begins < words ? begins : words;
      const int tail = (words - head) & 3;
      const auto end = [&](int number, uint32& from, int& to) {
        const int word = number < head ? number : words - tail + number - head;
        from = stage + e * row_pitch * 4 + static_cast<uint32>(4 * word);
        to = static_cast<int>(e) * row_bytes + 4 * word;
        return number < head + tail;
      };
      has_end = end(static_cast<int>(lane % 4), ends, end_bytes);
      if constexpr (!four_ends)
        has_end_again = end(static_cast<int>(lane % 4) + 4, ends_again, end_bytes_again);
    }
  };

  // Stores pieces from `number` on. `piece` is already made; the next one is made while this one is read
  // back.
  template <int number>
  __device__ __forceinline__ void put_rows_from(int64 n, const Held& held, const Affine& affine,
                                                uint32 (&piece)[piece_pairs]) const {
    if constexpr (number < 2 * runs) {
      const Places places(*this, n, number / 2);
      put_row<number>(places, n, held, affine, piece);
      put_row<number + 1>(places, n, held, affine, piece);
      put_rows_from<number + 2>(n, held, affine, piece);
    }
  }
  template <int number>
  __device__ __forceinline__ void put_row(const Places& places, int64 n, const Held& held,
                                          const Affine& affine, uint32 (&piece)[piece_pairs]) const {
    constexpr int h = number % 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < piece_pairs; ++i)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(places.staged + 16 * i), "r"(piece[i]) : "memory");
    __syncwarp();
    if (places.is_odd) put_elements<number / 2>(n, tile.thread.first_row() + 8 * h, places.output);
    // All loads are issued before the next piece is made. Lanes load also what they do not store.
    uint4 vector[lane_vectors][times];
#pragma unroll
    for (int u = 0; u < lane_vectors; ++u) {
#pragma unroll
      for (int i = 0; i < times; ++i) {
        uint4& to = vector[u][i];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                     : "r"(places.vectors[u] + i * rows_at_once * row_pitch * 4)
                     : "memory");
      }
    }
    uint32 end, end_again = 0;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(end) : "r"(places.ends) : "memory");
    if constexpr (!four_ends) {
      if (places.has_end_again)
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(end_again) : "r"(places.ends_again) : "memory");
    }
    if constexpr (number + 1 < 2 * runs)
      make_piece<(number + 1) / 2>(tile, (number + 1) % 2, n, held, affine, piece);
    unsigned char* const to = places.output + 8 * h * row_bytes;
    const int left = L::rows % 64 == 0 ? 8 : L::rows - tile.thread.first_row() - 8 * h;  // channels
#pragma unroll
    for (int u = 0; u < lane_vectors; ++u) {
#pragma unroll
      for (int i = 0; i < times; ++i) {
        if (places.has_vector[u] &&
            (L::rows % 64 == 0 || tile.thread.lane / row_lanes + i * rows_at_once < left))
          __stcs(reinterpret_cast<uint4*>(to + places.vector_bytes + u * row_lanes * 16 +
                                          i * rows_at_once * row_bytes),
                 vector[u][i]);
      }
    }
    const bool has_row = L::rows % 64 == 0 || tile.thread.lane / 4 < left;
    if (places.has_end && has_row) __stcs(reinterpret_cast<uint32*>(to + places.end_bytes), end);
    if constexpr (!four_ends) {
      if (places.has_end_again && has_row)
        __stcs(reinterpret_cast<uint32*>(to + places.end_bytes_again), end_again);
    }
  }
  // Eight channels from `first` on, where the output is not on 4 bytes. Words are staged as if it were.
  template <int run>
  __device__ __forceinline__ void put_elements(int64 n, int first, const unsigned char* output) const {
    const int2 row = tile.s.rows[tile.thread.group * runs + run];
    const uint32* const stage =
        tile.s.staged[tile.thread.warp] + static_cast<uint32>(reinterpret_cast<uint64>(output)) / 4 % 4;
#pragma unroll 1
    for (int r = 0; r < 8 && first + r < L::rows; ++r) {
      uint16* const to =
          static_cast<uint16*>(tile.p.output) + n * L::C::stride(0) + (first + r) * L::C::stride(1) + row.x;
      const auto* const from = reinterpret_cast<const uint16*>(stage + r * row_pitch);
#pragma unroll 1
      for (int i = tile.thread.lane; i < 2 * row.y; i += 32) to[i] = from[i];
    }
  }
};

}  // namespace onepass::pingpong
