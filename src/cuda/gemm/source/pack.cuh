// Packs the weights of a wide convolution as mainloops read them: 16-bit elements,
//   [group][channel tile][chunk of input channels][tap][part][8 input channels][output channel][8]
// and zeros where there is no channel. Where `joint_taps` is 2, two taps are neighbours within a part, and
// the last one may be of zeros: [tap / 2][part][tap % 2]. f32 weights are scaled by a power of two for each
// output channel, so that all fit in f16. Where they are split, the second part is the remainder of the
// first. Where taps along x are rows (gemm/mma/row_taps.cuh), an output channel has `row_taps` of them.
#pragma once

#include "device/reduce.cuh"
#include "gemm/gemm.cuh"

namespace onepass {

// A block for every `pack_channels` output channels, those that only fill a tile too. Where `pack_staged`, it
// reads its weights once, to shared memory.
template <class C, class Numbers, class ParametersOfKernel = GemmPackParameters>
struct GemmPack {
  using Parameters = ParametersOfKernel;
  static constexpr int threads = 256;
  static constexpr int warps = threads / 32;
  static constexpr int channels = Numbers::pack_channels;
  // Of the packed weights. Where `span` taps along x share a vector (gemm/mma.cuh), they are fewer than those
  // of the weights.
  static constexpr int packed_taps = Numbers::taps;
  static constexpr int x_taps = static_cast<int>(C::count(2, 0));
  static constexpr int x_spans = (x_taps + Numbers::span - 1) / Numbers::span;
  static constexpr int taps = Numbers::span == 1 ? packed_taps : packed_taps / x_spans * x_taps;
  static constexpr int terms = C::in_channels * taps;
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  // As GemmGeometry has them, or the tiles of gemm_mma.
  static constexpr int row_taps = Numbers::row_taps;
  static constexpr int rows = static_cast<int>(C::channels) * classes * row_taps;
  using Rows = GroupedRows<C, Numbers::padded_channels, rows>;
  static_assert(Rows::of_group % channels == 0);
  using Weight = typename C::Weight;
  using Operand = typename Numbers::Operand;
  static constexpr int team = threads / channels;  // threads that measure a channel
  static_assert(team % 32 == 0);

  const Parameters& p;
  unsigned char* staged;  // [channel][term]

  // Whether a row has a tap. The last row of a strided convolution may have fewer.
  static __device__ __forceinline__ bool has_tap(int row, int tap) {
    if constexpr (row_taps == 1) return true;
    constexpr int count = static_cast<int>(C::count(2, 0));
    return Rows::in_group(row) % row_taps * count + tap % count < static_cast<int>(C::kernel(2));
  }
  // Where the weight of a term (input channel, tap of the row's class) lies.
  static __device__ __forceinline__ int64 index(int row, int term) {
    return Rows::group(row) * group_weights<C> + index_in_group(Rows::in_group(row), term);
  }
  static __device__ __forceinline__ int64 index_in_group(int row, int term) {
    if constexpr (!C::transposed && row_taps == 1) return static_cast<int64>(row) * terms + term;
    const int c = term / taps;
    const int o = row / (classes * row_taps);
    const int in_channel = row - o * (classes * row_taps);
    const int tap = row_taps == 1 ? gemm::tap_of_class<C>(in_channel, term - c * taps)
                                  : gemm::tap_of_class<C>(0, term - c * taps) +
                                        in_channel * static_cast<int>(C::count(2, 0));
    return (C::transposed ? static_cast<int64>(c) * C::channels + o
                          : static_cast<int64>(o) * C::in_channels + c) *
               C::taps +
           tap;
  }

  // Copies the weights of a channel and leaves the largest magnitude (NaN where there is one) and the sum of
  // all; by `team` threads each.
  __device__ __forceinline__ void measure(int first, float (&largest)[channels],
                                          float (&sum)[channels]) const {
    __shared__ uint32 of_warp[warps];
    __shared__ float sum_of_warp[warps];
    const int own = static_cast<int>(threadIdx.x) / team;
    const int o = first + own;
    float most = 0.0f, total = 0.0f;
    if (Rows::exists(o)) {
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x) % team; i < terms; i += team) {
        if (!has_tap(o, i % taps)) continue;
        const int64 from = index(o, i);
        if constexpr (Numbers::pack_staged) {
          using Word = ElementBits<Weight>;
          reinterpret_cast<Word*>(staged)[own * terms + i] = static_cast<const Word*>(p.weights)[from];
        }
        const float w = fabsf(load_one<Weight>(p.weights, from));
        most = w > most || w != w ? w : most;
        total += w;
      }
    }
    // Magnitudes in order are their bits in order, and NaN is beyond infinity.
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    total = lanes_sum<32>(total);
    if (threadIdx.x % 32 == 0) {
      of_warp[threadIdx.x / 32] = bits;
      sum_of_warp[threadIdx.x / 32] = total;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < channels; ++k) {
      uint32 all = 0;
      sum[k] = 0.0f;
      for (int i = k * warps / channels; i < (k + 1) * warps / channels; ++i) {
        all = all > of_warp[i] ? all : of_warp[i];
        sum[k] += sum_of_warp[i];
      }
      largest[k] = __uint_as_float(all);
    }
  }

  __device__ __forceinline__ float weight(int o, int own, int term) const {
    if constexpr (Numbers::pack_staged) return load_one<Weight>(staged, own * terms + term);
    return load_one<Weight>(p.weights, index(o, term));
  }

  // The weights' term of a packed channel and tap; -1 where there is none.
  static __device__ __forceinline__ int term_of(int channel, int tap) {
    constexpr auto all = static_cast<int>(C::in_channels);
    if constexpr (Numbers::span == 1) return channel < all ? channel * taps + tap : -1;
    const int row = tap / x_spans;
    const int own = (tap - row * x_spans) * Numbers::span + channel / all;
    if (channel >= all * Numbers::span || own >= x_taps) return -1;
    return channel % all * taps + row * x_taps + own;
  }

  __device__ __forceinline__ void run() const {
    const int first = static_cast<int>(blockIdx.x) * channels;
    float largest[channels], sum[channels], scale[channels];
    measure(first, largest, sum);
#pragma unroll
    for (int k = 0; k < channels; ++k) {
      scale[k] = 1.0f;
      if (!Rows::exists(first + k)) continue;
      const bool finite = largest[k] <= 3.4028235e38f;
      if (Numbers::guards && finite && largest[k] > 0.0f)
        scale[k] = gemm::operand_scale(__float_as_uint(largest[k]));
      if (threadIdx.x == 0) {
        p.scales[first + k] = 1.0f / scale[k] / gemm::x_scale<Numbers>;
        if constexpr (is_same<Parameters, PingpongPackParameters>) {
          p.sums[first + k] = finite ? sum[k] : __uint_as_float(0x7fffffffu);
        } else {
          // Sums are positive: their bits are in order. A channel has no more than its largest row, each tap.
          atomicMax(reinterpret_cast<uint32*>(p.scales + Numbers::padded_channels),
                    __float_as_uint(sum[k] * row_taps));
          if (!finite) atomicMax(p.mark, static_cast<uint32>(redo_all));
        }
      }
    }
    constexpr int joints = (packed_taps + Numbers::joint_taps - 1) / Numbers::joint_taps;
    constexpr int padded_taps = joints * Numbers::joint_taps;
    constexpr int eights = Numbers::chunks * padded_taps * (Numbers::chunk_channels / 8);
    for (int i = threadIdx.x; i < eights * channels; i += threads) {
      // Output channels run fastest, for the stores; then taps.
      const int own = i % channels;
      const int o = first + own;
      const int tap = i / channels % padded_taps;
      const int eight = i / channels / padded_taps;  // of all input channels
      float factor = scale[0];
#pragma unroll
      for (int k = 1; k < channels; ++k) factor = own == k ? scale[k] : factor;
      float value[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool exists = Rows::exists(o) && tap < packed_taps;
        const int term = term_of(eight * 8 + k, tap);
        value[k] = exists && term >= 0 && has_tap(o, term % taps) ? weight(o, own, term) * factor : 0.0f;
      }
      constexpr int eights_of_chunk = Numbers::chunk_channels / 8;
      const int64 of_joint =
          (static_cast<int64>(o / Numbers::tile_channels) * Numbers::chunks + eight / eights_of_chunk) *
              joints +
          tap / Numbers::joint_taps;
#pragma unroll
      for (int part = 0; part < Numbers::parts; ++part) {
        const int64 place =
            ((of_joint * Numbers::parts + part) * Numbers::joint_taps + tap % Numbers::joint_taps) *
                eights_of_chunk +
            eight % eights_of_chunk;
        uint32 word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          word[k] = pack_operands<C, Operand>(value[2 * k], value[2 * k + 1]);
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
