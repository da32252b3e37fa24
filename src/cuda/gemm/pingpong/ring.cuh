// Stages rows of f32 outputs in shared memory so that they are stored as 16-byte vectors.
#pragma once

#include "gemm/pingpong/layout.cuh"

namespace onepass::pingpong {

// The cost of a store is the number of lines it touches, and a warp's values lie in eight channels. A row of
// the box is therefore staged, eight channels at a time and in two parts, in a ring buffer of `pitch` words
// for each channel. The second part completes the vector that the first part ended in. Words have the same
// alignment modulo 16 bytes as in memory; the stride of channels is a multiple of 16 bytes.
template <class L>
struct RowRing {
  static constexpr int pairs = L::Numbers::pitch / 8;  // of a lane, in a row of every channel
  static constexpr int pitch = L::Numbers::row_pitch;
  static constexpr int words = 8 * pitch;  // of all channels
  // Pairs of a lane in the first part. All but the first pair of the second part wrap around.
  static constexpr int first_pairs = pitch / 8 - 1;
  static constexpr __device__ int pairs_of(int part) { return part == 0 ? first_pairs : pairs - first_pairs; }
  static constexpr __device__ int lanes_of(int part) {
    return pairs_of(part) <= 4 ? 8 : pairs_of(part) <= 8 ? 16 : 32;
  }
  static_assert(pitch % 8 == 0 && pairs_of(1) > 0 && pairs_of(1) <= first_pairs && first_pairs <= 16);
  static_assert(L::C::stride(1) % 4 == 0);
  static constexpr uint32 channel_bytes = static_cast<uint32>(L::C::stride(1) * 4);

  // The lane's vector of a part's first channels. All others lie at fixed distances from it.
  struct Vector {
    uint32 from;  // where it is staged
    uint32 to;    // its place in the sample, in bytes
    bool has;     // whether it is stored
  };

  uint32 stage;    // address of the ring
  uint64 sample;   // address of the sample's outputs
  uint32 output;   // place of the row's first output in the warp's first channel, in bytes
  uint32 shift;    // its address modulo 16 bytes, in words
  uint32 end;      // one past the last word
  uint32 staged;   // address of the lane's first pair
  uint32 wrapped;  // address of its first pair of the second part
  uint32 lane;
  Vector part[2];

  // Everything is computed once for a row: computed again for each store, it took 290 of the 960 instructions
  // that finish a tile of s19.
  __device__ __forceinline__ RowRing(uint32 stage, uint64 sample, uint32 output, int outputs, int lane)
      : stage(stage),
        sample(sample),
        output(output),
        shift((static_cast<uint32>(sample) + output) / 4 % 4),
        end(shift + static_cast<uint32>(outputs)),
        lane(static_cast<uint32>(lane)) {
    const uint32 first = shift + this->lane % 4 * 2;
    const uint32 begin = stage + this->lane / 4 * (pitch * 4);
    staged = begin + first * 4;
    const uint32 next = first + 8 * first_pairs;
    wrapped = begin + (next < pitch ? next : next - pitch) * 4;
    place<0>();
    place<1>();
  }

  // Stages the lane's pair j of the row, in its channel.
  __device__ __forceinline__ void put(int j, float value, float next) const {
    const uint32 to = j < first_pairs    ? staged + 32 * j
                      : j == first_pairs ? wrapped
                                         : staged + static_cast<uint32>(32 * j - 4 * pitch);
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(value), "f"(next) : "memory");
  }

  // Stores a part that all lanes have staged: eight channels from `first` on, of which `left` exist.
  template <int number>
  __device__ __forceinline__ void store(int first, int left) const {
    constexpr int lanes = lanes_of(number);
    constexpr int channels = 32 / lanes;  // that are stored at once
    constexpr int batch = channels < 8 ? 2 : 1;
    const Vector& own = part[number];
    const int channel = static_cast<int>(lane / lanes);
    store_ends<number>(first, left);
#pragma unroll
    for (int k = 0; k < 8 / channels; k += batch) {
      uint4 value[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value[i].x), "=r"(value[i].y), "=r"(value[i].z), "=r"(value[i].w)
                     : "r"(own.from + static_cast<uint32>((k + i) * channels * pitch * 4))
                     : "memory");
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (own.has && (L::rows % 64 == 0 || channel + (k + i) * channels < left)) {
          asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(
                           sample + own.to + bytes_of(first + (k + i) * channels)),
                       "r"(value[i].x), "r"(value[i].y), "r"(value[i].z), "r"(value[i].w));
        }
      }
    }
  }

 private:
  // Bytes of so many channels of the output.
  static __device__ __forceinline__ uint64 bytes_of(int channels) {
    return static_cast<uint64>(channels) * channel_bytes;
  }
  static __device__ __forceinline__ uint32 wrap(uint32 word) { return word < pitch ? word : word - pitch; }

  template <int number>
  __device__ __forceinline__ void place() {
    constexpr uint32 lanes = lanes_of(number);
    Vector& own = part[number];
    const uint32 word = 4 * (lane % lanes) + number * 8 * first_pairs;
    own.has = lane % lanes < 2 * pairs_of(number) && word >= shift && word + 4 <= end;
    // Lanes beyond a short row load its first words: behind it the next warp may stage.
    constexpr bool fits = 4 * lanes - number * 8 <= pitch;
    const uint32 from = !fits && !own.has ? 0 : number == 0 ? word : wrap(word);
    own.from = stage + (lane / lanes * pitch + from) * 4;
    own.to = output + lane / lanes * channel_bytes + (word - shift) * 4;
  }
  // Stores the outputs outside of whole vectors: the first two and the last two.
  template <int number>
  __device__ __forceinline__ void store_ends(int first, int left) const {
    if (number == 0 && shift != 0 && end > shift) store_two(shift, first, left);
    if (end % 4 != 0 && end > shift && (end <= 8 * first_pairs) == (number == 0))
      store_two(end - 2, first, left);
  }
  // Stores two words of each channel, by eight lanes.
  __device__ __forceinline__ void store_two(uint32 word, int first, int left) const {
    if (static_cast<int>(lane) >= (left < 8 ? left : 8)) return;
    const uint32 from = stage + (lane * pitch + wrap(word)) * 4;
    const uint32 to = output + lane * channel_bytes + 4 * (word - shift);
    uint32 own, next;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(own), "=r"(next) : "r"(from) : "memory");
    asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};" ::"l"(sample + to + bytes_of(first)), "r"(own),
                 "r"(next));
  }
};

}  // namespace onepass::pingpong
