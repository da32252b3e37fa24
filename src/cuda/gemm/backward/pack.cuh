// Packs a tensor for the products of gemm/backward/gradients.cuh: 16-bit elements,
// [eight channels][position][8].
#pragma once

#include "gemm/backward/common.cuh"

namespace onepass {

// A block packs a part of the positions of `lanes` octets of channels. That is one octet, or several where
// channels are contiguous, so that a warp reads whole lines.
template <class T>
struct GemmPackTensor {
  using Parameters = GemmPackTensorParameters;
  static constexpr int threads = 256;
  static constexpr int lanes = T::lanes;
  static constexpr int at_once = threads / lanes;  // positions
  static constexpr bool scales = T::Type::bytes == 4;
  // Eight channels can be loaded as vectors.
  static constexpr bool vectors_fit = T::stride_c == 1 && T::channels % 8 == 0;
  static constexpr int group_octets = T::octets / T::conv_groups;  // of a group of the convolution
  using Operand = typename T::Operand;

  const Parameters& p;

  __device__ __forceinline__ void run() const {
    if (scales && p.pass == pack_probe) {
      probe();
    } else if (vectors_fit && reinterpret_cast<uint64>(p.tensor) % 16 == 0) {
      pack<vectors_fit>(p.pass == pack_again);
    } else {
      pack<false>(p.pass == pack_again);
    }
  }

 private:
  // Finds the largest magnitude in runs of 32 elements, evenly spaced.
  __device__ __forceinline__ void probe() const {
    uint32 largest = 0;
    const int64 count = T::elements * p.batch;
    const int64 runs = (count + 31) / 32;
    const int64 probes = runs < T::probes ? runs : T::probes;
    const int64 spacing = runs / probes;
    const int lane = threadIdx.x % 32;
    const int warps = static_cast<int>(gridDim.x) * (threads / 32);
#pragma unroll 4
    for (int i = blockIdx.x * (threads / 32) + threadIdx.x / 32; i < probes; i += warps) {
      const int64 at = i * spacing * 32 + lane;
      if (at < count) gradients::keep_largest(largest, load_one<typename T::Type>(p.tensor, at));
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0 && largest != 0) atomicMax(p.largest, largest);
  }

  template <bool in_vectors>
  __device__ __forceinline__ void pack(bool is_again) const {
    float scale = 1.0f;
    if constexpr (scales) {
      if (is_again) {
        const gradients::Scale own(p.largest);
        if (!own.is_corrected) return;
        scale = own.value;
      } else {
        scale = gradients::probed_scale(__ldcg(p.largest));
      }
    }
    constexpr int pieces = T::octets / lanes;
    for (int64 i = blockIdx.x; i < p.parts * pieces; i += gridDim.x) {
      const int64 part = i / pieces;
      pack_part<in_vectors>(part, static_cast<int>(i - part * pieces) * lanes, scale, is_again);
    }
  }

  template <bool in_vectors>
  __device__ __forceinline__ void pack_part(int64 part, int first_octet, float scale, bool is_again) const {
    const int octet = first_octet + static_cast<int>(threadIdx.x) % lanes;
    const int64 begin = part * T::part_positions + threadIdx.x / lanes;
    auto* const to = static_cast<uint4*>(p.packed) + octet * p.length;
    float sum[8] = {};
    uint32 largest = 0;
#pragma unroll 2
    for (int r = 0; r < T::part_positions; r += at_once) {
      const int64 place = begin + r;
      if (place >= p.length) break;
      float x[8];
      load<in_vectors>(place - T::margin, octet, x);
      if (scales && !is_again) {
#pragma unroll
        for (int k = 0; k < 8; ++k) gradients::keep_largest(largest, x[k]);
      }
      if constexpr (T::has_sums) {
#pragma unroll
        for (int k = 0; k < 8; ++k) sum[k] += x[k];
      }
      uint32 word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) word[k] = Operand::pack(x[2 * k] * scale, x[2 * k + 1] * scale);
      to[place] = uint4{word[0], word[1], word[2], word[3]};
    }
    if (is_again) return;
    if constexpr (scales) {
      largest = __reduce_max_sync(0xffffffffu, largest);
      if (threadIdx.x % 32 == 0 && largest > __ldcg(p.largest + 1)) atomicMax(p.largest + 1, largest);
    }
    if constexpr (T::has_sums) leave_sums(part, first_octet, sum);
  }

  // Adds the sums of the threads of each octet, in a fixed order.
  __device__ __forceinline__ void leave_sums(int64 part, int first_octet, float (&sum)[8]) const {
    constexpr int warps = threads / 32;
    __shared__ float scratch[8][lanes][warps];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int offset = 16; offset >= lanes; offset /= 2)
        sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], offset);
      if (lane < lanes) scratch[k][lane][threadIdx.x / 32] = sum[k];
    }
    __syncthreads();
    if (threadIdx.x < 8 * lanes) {
      const int k = static_cast<int>(threadIdx.x) % 8;
      const int own = static_cast<int>(threadIdx.x) / 8;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) total += scratch[k][own][w];
      p.sums[((first_octet + own) * 8 + k) * p.parts + part] = total;
    }
    __syncthreads();
  }

  // Loads eight channels of a flat position; zeros in the gaps.
  template <bool in_vectors>
  __device__ __forceinline__ void load(int64 flat, int octet, float (&x)[8]) const {
    const FlatPosition<T> position(static_cast<uint32>(flat));
    const uint32 n = position.n, z = position.z, y = position.y, column = position.x;
    const bool inside = flat >= 0 && n < static_cast<uint32>(p.batch) && z < static_cast<uint32>(T::size0) &&
                        y < static_cast<uint32>(T::size1) && column < static_cast<uint32>(T::size2);
    const int group = T::conv_groups == 1 ? 0 : octet / group_octets;  // of the convolution
    const int first = (octet - group * group_octets) * 8;              // channel of the group
    const int64 at = static_cast<int64>(n) * T::stride_n + (group * T::channels + first) * T::stride_c +
                     z * T::stride0 + y * T::stride1 + column * T::stride2;
    load_octet<typename T::Type, T::channels, T::channels == group_octets * 8, in_vectors>(
        p.tensor, at, T::stride_c, first, inside, x);
  }
};

}  // namespace onepass
