// The tensors of gemm_gradients.cuh packed: 16-bit elements, [eight channels][position][8].
#pragma once

#include "gemm/backward/common.cuh"

namespace onepass {

struct GemmPackedParameters {
  const void* tensor;
  void* packed;
  uint32* largest;  // two words, zero before the first launch
  float* sums;      // of each channel, for each part of the positions: where they are wanted
  int64 batch;
  int64 length;  // positions of eight channels
  int64 parts;   // of the positions
  int64 pass;    // 0: a look at a part of the elements; 1: packs them; 2: again, where they did not fit
};

// Packs a tensor. A piece of work is a part of the positions of `lanes` groups of eight channels: one, or,
// where channels lie side by side, some, so that a warp reads whole lines.
template <class T>
struct GemmPackTensor {
  static constexpr int threads = 256;
  static constexpr int lanes = T::lanes;
  static constexpr int at_once = threads / lanes;  // positions
  static constexpr bool scales = T::Type::bytes == 4;
  // Whether eight channels may be vectors.
  static constexpr bool vectors_fit = T::stride_c == 1 && T::channels % 8 == 0;
  static constexpr int eights = T::groups / T::conv_groups;  // of a group of the convolution
  using Operand = typename T::Operand;

  const GemmPackedParameters& p;

  __device__ __forceinline__ void run() const {
    if (scales && p.pass == 0) {
      glance();
    } else if (vectors_fit && reinterpret_cast<uint64>(p.tensor) % 16 == 0) {
      pack<vectors_fit>(p.pass == 2);
    } else {
      pack<false>(p.pass == 2);
    }
  }

 private:
  // Runs of 32 elements, evenly apart.
  __device__ __forceinline__ void glance() const {
    uint32 largest = 0;
    const int64 count = T::elements * p.batch;
    const int64 runs = (count + 31) / 32;
    const int64 looked = runs < T::glances ? runs : T::glances;
    const int64 apart = runs / looked;
    const int lane = threadIdx.x % 32;
    const int warps = static_cast<int>(gridDim.x) * (threads / 32);
#pragma unroll 4
    for (int i = blockIdx.x * (threads / 32) + threadIdx.x / 32; i < looked; i += warps) {
      const int64 at = i * apart * 32 + lane;
      if (at < count) gradients::keep_largest(largest, load_one<typename T::Type>(p.tensor, at));
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0 && largest != 0) atomicMax(p.largest, largest);
  }

  template <bool in_vectors>
  __device__ __forceinline__ void pack(bool is_second) const {
    float scale = 1.0f;
    if constexpr (scales) {
      if (is_second) {
        const gradients::Scale own(p.largest);
        if (!own.is_second) return;
        scale = own.value;
      } else {
        scale = gradients::scale_to(__ldcg(p.largest), 8);
      }
    }
    constexpr int pieces = T::groups / lanes;
    for (int64 i = blockIdx.x; i < p.parts * pieces; i += gridDim.x) {
      const int64 part = i / pieces;
      pack_part<in_vectors>(part, static_cast<int>(i - part * pieces) * lanes, scale, is_second);
    }
  }

  template <bool in_vectors>
  __device__ __forceinline__ void pack_part(int64 part, int first_group, float scale, bool is_second) const {
    const int group = first_group + static_cast<int>(threadIdx.x) % lanes;
    const int64 begin = part * T::part_positions + threadIdx.x / lanes;
    auto* const to = static_cast<uint4*>(p.packed) + group * p.length;
    float sum[8] = {};
    uint32 largest = 0;
#pragma unroll 2
    for (int r = 0; r < T::part_positions; r += at_once) {
      const int64 place = begin + r;
      if (place >= p.length) break;
      float x[8];
      load<in_vectors>(place - T::margin, group, x);
      if (scales && !is_second) {
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
    if (is_second) return;
    if constexpr (scales) {
      largest = __reduce_max_sync(0xffffffffu, largest);
      if (threadIdx.x % 32 == 0 && largest > __ldcg(p.largest + 1)) atomicMax(p.largest + 1, largest);
    }
    if constexpr (T::has_sums) leave_sums(part, first_group, sum);
  }

  // Over the threads of each group of channels, in order.
  __device__ __forceinline__ void leave_sums(int64 part, int first_group, float (&sum)[8]) const {
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
      p.sums[((first_group + own) * 8 + k) * p.parts + part] = total;
    }
    __syncthreads();
  }

  // Eight channels of a flat position; zeros where nothing is.
  template <bool in_vectors>
  __device__ __forceinline__ void load(int64 flat, int group, float (&x)[8]) const {
    const auto whole = static_cast<uint32>(flat);
    const uint32 n = whole / static_cast<uint32>(T::sample);
    const uint32 in_sample = whole - n * static_cast<uint32>(T::sample);
    const uint32 z = in_sample / static_cast<uint32>(T::plane);
    const uint32 in_plane = in_sample - z * static_cast<uint32>(T::plane);
    const uint32 y = in_plane / static_cast<uint32>(T::pitch);
    const uint32 column = in_plane - y * static_cast<uint32>(T::pitch);
    const bool inside = flat >= 0 && n < static_cast<uint32>(p.batch) && z < static_cast<uint32>(T::size0) &&
                        y < static_cast<uint32>(T::size1) && column < static_cast<uint32>(T::size2);
    // Of the group's channels in a convolution in groups.
    const int whole_group = T::conv_groups == 1 ? 0 : group / eights;
    const int first = (group - whole_group * eights) * 8;
    const int64 at = static_cast<int64>(n) * T::stride_n + (whole_group * T::channels + first) * T::stride_c +
                     z * T::stride0 + y * T::stride1 + column * T::stride2;
    if constexpr (in_vectors) {
      if (inside && first < T::channels) {
        Packed<typename T::Type, 8> vector;
        vector.load(p.tensor, at, true);
        vector.unpack(x);
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] = 0.0f;
      }
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool exists = inside && (T::channels == eights * 8 || first + k < T::channels);
        x[k] = exists ? load_one<typename T::Type>(p.tensor, at + k * T::stride_c) : 0.0f;
      }
    }
  }
};

}  // namespace onepass
