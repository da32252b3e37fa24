// Pass 2 of thin_mma.cuh: outputs of a tile to memory, in whole sectors.
#pragma once

#include "thin/mma/moments.cuh"

namespace onepass {

// The bits of an element.
template <int Bytes>
struct Bits {
  using Type = uint32;
};
template <>
struct Bits<2> {
  using Type = uint16;
};

template <class C, class Tail, class Numbers>
struct ThinMmaOutputs : ThinMmaMoments<C, Tail, Numbers> {
  using Base = ThinMmaMoments<C, Tail, Numbers>;
  using Base::area;
  using Base::Base;
  using Base::careful_value;
  using Base::cell_of;
  using Base::cells_x;
  using Base::cells_y;
  using Base::channel_pitch;
  using Base::channels;
  using Base::chunk_elements;
  using Base::chunk_pitch;
  using Base::classes_x;
  using Base::classes_y;
  using Base::classes_z;
  using Base::columns;
  using Base::columns_of;
  using Base::compute_here;
  using Base::ends;
  using Base::for_each_pair;
  using Base::halves;
  using Base::has_plane;
  using Base::has_row;
  using Base::in_quad;
  using Base::interleaved;
  using Base::is_direct;
  using Base::items_of;
  using Base::lane;
  using Base::load_weights;
  using Base::out_x;
  using Base::out_y;
  using Base::out_z;
  using Base::overlaps;
  using Base::p;
  using Base::quad;
  using Base::row_channel;
  using Base::row_tiles;
  using Base::rows_of;
  using Base::sector;
  using Base::spans;
  using Base::spans_x;
  using Base::spans_y;
  using Base::stage_y;
  using Base::staged_channels;
  using Base::swish_terms;
  using Base::tile_x;
  using Base::tile_y;
  using Base::whole_rows;
  using Base::width;
  using typename Base::After;
  using typename Base::Before;
  using typename Base::Columns;
  using typename Base::Output;
  using typename Base::Parameters;
  using typename Base::Sums;
  using typename Base::Tile;
  using typename Base::Way;
  using typename Base::Weights;
  template <class Chain>
  using Operands = typename Base::template Operands<Chain>;
  template <int rz>
  using Held = typename Base::template Held<rz>;

  static __device__ __forceinline__ int64 output_index(int64 n, int channel, int z, int y, int x) {
    return n * C::stride(0) + channel * C::stride(1) + z * C::stride(2) + y * C::stride(3) + x * C::stride(4);
  }

  // --- Pass 2 ---
  // What becomes of the before-chain's values on their way out. Another agent may do something else with
  // them (thin_inplace.cuh): `begin` sees the sums of an item before the chain, `finish` each value and
  // whether it is one of the tile's own, which it has once; a neighbour may have it too, and rows and columns
  // that the output has not are computed as well.
  struct Chains {
    Operands<Before> before;
    Operands<After> after;
    // The norm as one multiply-add.
    struct {
      float scale = 1.0f, shift = 0.0f;
    } norm[halves];

    // Of a lane's channels from 16 m on.
    __device__ __forceinline__ void load_norm(const Parameters& p, int64 n, int m, int quad) {
      if constexpr (Tail::has_norm) {
        constexpr int groups = Tail::channels / Tail::group_channels;
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          const int channel = m * 16 + row_channel(half, quad);
          const int existing = channel < channels ? channel : 0;
          // thin_mma.cuh leaves mean and factor of a slab where its first part was.
          const float* slab = p.parts + (n * Numbers::tiles * groups + existing / Tail::group_channels) * 3;
          const int own = Tail::channel(n, existing);
          norm[half].scale = Tail::weight(p, own) * load_shared_by_blocks(slab + 1);
          norm[half].shift = fmaf(-load_shared_by_blocks(slab), norm[half].scale, Tail::bias(p, own));
        }
      }
    }

    // Where they go: from row to row, from channel to channel.
    static constexpr int row_stride = out_x;
    static constexpr int64 channel_stride = Tail::spatial;
    static __device__ __forceinline__ int64 index(int channel, int z, int y, int x) {
      return output_index(0, channel, z, y, x);
    }
    static __device__ __forceinline__ char* sample(const Parameters& p, int64 n) {
      return static_cast<char*>(p.output) + n * C::stride(0) * Output::bytes;
    }
    template <Way way, int rz, int ry>
    __device__ __forceinline__ void begin(const Sums&) {}
    __device__ __forceinline__ float finish(int half, float x, bool) const {
      if constexpr (Tail::has_norm) x = fmaf(x, norm[half].scale, norm[half].shift);
      return Base::template apply<After>(x, after.row[half]);
    }
    template <class Pieces>
    static __device__ __forceinline__ void store_piece(const Pieces& pieces, void* to, int index,
                                                       bool aligned) {
      pieces.store(to, index, aligned);
    }
    // Nobody reads them again soon.
    template <class Vector>
    static __device__ __forceinline__ void store(void* to, Vector value) {
      __stcs(static_cast<Vector*>(to), value);
    }
  };

  // Elements from the 16-byte boundary before it to where a channel goes whose channel 0 goes to `to`.
  static __device__ __forceinline__ int phase(const char* to, int channel) {
    return static_cast<int>((static_cast<uint32>(reinterpret_cast<uint64>(to)) / Output::bytes +
                             static_cast<uint32>(channel) * static_cast<uint32>(Tail::spatial % width)) %
                            width);
  }

  // An item's outputs from where they are computed to memory. `to`: those of channel 16 m in the tile's first
  // row and column. `piece` of a lane's neighbours are one vector of memory where `aligned`.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void store(const Tile& tile, const Weights& w, const Held<rz>& held,
                                        Values& chains, int y, int column, char* to, int count,
                                        bool aligned) const {
    const Columns c = columns_of(w, y, column);
    char* lane_to = to + (quad * Values::channel_stride + y * classes_y * Values::row_stride +
                          (column * spans_x * 8 + 2 * in_quad) * classes_x) *
                             Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      this->template convolve<rz, ry>(sum, w, c, held);
      chains.template begin<way, rz, ry>(sum);
      for_constant<spans * halves>([&](auto k_) {
        constexpr int span = decltype(k_)::value / halves;
        constexpr int half = decltype(k_)::value % halves;
        constexpr int neighbours = 2 * classes_x;
        float value[neighbours];
        const bool exists = has_row(tile, y + span / spans_x, ry);
        for_constant<classes_x>([&](auto rx) {
          float* pair = sum[rx][span] + half * 2;
          Base::template before<way, swish_terms(rz, ry, rx)>(pair[0], pair[1], chains.before.row[half]);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            value[i * classes_x + rx] =
                chains.finish(half, pair[i], exists && !ends(cell_of(tile, column, span), i, rx));
        });
        const bool in_range = (channels % 16 == 0 || half * 8 + quad < count) && exists;
        char* place = lane_to + (half * 8 * Values::channel_stride +
                                 (span / spans_x * classes_y + ry) * Values::row_stride +
                                 span % spans_x * 8 * classes_x) *
                                    Output::bytes;
        constexpr int piece = Numbers::piece > 0 ? Numbers::piece : 1;
#pragma unroll
        for (int k = 0; k < neighbours; k += piece) {
          float own[piece];
#pragma unroll
          for (int i = 0; i < piece; ++i) own[i] = value[k + i];
          Packed<Output, piece> packed;
          packed.pack(own);
          if (in_range && !ends(cell_of(tile, column, span), k / classes_x, k % classes_x))
            Values::store_piece(packed, place, k, aligned);
        }
      });
    });
  }

  // The same where channels lie after space: a lane's two channels of a position are neighbours, and those of
  // eight lanes whole sectors.
  template <Way way, int rz, bool aligned, class Values>
  __device__ __forceinline__ void store_interleaved(const Tile& tile, const Weights& w, const Held<rz>& held,
                                                    Values& chains, int y, int column, char* to,
                                                    int count) const {
    const Columns c = columns_of(w, y, column);
    char* lane_to =
        to + ((y * classes_y * out_x + (column * spans_x * 8 + 2 * in_quad) * classes_x) * channels +
              row_channel(0, quad)) *
                 Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      this->template convolve<rz, ry>(sum, w, c, held);
      chains.template begin<way, rz, ry>(sum);
      for_each_pair(sum, [&](auto half, auto rx, auto span, float* pair) {
        Base::template before<way, swish_terms(rz, ry, rx)>(pair[0], pair[1], chains.before.row[half]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          pair[i] = chains.finish(
              half, pair[i],
              has_row(tile, y + span / spans_x, ry) && !ends(cell_of(tile, column, span), i, rx));
          compute_here(pair[i]);
        }
      });
      for_constant<spans * 2 * classes_x>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        constexpr int rx = k % classes_x;
        constexpr int i = k / classes_x % 2;
        constexpr int span = k / classes_x / 2;
        constexpr int piece = Numbers::piece > 0 ? Numbers::piece : 1;  // of the halves
        const bool has_position =
            has_row(tile, y + span / spans_x, ry) && !ends(cell_of(tile, column, span), i, rx);
        char* place = lane_to + ((span / spans_x * classes_y + ry) * out_x +
                                 (span % spans_x * 8 + i) * classes_x + rx) *
                                    channels * Output::bytes;
#pragma unroll
        for (int half = 0; half < halves; half += piece) {
          float own[piece];
#pragma unroll
          for (int j = 0; j < piece; ++j) own[j] = sum[rx][span][(half + j) * 2 + i];
          Packed<Output, piece> packed;
          packed.pack(own);
          if (!has_position || (channels % 16 != 0 && row_channel(half, quad) >= count)) continue;
          if constexpr (piece == 2 && aligned) {
            if constexpr (Output::bytes == 4) {
              Values::store(place, uint2{packed.word[0], packed.word[1]});
            } else {
              Values::store(place, packed.word[0]);
            }
            continue;
          }
          packed.store(place, row_channel(half, 0), aligned);
        }
      });
    });
  }

  // An item's outputs of one class of z to where they lie in the warp's stage, whose row `row` of cells it
  // begins with. `start` is the phase of the lane's channel in the stage's first row (8 channels further it
  // is the same: a vector has 4 or 8 elements).
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void put(const Tile& tile, const Weights& w, const Held<rz>& held,
                                      Values& chains, int y, int column, int row, int start) const {
    const Columns c = columns_of(w, y, column);
    const bool is_own = !overlaps || whole_rows || column < columns;
    unsigned char* lane_stage =
        area.stage +
        (quad * channel_pitch + (column * spans_x * 8 + 2 * in_quad) * classes_x) * Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      unsigned char* to[spans_y];
#pragma unroll
      for (int i = 0; i < spans_y; ++i) {
        const int chunk = (row + i) * classes_y + ry;
        to[i] = lane_stage + (width + (whole_rows ? start + chunk * out_x
                                                  : (start + chunk * out_x) % width + chunk * chunk_pitch)) *
                                 Output::bytes;
      }
      Sums sum;
      this->template convolve<rz, ry>(sum, w, c, held);
      chains.template begin<way, rz, ry>(sum);
      for_each_pair(sum, [&](auto half, auto rx, auto span, float* pair) {
        Base::template before<way, swish_terms(rz, ry, rx)>(pair[0], pair[1], chains.before.row[half]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool ends_before = ends(cell_of(tile, column, span), i, rx);
          float value =
              chains.finish(half, pair[i], is_own && has_row(tile, y + span / spans_x, ry) && !ends_before);
          compute_here(value);
          // A row of cells that the output has in part is the last of its chunk: what lies behind is not
          // sent. Nor are channels there are not.
          const bool in_range = staged_channels % 8 == 0 || half * 8 + quad < staged_channels;
          if (in_range && !ends_before)
            store_one<Output>(to[span / spans_x],
                              half * 8 * channel_pitch + (span % spans_x * 8 + i) * classes_x + rx, value);
        }
      });
    });
  }

  // Items that have the outputs of a sector.
  static constexpr int more_columns = (sector + 8 * spans_x * classes_x - 1) / (8 * spans_x * classes_x);

  // The first outputs of the row of cells behind the tile, for the sector where its last row ends.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void put_next(const Weights& w, const Held<rz>& held, Values& chains, int rows,
                                           int start) const {
    unsigned char* to =
        area.stage + (quad * channel_pitch + width + start + rows * classes_y * out_x) * Output::bytes;
#pragma unroll 1
    for (int column = 0; column < more_columns; ++column) {
      Sums sum;
      this->template convolve<rz, 0>(sum, w, columns_of(w, tile_y, column), held);
      for_constant<spans_x * classes_x * halves>([&](auto k_) {
        constexpr int half = decltype(k_)::value % halves;
        constexpr int rx = decltype(k_)::value / halves % classes_x;
        constexpr int span = decltype(k_)::value / halves / classes_x;
        float* pair = sum[rx][span] + half * 2;
        Base::template before<way, swish_terms(rz, 0, rx)>(pair[0], pair[1], chains.before.row[half]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float value = chains.finish(half, pair[i], false);
          compute_here(value);
          const bool in_range = staged_channels % 8 == 0 || half * 8 + quad < staged_channels;
          const int x = ((column * spans_x + span) * 8 + 2 * in_quad + i) * classes_x + rx;
          if (in_range && x < sector - 1) store_one<Output>(to, half * 8 * channel_pitch + x, value);
        }
      });
    }
  }

  // How a chunk begins and ends: with a sector of which the rest is there too (kept from the chunk before, or
  // computed besides), which another chunk has or will have, or of which the rest is not this warp's.
  enum Side { own, others, shared };

  // What the warp put together to where it belongs: some lanes for each channel, a vector a lane, whole
  // sectors (L2 takes several times as long for parts of one). A chunk lies behind a vector for what was
  // kept.
  static constexpr int most_vectors = (sector - 1 + chunk_elements) / sector * 2;
  static constexpr int lanes_of_chunk = 8;
  static constexpr int at_once = 32 / lanes_of_chunk;
  // Phases repeat after `period` channels: the addresses of a few serve all.
  static constexpr int period = Tail::spatial % sector == 0       ? 1
                                : Tail::spatial * 2 % sector == 0 ? 2
                                : Tail::spatial * 4 % sector == 0 ? 4
                                : Tail::spatial * 8 % sector == 0 ? 8
                                                                  : 16;
  static constexpr int residues = period > at_once ? period / at_once : 1;

  // The vectors of a chunk, from that in which it begins.
  struct Vectors {
    int odd;    // the first is the second of its sector
    int shift;  // elements before the chunk's first
    int end;    // elements up to the chunk's end
    __device__ __forceinline__ Vectors(uint64 at, int length)
        : odd(static_cast<int>(at / 16 % 2)),
          shift(static_cast<int>(at % 16) / Output::bytes),
          end(shift + length) {}
    // Of the first sector that begins in the chunk.
    __device__ __forceinline__ int first_whole() const { return shift == 0 && odd == 0 ? 0 : 2 - odd; }
    // Behind the last sector that ends in the chunk.
    __device__ __forceinline__ int last_whole() const { return ((odd + end / width) & ~1) - odd; }
    __device__ __forceinline__ bool ends_within() const { return (odd * width + end) % sector != 0; }
  };

  // `count`: of channels.
  template <class Values>
  __device__ __forceinline__ void send(unsigned char* stage, char* to, int count, int length, Side begin,
                                       Side end) const {
    const int sub = lane / lanes_of_chunk;
    const int vector = lane % lanes_of_chunk;  // from the sector in which the chunk begins
    const char* first = to + sub * Tail::spatial * Output::bytes;
    const unsigned char* from = stage + sub * channel_pitch * Output::bytes + 16 + vector * 16;
    // A lane's sector ends in the chunk where the chunk begins so many bytes behind its own first sector.
    const int least = (vector / 2 + 1) * 32 - length * Output::bytes;
    const bool takes_first = begin == shared || vector >= 2;
#pragma unroll
    for (int j = 0; j < residues; ++j) {
      const uint64 at = reinterpret_cast<uint64>(first + j * at_once * Tail::spatial * Output::bytes);
      const int phase = static_cast<int>(at) & 31;
      uint64 place = at - phase + vector * 16;
      asm volatile("" : "+l"(place));  // one address, not one for each distance from it
      const unsigned char* from_vector = from - (phase & 16);
      const bool takes = takes_first || phase == 0;
      constexpr int in_flight = 4;
#pragma unroll
      for (int first_v = 0; first_v * lanes_of_chunk < most_vectors; first_v += in_flight) {
#pragma unroll
        for (int k = j * at_once; k < staged_channels; k += residues * at_once) {
          if (channels % (row_tiles > 1 ? 16 : at_once) != 0 && k + sub >= count) continue;
          const int64 ahead = static_cast<int64>(k - j * at_once) * Tail::spatial * Output::bytes;
          // Those that are not sent as well: what lies there is the warp's own, and loads need not wait.
          uint4 data[in_flight];
#pragma unroll
          for (int i = 0; i < in_flight; ++i) {
            if ((first_v + i) * lanes_of_chunk < most_vectors)
              data[i] = *reinterpret_cast<const uint4*>(from_vector + k * channel_pitch * Output::bytes +
                                                        (first_v + i) * lanes_of_chunk * 16);
          }
#pragma unroll
          for (int i = 0; i < in_flight; ++i) {
            const int v = first_v + i;
            if (v * lanes_of_chunk >= most_vectors || phase < least + v * lanes_of_chunk * 16 ||
                (v == 0 && !takes))
              continue;
            Values::store(reinterpret_cast<void*>(place + ahead + v * lanes_of_chunk * 16), data[i]);
          }
        }
      }
    }
    // Two lanes for each channel see to the ends.
    const int channel = lane / 2;
    const uint64 at = reinterpret_cast<uint64>(to + channel * Tail::spatial * Output::bytes);
    const Vectors vectors(at, length);
    unsigned char* of_channel = stage + channel * channel_pitch * Output::bytes + 16;
    const int behind = vectors.last_whole();
    if (begin == own || end == own) {
      if (channel < count) {
        const bool is_end = lane % 2 == 1;
        const int least = begin == shared ? -vectors.odd * width : vectors.shift;
        int i = is_end ? behind * width : vectors.shift;
        int stop = is_end ? vectors.end : vectors.first_whole() * width;
        if (i < least) i = least;
        if (stop > vectors.end) stop = vectors.end;
        if (is_end && begin == own && i < vectors.first_whole() * width) i = vectors.first_whole() * width;
        if ((is_end ? end : begin) != own) stop = i;
        using Element = typename Bits<Output::bytes>::Type;
        const auto* source = reinterpret_cast<const Element*>(of_channel);
        auto* goal = reinterpret_cast<Element*>(at) - vectors.shift;
#pragma unroll 1
        for (; i < stop; ++i) goal[i] = source[i];
      }
    }
    if (end == shared && overlaps) {
      const int vector = behind + lane % 2;
      if (channel < count && vectors.ends_within())
        Values::store(reinterpret_cast<void*>((at & ~static_cast<uint64>(15)) + vector * 16),
                      *reinterpret_cast<const uint4*>(of_channel + vector * 16));
    } else if (end == others) {
      __syncwarp();
      uint4 rest;
      // The next chunk's first vector is that in which this one ends, or the one behind.
      const int vector = vectors.end / width - lane % 2;
      if (channel < count) rest = *reinterpret_cast<const uint4*>(of_channel + vector * 16);
      __syncwarp();
      if (channel < count) *reinterpret_cast<uint4*>(of_channel - lane % 2 * 16) = rest;
    }
  }

  // One class of z, channels 16 m and on.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void write_plane(const Tile& tile, const Weights& w, Values& chains,
                                              int m) const {
    const int z = tile.z * classes_z + rz;
    char* to = Values::sample(p, tile.n) +
               Values::index(m * 16, z, tile.y * classes_y, tile.x * classes_x) * Output::bytes;
    const int count = row_tiles == 1 || channels - m * 16 < 16 ? channels - m * 16 : 16;
    const int all_rows = rows_of(tile);
    const Held<rz> held = this->template hold_weights<rz>(w);
    if constexpr (is_direct) {
      const bool aligned =
          reinterpret_cast<uint64>(Values::sample(p, tile.n)) % (Numbers::piece * Output::bytes) == 0;
      const int items = items_of(all_rows);
      if constexpr (!interleaved) {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store<way, rz>(tile, w, held, chains, i / columns * spans_y, i % columns, to, count, aligned);
      } else if (aligned) {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store_interleaved<way, rz, true>(tile, w, held, chains, i / columns * spans_y, i % columns, to,
                                           count);
      } else {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store_interleaved<way, rz, false>(tile, w, held, chains, i / columns * spans_y, i % columns, to,
                                            count);
      }
      return;
    }
    // Rows go on in the sector where the row before ends, where sectors are no longer than rows.
    constexpr bool carries = whole_rows && out_x >= sector;
    const bool is_last = whole_rows ? tile.y + tile_y >= cells_y : tile.x + tile_x >= cells_x;
    const bool is_first = whole_rows ? tile.y == 0 : tile.x == 0;
    const Side head = overlaps && !is_first ? others : own;
    const Side tail = overlaps && !is_last ? shared : own;
    const int all_columns = columns + (overlaps && !whole_rows && !is_last ? more_columns : 0);
#pragma unroll 1
    for (int y = 0; y < all_rows; y += stage_y) {
      const int start = phase(to, quad);
      const int rows = all_rows - y < stage_y ? all_rows - y : stage_y;
#pragma unroll 1
      for (int row = 0, column = 0; row < rows;) {
        put<way, rz>(tile, w, held, chains, y + row, column, row, start);
        if (++column == all_columns) column = 0, row += spans_y;
      }
      const bool ends_tile = y + stage_y >= all_rows;
      if constexpr (overlaps && whole_rows) {
        if (ends_tile && !is_last) put_next<way, rz>(w, held, chains, rows, start);
      }
      __syncwarp();
      const int out_row = (tile.y + y) * classes_y;
      const int out_rows = out_y - out_row < rows * classes_y ? out_y - out_row : rows * classes_y;
      if constexpr (whole_rows) {
        send<Values>(area.stage, to, count, out_rows * out_x,
                     carries && y > 0 ? shared
                     : y > 0          ? own
                                      : head,
                     ends_tile ? tail
                     : carries ? others
                               : own);
      } else {
        const int left = out_x - tile.x * classes_x;
#pragma unroll 1
        for (int i = 0; i < out_rows; ++i)
          send<Values>(area.stage + i * chunk_pitch * Output::bytes, to + i * out_x * Output::bytes, count,
                       left < chunk_elements ? left : chunk_elements, head, tail);
      }
      __syncwarp();
      to += stage_y * classes_y * out_x * Output::bytes;
    }
  }

  template <Way way>
  __device__ __forceinline__ void write(const Tile& tile, Weights& w) const {
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) load_weights(w, m);
      Chains chains;
      chains.before.load(p, tile.n, m, quad);
      chains.after.load(p, tile.n, m, quad);
      chains.load_norm(p, tile.n, m, quad);
      for_constant<classes_z>([&](auto rz_) {
        constexpr int rz = decltype(rz_)::value;
        if (has_plane(tile, rz)) write_plane<way, rz>(tile, w, chains, m);
      });
    }
  }

  // body(z, y, x) for the lane's outputs of a channel that the tile stores in `sample`. Where tiles overlap
  // those are whole sectors, as in `send`: each of its runs (all rows of a plane, or a row) begins and ends
  // with the first sector that begins in it or behind it, but where a plane or a row does.
  template <class Body>
  static __device__ __forceinline__ void for_each_stored(const char* sample, const Tile& tile, int channel,
                                                         Body&& body) {
    const int first_y = tile.y * classes_y, first_x = tile.x * classes_x;
    const int rows = out_y - first_y < tile_y * classes_y ? out_y - first_y : tile_y * classes_y;
    const int row = out_x - first_x < tile_x * classes_x ? out_x - first_x : tile_x * classes_x;
    const int planes = out_z - tile.z * classes_z < classes_z ? out_z - tile.z * classes_z : classes_z;
    const int length = whole_rows ? rows * out_x : row;
    const bool is_first = whole_rows ? first_y == 0 : first_x == 0;
    const bool is_last = whole_rows ? first_y + rows == out_y : first_x + row == out_x;
#pragma unroll 1
    for (int run = 0; run < planes * (whole_rows ? 1 : rows); ++run) {
      const int z = tile.z * classes_z + (whole_rows ? run : run / rows);
      const int y = first_y + (whole_rows ? 0 : run % rows);
      const int64 first = output_index(0, channel, z, y, first_x);
      // Elements up to the next sector.
      const auto left = [&](int64 index) {
        const uint64 at = reinterpret_cast<uint64>(sample) / Output::bytes + static_cast<uint64>(index);
        return static_cast<int>((sector - at % sector) % sector);
      };
      const int begin = overlaps && !is_first ? left(first) : 0;
      const int end = length + (overlaps && !is_last ? left(first + length) : 0);
#pragma unroll 1
      for (int i = begin + threadIdx.x % 32; i < end; i += 32)
        body(z, y + (first_x + i) / out_x, (first_x + i) % out_x);
    }
  }

  static __device__ __noinline__ void write_carefully(const Parameters& p, const Tile tile) {
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      ChannelValues<After, 1> after;
      after.load(p, tile.n, channel);
      ChannelNorm<Tail> norm;
      norm.load(p, tile.n, channel);
      for_each_stored(Chains::sample(p, tile.n), tile, channel, [&](int z, int y, int x) {
        const float value = norm.apply(careful_value(p, tile.n, channel, z, y, x));
        store_one<Output>(p.output, output_index(tile.n, channel, z, y, x),
                          Base::template apply<After>(value, after));
      });
    }
  }
};

}  // namespace onepass
