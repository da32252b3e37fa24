// Stores rows that a warp has put together in shared memory, in whole sectors.
#pragma once

#include "thin/mma.cuh"

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

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Send {
  const Warp warp;

  // The phase of a channel whose channel 0 goes to `to`: elements from the last 16-byte boundary.
  static __device__ __forceinline__ int phase(const char* to, int channel) {
    return static_cast<int>((static_cast<uint32>(reinterpret_cast<uint64>(to)) / Output::bytes +
                             static_cast<uint32>(channel) * static_cast<uint32>(Tail::spatial % width)) %
                            width);
  }

  // The sector at either end of a chunk:
  // own     part of a sector that no other chunk writes; stored element by element
  // others  another chunk writes it
  // shared  written here as a whole: the rest is kept from the chunk before, or computed as well
  enum Side { own, others, shared };

  // Sends a chunk: `lanes_of_chunk` lanes for each channel, a vector a lane, whole sectors. (L2 takes several
  // times as long for parts of a sector.) The chunk lies one vector behind the begin of the stage, where the
  // rest of the chunk before is kept.
  static constexpr int most_vectors = (sector - 1 + chunk_elements) / sector * 2;
  static constexpr int lanes_of_chunk = 8;
  static constexpr int at_once = 32 / lanes_of_chunk;
  // Phases repeat after `period` channels: few addresses serve all channels.
  static constexpr int period = Tail::spatial % sector == 0       ? 1
                                : Tail::spatial * 2 % sector == 0 ? 2
                                : Tail::spatial * 4 % sector == 0 ? 4
                                : Tail::spatial * 8 % sector == 0 ? 8
                                                                  : 16;
  static constexpr int residues = period > at_once ? period / at_once : 1;

  // The vectors of a chunk, counted from the one in which it begins.
  struct Vectors {
    int odd;    // the first is the second of its sector
    int shift;  // elements before the chunk's first
    int end;    // elements up to the chunk's end
    __device__ __forceinline__ Vectors(uint64 at, int length)
        : odd(static_cast<int>(at / 16 % 2)),
          shift(static_cast<int>(at % 16) / Output::bytes),
          end(shift + length) {}
    // Vector of the first sector that begins in the chunk.
    __device__ __forceinline__ int first_whole() const { return shift == 0 && odd == 0 ? 0 : 2 - odd; }
    // Vector behind the last sector that ends in the chunk.
    __device__ __forceinline__ int last_whole() const { return ((odd + end / width) & ~1) - odd; }
    __device__ __forceinline__ bool ends_within() const { return (odd * width + end) % sector != 0; }
  };

  // `count`: channels.
  template <class Values>
  __device__ __forceinline__ void send(unsigned char* stage, char* to, int count, int length, Side begin,
                                       Side end) const {
    const int sub = warp.lane / lanes_of_chunk;
    const int vector = warp.lane % lanes_of_chunk;  // from the sector in which the chunk begins
    const char* first = to + sub * Tail::spatial * Output::bytes;
    const unsigned char* from = stage + sub * channel_pitch * Output::bytes + 16 + vector * 16;
    // A lane stores its sector where it ends within the chunk: where the phase is at least this.
    const int least = (vector / 2 + 1) * 32 - length * Output::bytes;
    const bool takes_first = begin == shared || vector >= 2;
#pragma unroll
    for (int j = 0; j < residues; ++j) {
      const uint64 at = reinterpret_cast<uint64>(first + j * at_once * Tail::spatial * Output::bytes);
      const int phase = static_cast<int>(at) & 31;
      uint64 place = at - phase + vector * 16;
      asm volatile("" : "+l"(place));  // keeps one address in registers instead of one for each offset
      const unsigned char* from_vector = from - (phase & 16);
      const bool takes = takes_first || phase == 0;
      constexpr int in_flight = 4;
#pragma unroll
      for (int first_v = 0; first_v * lanes_of_chunk < most_vectors; first_v += in_flight) {
#pragma unroll
        for (int k = j * at_once; k < staged_channels; k += residues * at_once) {
          if (channels % (row_tiles > 1 ? 16 : at_once) != 0 && k + sub >= count) continue;
          const int64 ahead = static_cast<int64>(k - j * at_once) * Tail::spatial * Output::bytes;
          // Loads all vectors, also those that are not stored: it is the warp's own memory, and loads do not
          // wait for the test.
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
    // Two lanes for each channel store the ends.
    const int channel = warp.lane / 2;
    const uint64 at = reinterpret_cast<uint64>(to + channel * Tail::spatial * Output::bytes);
    const Vectors vectors(at, length);
    unsigned char* of_channel = stage + channel * channel_pitch * Output::bytes + 16;
    const int behind = vectors.last_whole();
    if (begin == own || end == own) {
      if (channel < count) {
        const bool is_end = warp.lane % 2 == 1;
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
      const int vector = behind + warp.lane % 2;
      if (channel < count && vectors.ends_within())
        Values::store(reinterpret_cast<void*>((at & ~static_cast<uint64>(15)) + vector * 16),
                      *reinterpret_cast<const uint4*>(of_channel + vector * 16));
    } else if (end == others) {
      __syncwarp();
      uint4 rest;
      // The next chunk begins in the vector in which this one ends, or in the one behind.
      const int vector = vectors.end / width - warp.lane % 2;
      if (channel < count) rest = *reinterpret_cast<const uint4*>(of_channel + vector * 16);
      __syncwarp();
      if (channel < count) *reinterpret_cast<uint4*>(of_channel - warp.lane % 2 * 16) = rest;
    }
  }
};

}  // namespace onepass
