// gemm_pingpong.cuh: values that wait for their norm, and what becomes of them then.
#pragma once

#include "gemm/pingpong/exchange.cuh"
#include "gemm/pingpong/held.cuh"
#include "gemm/pingpong/ring.cuh"

namespace onepass {

// What a warpgroup holds of a tile, and stores when the moments of the other tiles have come.
template <class C, class Tail, class Numbers>
struct GemmPingpongOutputs : GemmPingpongThread {
  using Parameters = GemmPingpongParameters<Tail::parameters>;
  using Shared = GemmPingpongShared<C, Tail, Numbers>;
  using Output = typename Tail::Output;
  using After = typename Tail::After;
  static constexpr int columns = Numbers::columns;
  static constexpr int sums = columns / 2;
  static constexpr int pairs = columns / 8;  // of columns, in each row of a thread
  static constexpr int group_rows = GemmSlabs<C, Tail, Numbers>::group_rows;
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr int rows = Geometry::rows;
  static constexpr bool direct = Shared::direct;

  const Parameters& p;
  Shared& s;

  // Values leave by pieces, eight channels of a row of the box, or of 64 columns.
  static constexpr int piece_pairs = Numbers::by_rows ? Numbers::pitch / 8 : 8;
  static constexpr int runs = (pairs + piece_pairs - 1) / piece_pairs;  // of columns
  static constexpr __device__ int pairs_of(int run) {
    return pairs - run * piece_pairs < piece_pairs ? pairs - run * piece_pairs : piece_pairs;
  }

  // Values that wait for the moments of other tiles: the first words in registers and those after them in
  // shared memory. Pairs of f16 are number 2 * j + h of pair j and row h.
  using Format = typename gemm::If<direct, pingpong::HeldInt20, pingpong::HeldF16>::Type;
  static constexpr int words = Format::words(sums);
  static constexpr int own = words - Numbers::waiting_words;
  static_assert(own > 0);
  struct Words {
    uint32 value[words];
  };
  struct Held {
    uint32 value[own];
  };

  // Distances from the mean as they wait, divided by `unit` of their row.
  static __device__ __forceinline__ void pack(const float (&d)[sums], const float (&unit)[2], Words& to) {
    Format::pack(d, unit, to.value);
  }
  // Those held before have been stored.
  __device__ __forceinline__ void hold(const Words& next, Held& held) const {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      if (i < own) {
        held.value[i] = next.value[i];
      } else {
        s.waiting[warp][32 * (i - own) + lane] = next.value[i];
      }
    }
  }
  __device__ __forceinline__ uint32 word(int i, const Held& held) const {
    return i < own ? held.value[i] : s.waiting[warp][32 * (i - own) + lane];
  }

  // What the thread's rows are multiplied by and what is added then.
  struct Norm {
    float scale[2];
    float shift[2];
  };
  // Statistics are asked for some time before they are waited for, without a register.
  static constexpr int warp_slabs = Shared::warp_slabs;
  __device__ __forceinline__ uint32 first_asked() const {
    return static_cast<uint32>(first_row()) / group_rows & ~1u;
  }
  __device__ __forceinline__ void ask(int64 n) const {
    if (2 * lane < warp_slabs)
      GemmPingpongExchange<C, Tail, Numbers>{p}.ask(n, first_asked() + 2 * static_cast<uint32>(lane),
                                                    barrier::shared_address(&s.asked[warp][2 * lane]));
  }

  __device__ __forceinline__ void finish(uint32 tile, int64 n, const Held& held) const {
    const Norm norm = this->norm(tile, n);
    if constexpr (direct) {
      const bool in_pairs = pairs_fit && reinterpret_cast<uint64>(p.output) % 8 == 0;
      if constexpr (Numbers::by_rows) {
        put_wide(n, held, norm, in_pairs);
      } else {
        put_columns(n, held, norm, in_pairs);
      }
    } else if constexpr (Numbers::by_rows) {
      uint32 piece[piece_pairs];
      make_piece<0>(0, n, held, norm, piece);
      put_rows_from<0>(n, held, norm, piece);
    } else {
      finish_from<0>(n, held, norm);
    }
  }
  template <int run>
  __device__ __forceinline__ void finish_from(int64 n, const Held& held, const Norm& norm) const {
    if constexpr (run < runs) {
      put_block<run>(n, held, norm);
      finish_from<run + 1>(n, held, norm);
    }
  }

  __device__ __forceinline__ Norm norm(uint32 tile, int64 n) const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    const GemmPingpongExchange<C, Tail, Numbers> exchange{p};
    Norm norm;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool exists = rows % 64 == 0 || row(h) < rows;
      const int channel = exists ? row(h) : 0;
      const uint32 slab = static_cast<uint32>(channel) / group_rows;
      const float2 all = exchange.wait(n, slab, s.asked[warp][(slab - first_asked()) % warp_slabs]);
      // Rows that the output has not are not stored; what is held of the first slab is another warp's.
      float2 held{0.0f, 0.0f};
      if (exists) held = s.held[tile & 1u][group][slab];
      const float4 affine = s.channels[channel];
      const float scale = affine.y * all.y;
      norm.scale[h] = scale * held.y;
      norm.shift[h] = fmaf(held.x - all.x, scale, affine.z);
      if constexpr (direct) norm.shift[h] = fmaf(-Format::origin, norm.scale[h], norm.shift[h]);
    }
    return norm;
  }

  // What the chain reads of the thread's row h; of some row where there is none.
  __device__ __forceinline__ ChannelValues<After, 1> channel_of(int64 n, int h) const {
    ChannelValues<After, 1> channel;
    channel.load(p, n, rows % 64 == 0 || row(h) < rows ? row(h) : 0);
    return channel;
  }
  // The thread's pairs of a piece, done.
  template <int run>
  __device__ __forceinline__ void make_piece(int h, int64 n, const Held& held, const Norm& norm,
                                             uint32 (&to)[pairs_of(run)]) const {
    constexpr int count = pairs_of(run);
    const ChannelValues<After, 1> channel = channel_of(n, h);
    // All of them before the first is stored: the compiler does not know that they lie elsewhere.
    uint32 waited[count];
#pragma unroll
    for (int k = 0; k < count; ++k) waited[k] = word(2 * (run * piece_pairs + k) + h, held);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float two[2];
      f16::unpack(waited[k], two[0], two[1]);
#pragma unroll
      for (float& value : two) {
        typename After::template Tensors<1> tensors;
        value = After::value(fmaf(value, norm.scale[h], norm.shift[h]), channel.value[0], tensors, 0);
      }
      to[k] = Output::pack(two[0], two[1]);
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

  // --- Outputs of f32 ---
  // The thread's pair j of its row h, done; `at` has its words.
  template <class At>
  __device__ __forceinline__ void make_pair(int j, int h, const At& at, const Norm& norm,
                                            const ChannelValues<After, 1>& channel, float (&two)[2]) const {
    const int g = j / 2;
    const int values = Format::values_of(sums, g);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 4 * (j % 2) + 2 * h + e;
      typename After::template Tensors<1> tensors;
      two[e] =
          After::value(fmaf(Format::unpack(at(5 * g + i / 2), at(5 * g + values / 2), Format::exponent(), i),
                            norm.scale[h], norm.shift[h]),
                       channel.value[0], tensors, 0);
    }
  }
  // Four lanes have 32 bytes of a channel, and what is written of a sector meets the rest of it in L2.
  // Nothing of the output is read: what comes after may be computed before.
  static __device__ __forceinline__ void store_two(uint64 to, const float (&two)[2]) {
    asm volatile("st.global.cs.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(two[0]), "f"(two[1]));
  }
  static __device__ __forceinline__ void store_one(uint64 to, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value));
  }
  // Where the thread's row h of a sample is.
  __device__ __forceinline__ uint64 output_of(int64 n, int h) const {
    return __cvta_generic_to_global(static_cast<unsigned char*>(p.output)) +
           static_cast<uint64>((n * C::stride(0) + row(h) * C::stride(1)) * 4);
  }

  // Whole rows of the box, the last one first: its values are those that waited where rows are staged.
  static constexpr int row_pairs = Numbers::pitch / 8;
  static constexpr int staged_words = Numbers::row_pitch / 4;  // of a thread
  __device__ __forceinline__ void put_wide(int64 n, const Held& held, const Norm& norm, bool in_pairs) const {
    Words all;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      if (i < own + staged_words) all.value[i] = word(i, held);
    }
    const auto at = [&](int i) { return i < own + staged_words ? all.value[i] : word(i, held); };
    if (in_pairs) {
      put_rings<runs - 1>(n, at, norm);
      __syncwarp();
    } else {
      put_rows<runs - 1>(n, at, norm);
      __syncwarp();  // `held` has been read
    }
  }
  template <int run, class At>
  __device__ __forceinline__ void put_rings(int64 n, const At& at, const Norm& norm) const {
    if constexpr (run >= 0) {
      using Ring = GemmPingpongRing<C, Numbers>;
      const int2 place = s.rows[group * runs + run];
      Ring ring(barrier::shared_address(s.waiting[warp]),
                __cvta_generic_to_global(static_cast<unsigned char*>(p.output) +
                                         (n * C::stride(0) + first_row() * C::stride(1) + place.x) * 4),
                2 * place.y, lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const ChannelValues<After, 1> channel = channel_of(n, h);
        const int left = rows % 64 == 0 ? 8 : rows - first_row() - 8 * h;  // channels
        const auto put = [&](int first, int count) {
          __syncwarp();
          ring.lane |= pingpong::opaque_zero();
#pragma unroll
          for (int j = first; j < first + count; ++j) {
            float two[2];
            make_pair(run * row_pairs + j, h, at, norm, channel, two);
            ring.put(j, two[0], two[1]);
          }
          __syncwarp();
        };
        put(0, Ring::first_pairs);
        ring.template store<0>(8 * h, left);
        put(Ring::first_pairs, row_pairs - Ring::first_pairs);
        ring.template store<1>(8 * h, left);
      }
      put_rings<run - 1>(n, at, norm);
    }
  }
  // The same where outputs are not on 8 bytes.
  template <int run, class At>
  __device__ __forceinline__ void put_rows(int64 n, const At& at, const Norm& norm) const {
    if constexpr (run >= 0) {
      const int2 place = s.rows[group * runs + run];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const ChannelValues<After, 1> channel = channel_of(n, h);
        const uint64 to = output_of(n, h) + static_cast<uint64>((place.x + lane % 4 * 2) * 4);
#pragma unroll
        for (int j = 0; j < row_pairs; ++j) {
          float two[2];
          make_pair(run * row_pairs + j, h, at, norm, channel, two);
          if (4 * j + lane % 4 >= place.y || (rows % 64 != 0 && row(h) >= rows)) continue;
          store_one(to + 32 * j, two[0]);
          store_one(to + 32 * j + 4, two[1]);
        }
      }
      put_rows<run - 1>(n, at, norm);
    }
  }

  // Any columns, whose places are in a table.
  __device__ __forceinline__ void put_columns(int64 n, const Held& held, const Norm& norm,
                                              bool in_pairs) const {
    const auto at = [&](int i) { return word(i, held); };
    const int* const offsets = s.offsets() + group * columns + 2 * (lane % 4);
    const ChannelValues<After, 1> channel[2] = {channel_of(n, 0), channel_of(n, 1)};
    uint64 to[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to[h] = output_of(n, h);
      asm volatile("" : "+l"(to[h]));  // one sum, not its terms
    }
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
      const int place[2] = {offsets[8 * j], offsets[8 * j + 1]};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float two[2];
        make_pair(j, h, at, norm, channel[h], two);
        if (rows % 64 != 0 && row(h) >= rows) continue;
        if (in_pairs) {
          if (place[0] >= 0) store_two(to[h] + uint64{4} * static_cast<uint32>(place[0]), two);
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (place[e] >= 0) store_one(to[h] + uint64{4} * static_cast<uint32>(place[e]), two[e]);
          }
        }
      }
    }
    __syncwarp();  // `held` has been read
  }

  // The held values leave eight channels of 64 columns at a time through shared memory, so that a warp writes
  // whole lines.
  template <int run>
  __device__ __forceinline__ void put_block(int64 n, const Held& held, const Norm& norm) const {
    constexpr int pitch = Shared::block_pitch;
    constexpr int64 row_bytes = C::stride(1) * Output::bytes;
    uint32* const stage = s.values[warp];
    const int first_row = this->first_row();
    constexpr int first = run * piece_pairs * 8;
    const bool has = first + 2 * lane < columns;
    const int2 offsets =
        *reinterpret_cast<const int2*>(s.offsets() + group * columns + first + (has ? 2 * lane : 0));
    const bool in_pairs = pairs_fit && reinterpret_cast<uint64>(p.output) % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32 piece[pairs_of(run)];
      make_piece<run>(h, n, held, norm, piece);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < pairs_of(run); ++i) stage[lane / 4 * pitch + 4 * i + lane % 4] = piece[i];
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

  // The same of a row of the box. A channel's part of it is staged as it lies in memory, modulo 16 bytes, so
  // that it leaves by 16 bytes but for its first and last words. Both pieces of a row begin at the same place
  // of 16 bytes: eight channels are a multiple of that.
  static_assert(!Numbers::by_rows || (pairs_fit && columns % Numbers::pitch == 0));
  static constexpr int row_pitch = Shared::row_pitch;  // words
  static constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
  static_assert(direct || !Numbers::by_rows || (row_bytes / 4 - row_pitch) % 4 == 0);
  static constexpr int row_vectors = (Numbers::box_x / 2 + 3 + 3) / 4;
  static constexpr __device__ int lanes_of_row() {
    int lanes = row_vectors <= 8 ? 8 : row_vectors <= 16 ? 16 : 32;
    while (32 / lanes * row_pitch % 4 != 0) lanes /= 2;
    return lanes;
  }
  static constexpr __device__ bool is_four_ends(int outputs) { return (outputs / 2 + 1) % 4 < 2; }
  // Lanes that store a row together: those of the next time begin at the same place of 16 bytes.
  static constexpr int row_lanes = lanes_of_row();
  static constexpr int rows_at_once = 32 / row_lanes;
  static constexpr int lane_vectors = (row_vectors + row_lanes - 1) / row_lanes;  // of a row
  static constexpr int times = 8 / rows_at_once;
  // Four lanes have all words of a row that are beside its vectors, wherever it begins.
  static constexpr bool four_ends =
      is_four_ends(Numbers::box_x) && is_four_ends((Geometry::outputs(2) - 1) % Numbers::box_x + 1);

  // Lanes beside a row's vectors load from its first words, of the same banks: behind it may be what the next
  // warp stages.
  static constexpr __device__ int folded_words() {
    int words = 32;
    while (words > rows_at_once * row_pitch) words /= 2;
    return words;
  }
  static constexpr int folded = folded_words();
  static_assert(folded >= 4);

  // Where a lane's words of a row of the box lie.
  struct Places {
    unsigned char* output;         // the warp's first channel
    uint32 staged;                 // where it writes
    uint32 vectors[lane_vectors];  // of its first row, staged
    int vector_bytes;              // how far on the first of them is in the output
    uint32 ends;                   // its word of those beside vectors
    int end_bytes;
    uint32 ends_again;  // and another, where there are so many
    int end_bytes_again;
    bool is_odd;  // the output is not on 4 bytes: elements leave one by one
    bool has_vector[lane_vectors];
    bool has_end, has_end_again;

    __device__ __forceinline__ Places(const GemmPingpongOutputs& of, int64 n, int run) {
      const int2 row = of.s.rows[of.group * runs + run];
      is_odd = reinterpret_cast<uint64>(of.p.output) % 4 != 0;
      const int words = is_odd ? 0 : row.y;
      output = static_cast<unsigned char*>(of.p.output) + n * (C::stride(0) * Output::bytes) +
               static_cast<int64>(of.first_row() * row_bytes + row.x * Output::bytes);
      // In words modulo four, of the first channel.
      const uint32 shift = static_cast<uint32>(reinterpret_cast<uint64>(output)) / 4 % 4;
      const uint32 values = barrier::shared_address(of.s.values[of.warp]);
      const uint32 stage = values + 4 * shift;
      const auto lane = static_cast<uint32>(of.lane);
      staged = stage + (lane / 4 * row_pitch + lane % 4) * 4;
      // Words of its row before the first vector of 16 bytes that has any.
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

  // Pieces from this one on, which has been made: the next one is made while this one is read back.
  template <int number>
  __device__ __forceinline__ void put_rows_from(int64 n, const Held& held, const Norm& norm,
                                                uint32 (&piece)[piece_pairs]) const {
    if constexpr (number < 2 * runs) {
      const Places places(*this, n, number / 2);
      put_row<number>(places, n, held, norm, piece);
      put_row<number + 1>(places, n, held, norm, piece);
      put_rows_from<number + 2>(n, held, norm, piece);
    }
  }
  template <int number>
  __device__ __forceinline__ void put_row(const Places& places, int64 n, const Held& held, const Norm& norm,
                                          uint32 (&piece)[piece_pairs]) const {
    constexpr int h = number % 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < piece_pairs; ++i)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(places.staged + 16 * i), "r"(piece[i]) : "memory");
    __syncwarp();
    if (places.is_odd) put_elements<number / 2>(n, first_row() + 8 * h, places.output);
    // All on their way before the next piece is made. What a lane does not store it loads, too.
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
    if constexpr (number + 1 < 2 * runs) make_piece<(number + 1) / 2>((number + 1) % 2, n, held, norm, piece);
    unsigned char* const to = places.output + 8 * h * row_bytes;
    const int left = rows % 64 == 0 ? 8 : rows - first_row() - 8 * h;  // channels
#pragma unroll
    for (int u = 0; u < lane_vectors; ++u) {
#pragma unroll
      for (int i = 0; i < times; ++i) {
        if (places.has_vector[u] && (rows % 64 == 0 || lane / row_lanes + i * rows_at_once < left))
          __stcs(reinterpret_cast<uint4*>(to + places.vector_bytes + u * row_lanes * 16 +
                                          i * rows_at_once * row_bytes),
                 vector[u][i]);
      }
    }
    const bool has_row = rows % 64 == 0 || lane / 4 < left;
    if (places.has_end && has_row) __stcs(reinterpret_cast<uint32*>(to + places.end_bytes), end);
    if constexpr (!four_ends) {
      if (places.has_end_again && has_row)
        __stcs(reinterpret_cast<uint32*>(to + places.end_bytes_again), end_again);
    }
  }
  // Where the output is not on 4 bytes: eight channels from `first` on. Words are staged as if it were.
  template <int run>
  __device__ __forceinline__ void put_elements(int64 n, int first, const unsigned char* output) const {
    const int2 row = s.rows[group * runs + run];
    const uint32* const stage =
        s.values[warp] + static_cast<uint32>(reinterpret_cast<uint64>(output)) / 4 % 4;
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
