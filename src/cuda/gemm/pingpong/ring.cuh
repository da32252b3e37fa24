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
  static constexpr int64 channel_bytes = L::C::stride(1) * 4;

  uint32 stage;    // address of the ring
  uint64 output;   // address of the row's first output in the warp's first channel
  uint32 shift;    // that address modulo 16 bytes, in words
  uint32 end;      // one past the last word
  uint32 staged;   // address of the lane's first pair
  uint32 wrapped;  // address of its first pair of the second part
  uint32 lane;

  __device__ __forceinline__ RowRing(uint32 stage, uint64 output, int outputs, int lane)
      : stage(stage),
        output(output),
        shift(static_cast<uint32>(output) / 4 % 4),
        end(shift + static_cast<uint32>(outputs)),
        lane(static_cast<uint32>(lane)) {
    const uint32 first = shift + this->lane % 4 * 2;
    const uint32 begin = stage + this->lane / 4 * (pitch * 4);
    staged = begin + first * 4;
    const uint32 next = first + 8 * first_pairs;
    wrapped = begin + (next < pitch ? next : next - pitch) * 4;
  }

  // Stages the lane's pair j of the row, in its channel.
  __device__ __forceinline__ void put(int j, float value, float next) const {
    const uint32 to = j < first_pairs    ? staged + 32 * j
                      : j == first_pairs ? wrapped
                                         : staged + static_cast<uint32>(32 * j - 4 * pitch);
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(value), "f"(next) : "memory");
  }

  // Stores a part that all lanes have staged: eight channels from `first` on, of which `left` exist.
  template <int part>
  __device__ __forceinline__ void store(int first, int left) const {
    constexpr int lanes = lanes_of(part);
    constexpr int channels = 32 / lanes;  // that are stored at once
    constexpr int batch = channels < 8 ? 2 : 1;
    const uint32 word = 4 * (lane % lanes) + part * 8 * first_pairs;
    const bool has = lane % lanes < 2 * pairs_of(part) && word >= shift && word + 4 <= end;
    const int channel = static_cast<int>(lane / lanes);
    // Lanes beyond a short row load its first words: behind it the next warp may stage.
    constexpr bool fits = 4 * lanes - part * 8 <= pitch;
    const uint32 place = !fits && !has ? 0 : part == 0 || word < pitch ? word : word - pitch;
    const uint32 from = stage + (lane / lanes * pitch + place) * 4;
    const uint64 to =
        output + (first + channel) * channel_bytes + static_cast<int64>(static_cast<int>(word - shift)) * 4;
    store_ends<part>(first, left);
#pragma unroll
    for (int k = 0; k < 8 / channels; k += batch) {
      uint4 value[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value[i].x), "=r"(value[i].y), "=r"(value[i].z), "=r"(value[i].w)
                     : "r"(from + static_cast<uint32>((k + i) * channels * pitch * 4))
                     : "memory");
      }
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        if (has && channel + (k + i) * channels < left) {
          asm volatile(
              "st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + (k + i) * channels * channel_bytes),
              "r"(value[i].x), "r"(value[i].y), "r"(value[i].z), "r"(value[i].w));
        }
      }
    }
  }

 private:
  // Stores the outputs outside of whole vectors: the first two and the last two.
  template <int part>
  __device__ __forceinline__ void store_ends(int first, int left) const {
    if (part == 0 && shift != 0 && end > shift) store_two(shift, first, left);
    if (end % 4 != 0 && end > shift && (end <= 8 * first_pairs) == (part == 0))
      store_two(end - 2, first, left);
  }
  // Stores two words of each channel, by eight lanes.
  __device__ __forceinline__ void store_two(uint32 word, int first, int left) const {
    if (static_cast<int>(lane) >= (left < 8 ? left : 8)) return;
    const uint32 from = stage + (lane * pitch + (word < pitch ? word : word - pitch)) * 4;
    const uint64 to = output + (first + static_cast<int64>(lane)) * channel_bytes + 4 * (word - shift);
    uint32 own, next;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(own), "=r"(next) : "r"(from) : "memory");
    asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(own), "r"(next));
  }
};

}  // namespace onepass::pingpong
