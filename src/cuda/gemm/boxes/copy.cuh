// Copies x for the row "gemm_boxes" where tensor maps cannot read it as it lies: as 16-bit elements with
// channels side by side, a multiple of eight of them.
#pragma once

#include "device/reduce.cuh"
#include "gemm/packed/weights.cuh"

namespace onepass {

// The copy is [group][sample][z][y][x][channel]. An item is 4,096 elements of a sample's group, some
// positions by the channels of a chunk. Elements pass through shared memory, so that lanes read neighbours of
// x, positions or channels, and write vectors of eight channels. f32 elements are scaled and rounded to f16;
// the largest magnitude of each sample is left for a judge.
template <class C, class Tail, class Numbers>
struct BoxesCopy {
  using Input = typename Tail::Input;
  using Operand = typename Numbers::Operand;
  static constexpr int threads = 256;
  static constexpr int channels = Numbers::copied_channels;
  static constexpr int tile = Numbers::chunk_channels;
  static constexpr int tiles = (channels + tile - 1) / tile;
  static constexpr int positions = 4096 / tile;
  static constexpr int pairs = tile / 2;
  static constexpr int pitch = pairs + 1;  // words, an odd number of banks
  static constexpr int shared_bytes = positions * pitch * 4;
  static constexpr int rows_in = static_cast<int>(C::input_size(1));
  static constexpr int columns_in = static_cast<int>(C::input_size(2));
  static constexpr int spatial = static_cast<int>(C::input_size(0)) * rows_in * columns_in;
  static constexpr int parts = (spatial + positions - 1) / positions;
  static constexpr bool channels_last = C::input_stride(1) == 1;
  static constexpr bool pairs_fit = channels_last && C::in_channels % 2 == 0 && C::input_stride(0) % 2 == 0 &&
                                    C::input_stride(2) % 2 == 0 && C::input_stride(3) % 2 == 0 &&
                                    C::input_stride(4) % 2 == 0;

  template <class Parameters>
  static __device__ __forceinline__ void run(const Parameters& p, int64 item, uint32* shared) {
    const int64 n = item / (parts * tiles);  // a group of a sample
    const int of_sample = static_cast<int>(item - n * (parts * tiles));
    const int first_channel = of_sample % tiles * tile;
    const int first = of_sample / tiles * positions;
    const int64 from = input_origin<C>(n);
    const bool aligned = pairs_fit && reinterpret_cast<uint64>(p.input) % (2 * Input::bytes) == 0;
    const int thread = static_cast<int>(threadIdx.x);
    Packed<Input, 2> loaded[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int pair = pair_of(thread, k);
      const int c = first_channel + 2 * pair;
      const int flat = first + position_of(thread, k);
      const int64 at = from + offset(flat) + c * C::input_stride(1);
      const bool inside = flat < spatial;
      loaded[k].word[0] = 0;
      if constexpr (Input::bytes == 4) loaded[k].word[1] = 0;
      if (pairs_fit) {
        if (inside && c < static_cast<int>(C::in_channels)) loaded[k].load(p.input, at, aligned);
      } else {
        const float low =
            inside && c < static_cast<int>(C::in_channels) ? load_one<Input>(p.input, at) : 0.0f;
        const float high = inside && c + 1 < static_cast<int>(C::in_channels)
                               ? load_one<Input>(p.input, at + C::input_stride(1))
                               : 0.0f;
        const float both[2] = {low, high};
        loaded[k].pack(both);
      }
    }
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float x[2];
      loaded[k].unpack(x);
      if constexpr (Numbers::guards) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[i] *= gemm::input_scale;
          largest = gemm::largest_of(largest, x[i]);
        }
      }
      shared[position_of(thread, k) * pitch + pair_of(thread, k)] = pack_operands<C, Operand>(x[0], x[1]);
    }
    if constexpr (Numbers::guards) {
      const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      if (thread % 32 == 0 && bits > __ldcg(p.guard + n)) atomicMax(p.guard + n, bits);
    }
    __syncthreads();
    const int64 samples = p.batch / C::groups;
    const int64 to = (n % C::groups * samples + n / C::groups) * spatial;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = thread + k * threads;
      const int position = i / (tile / 8);
      const int octet = i % (tile / 8);
      const int c = first_channel + octet * 8;
      const int flat = first + position;
      if (flat >= spatial || c >= channels) continue;
      const uint32* const own = shared + position * pitch + octet * 4;
      *reinterpret_cast<uint4*>(static_cast<uint16*>(p.packed_input) + (to + flat) * channels + c) =
          uint4{own[0], own[1], own[2], own[3]};
    }
  }

 private:
  // A thread's k-th pair of channels, and its position: lanes are neighbours in memory.
  static __device__ __forceinline__ int pair_of(int thread, int k) {
    return channels_last ? thread % pairs : thread / positions + k * (threads / positions);
  }
  static __device__ __forceinline__ int position_of(int thread, int k) {
    return channels_last ? thread / pairs + k * (threads / pairs) : thread % positions;
  }
  // Where a position lies in a channel of x.
  static __device__ __forceinline__ int64 offset(int flat) {
    const int row = flat / columns_in;
    const int x = flat - row * columns_in;
    const int z = row / rows_in;
    return z * C::input_stride(2) + (row - z * rows_in) * C::input_stride(3) + x * C::input_stride(4);
  }
};

}  // namespace onepass
