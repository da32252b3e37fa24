// Packs the weights as the left operand of gemm/backward/input_gradient.cuh, channel by channel scaled.
#pragma once

#include "gemm/backward/common.cuh"

namespace onepass {

// Layout: [tile of 64 channels][tap group][16 channels of dh][tap][8 of them][channel][8]. There is a block
// for each channel of dx, and for those that fill up a tile. Each group of a convolution begins a tile.
template <class N>
struct GemmPackAdjoint {
  using Parameters = GemmPackAdjointParameters;
  const Parameters& p;

  static constexpr int threads = 256;
  static constexpr int terms = N::in_channels * N::taps;
  static constexpr int group_rows = (N::channels + 63) / 64 * 64;
  // Channel within its group.
  static __device__ __forceinline__ int in_group(int o) { return N::conv_groups == 1 ? o : o % group_rows; }

  static __device__ __forceinline__ int64 index(int padded, int c, int t) {
    const int o = in_group(padded);
    return (padded - o) / group_rows * (static_cast<int64>(N::in_channels) * N::channels * N::taps) +
           index_in_group(o, c, t);
  }
  static __device__ __forceinline__ int64 index_in_group(int o, int c, int t) {
    return N::weights_by_input ? (static_cast<int64>(c) * N::channels + o) * N::taps + t
                               : (static_cast<int64>(o) * N::in_channels + c) * N::taps + t;
  }

  __device__ __forceinline__ void run() const {
    __shared__ uint32 of_warp[threads / 32];
    const int o = static_cast<int>(blockIdx.x);
    const bool exists = in_group(o) < N::channels;
    float scale = 1.0f;
    if constexpr (N::scales) {
      uint32 largest = 0;
      if (exists) {
        for (int i = threadIdx.x; i < terms; i += threads)
          gradients::keep_largest(
              largest, load_one<typename N::Weight>(p.weights, index(o, i / N::taps, i % N::taps)));
      }
      largest = __reduce_max_sync(0xffffffffu, largest);
      if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
      __syncthreads();
      for (int i = 0; i < threads / 32; ++i) largest = of_warp[i] > largest ? of_warp[i] : largest;
      scale = gradients::scale_to(largest, 13);
    }
    if (threadIdx.x == 0) p.scales[o] = 1.0f / scale;
    constexpr int octets = N::chunks * 2;
    for (int i = threadIdx.x; i < octets * N::taps; i += threads) {
      const int tap = i % N::taps;
      const int octet = i / N::taps;
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = octet * 8 + k;
        x[k] = exists && c < N::in_channels
                   ? load_one<typename N::Weight>(p.weights, index(o, c, tap)) * scale
                   : 0.0f;
      }
      const int64 place =
          ((static_cast<int64>(o / 64) * N::tap_groups + tap / N::group_taps) * N::chunks + octet / 2) *
              N::group_taps +
          tap % N::group_taps;
      using Operand = typename N::Operand;
      static_cast<uint4*>(p.packed)[(place * 2 + octet % 2) * 64 + o % 64] =
          uint4{Operand::pack(x[0], x[1]), Operand::pack(x[2], x[3]), Operand::pack(x[4], x[5]),
                Operand::pack(x[6], x[7])};
    }
  }
};

}  // namespace onepass
