// The weights of a wide convolution as gemm.cuh reads them: 16-bit elements,
//   [channel tile][chunk of input channels][tap][part][8 input channels][output channel][8]
// and zeros where there is no channel. f32 weights are scaled by a power of two for each output channel, so
// that f16 has room for all of them, and where they are split the second part is what the first leaves.
#pragma once

#include "gemm.cuh"
#include "reduce.cuh"

namespace onepass {

struct GemmPackParameters {
  const void* weights;
  void* packed;
  float*
      scales;    // of each channel, one over what it was scaled by; then the largest sum of magnitudes (zero)
  uint32* only;  // where not null: marked where a weight is not finite, as in gemm.cuh
  int64 batch;
};

// A block for each output channel, those that only fill a tile too.
template <class C, class Numbers>
struct GemmPack {
  static constexpr int threads = 256;
  static constexpr int terms = C::in_channels * C::taps;
  using Operand = typename Numbers::Operand;

  const GemmPackParameters& p;

  static __device__ __forceinline__ int64 index(int o, int c, int t) {
    return C::transposed ? (static_cast<int64>(c) * C::channels + o) * C::taps + t
                         : (static_cast<int64>(o) * C::in_channels + c) * C::taps + t;
  }

  // The largest magnitude (NaN where there is one) and the sum of all.
  __device__ __forceinline__ void measure(int o, float& largest, float& sum) const {
    __shared__ float scratch[2 * threads / 32];
    largest = 0.0f;
    float total[1] = {};
    for (int i = threadIdx.x; i < terms; i += threads) {
      const float w = fabsf(load_one<typename C::Weight>(p.weights, index(o, i / C::taps, i % C::taps)));
      largest = w > largest || w != w ? w : largest;
      total[0] += w;
    }
    // Magnitudes in order are their bits in order, and NaN is beyond infinity.
    uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    __shared__ uint32 of_warp[threads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
    block_sum<threads>(total, scratch);
    for (int i = 0; i < threads / 32; ++i) bits = bits > of_warp[i] ? bits : of_warp[i];
    largest = __uint_as_float(bits);
    sum = total[0];
  }

  __device__ __forceinline__ void run() const {
    const int o = static_cast<int>(blockIdx.x);
    const bool exists = o < C::channels;
    float scale = 1.0f;
    if (exists) {
      float largest, sum;
      measure(o, largest, sum);
      const bool finite = largest <= 3.4028235e38f;
      if (Numbers::guards && finite && largest > 0.0f) {
        // To [2^13, 2^14), as far as the scale and its inverse are normal numbers.
        int exponent = 13 - (static_cast<int>(__float_as_uint(largest) >> 23) - 127);
        exponent = exponent > 120 ? 120 : exponent < -120 ? -120 : exponent;
        scale = __uint_as_float(static_cast<uint32>(127 + exponent) << 23);
      }
      if (threadIdx.x == 0) {
        p.scales[o] = 1.0f / scale / (Numbers::parts == 2 ? gemm::split_scale : 1.0f);
        // Sums are positive: their bits are in order.
        atomicMax(reinterpret_cast<uint32*>(p.scales + Numbers::padded_channels), __float_as_uint(sum));
        if (!finite && p.only != nullptr) atomicMax(p.only + p.batch, static_cast<uint32>(redo_all));
      }
    }
    constexpr int eights = Numbers::chunks * C::taps * (Numbers::chunk_channels / 8);
    for (int i = threadIdx.x; i < eights; i += threads) {
      // Channels run slowest for the loads' sake: neighbouring threads have neighbouring taps.
      const int tap = i % C::taps;
      const int eight = i / C::taps;  // of all input channels
      float value[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = eight * 8 + k;
        value[k] = exists && c < C::in_channels
                       ? load_one<typename C::Weight>(p.weights, index(o, c, tap)) * scale
                       : 0.0f;
      }
      constexpr int eights_of_chunk = Numbers::chunk_channels / 8;
      const int64 of_tap =
          (static_cast<int64>(o / Numbers::tile_channels) * Numbers::chunks + eight / eights_of_chunk) *
              C::taps +
          tap;
#pragma unroll
      for (int part = 0; part < Numbers::parts; ++part) {
        const int64 place = (of_tap * Numbers::parts + part) * eights_of_chunk + eight % eights_of_chunk;
        uint32 word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          word[k] = Operand::pack(value[2 * k], value[2 * k + 1]);
          float first, second;
          Operand::unpack(word[k], first, second);
          value[2 * k] -= first;
          value[2 * k + 1] -= second;
        }
        static_cast<uint4*>(p.packed)[place * Numbers::tile_channels + o % Numbers::tile_channels] =
            uint4{word[0], word[1], word[2], word[3]};
      }
    }
  }
};

}  // namespace onepass
