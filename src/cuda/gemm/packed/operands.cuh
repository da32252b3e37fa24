// Packs the operands of the row "gemm_packed", scales rows of f32 weights, and judges what was packed.
#pragma once

#include "device/reduce.cuh"
#include "gemm/packed/weights.cuh"

namespace onepass {

// Packs weights and x, or one of them: the first blocks have pieces of weights, the others x.
template <class C, class Tail, class Numbers>
struct PackedGemmOperands {
  using Pieces = PackedGemmWeightPieces<C, Numbers>;
  using Geometry = typename Pieces::Geometry;
  using Input = typename Tail::Input;
  using Operand = typename Numbers::Operand;
  static constexpr int threads = 256;
  static constexpr int group_pairs = Numbers::input_channels / 16;  // of eight channels, in a group
  static constexpr int pairs = static_cast<int>(C::groups) * group_pairs;
  static constexpr bool vectors_fit = C::input_stride(1) == 1 && C::in_channels % 8 == 0 &&
                                      C::input_stride(0) % 8 == 0 && C::input_stride(2) % 8 == 0 &&
                                      C::input_stride(3) % 8 == 0 && C::input_stride(4) % 8 == 0;

  using Team = gemm::PackTeam;
  static_assert(Pieces::template bytes_of<Team>() <= Numbers::piece_bytes);

  const PackedGemmParameters<Tail::parameters>& p;
  unsigned char* shared;

  __device__ __forceinline__ void run() const {
    const bool is_input_alone = p.step == step_pack_input;
    const int item = static_cast<int>(blockIdx.x) + (is_input_alone ? Pieces::items : 0);
    if (!Numbers::guards && blockIdx.x == 0 && p.step != step_pack_weights) {
      // 16-bit samples are not marked one by one: the marks are cleared here.
      for (int64 i = threadIdx.x; i < p.batch; i += threads) p.only[i] = 0;
      for (int64 i = threadIdx.x; i < 4 * p.batch + 4; i += threads) p.control[i] = 0;
    }
    if (item < Pieces::items) {
      Pieces::run(p, item, shared, Team{static_cast<int>(threadIdx.x)});
    } else if (vectors_fit && reinterpret_cast<uint64>(p.input) % 16 == 0) {
      pack_input<vectors_fit>(item - Pieces::items);
    } else {
      pack_input<false>(item - Pieces::items);
    }
  }

 private:
  // 16 channels of 256 positions.
  template <bool in_vectors>
  __device__ __forceinline__ void pack_input(int item) const {
    const int part = item / pairs;
    const int pair = item - part * pairs;
    const int group = C::groups == 1 ? 0 : pair / group_pairs;
    const int first = (pair - group * group_pairs) * 16;  // channel of the group
    const int64 place = static_cast<int64>(part) * threads + threadIdx.x;
    const int64 flat = place - Numbers::margin;
    const FlatPosition<Numbers> at(static_cast<uint32>(flat));
    const bool inside =
        flat >= 0 && at.n < Geometry::samples(p) && at.z < static_cast<uint32>(C::input_size(0)) &&
        at.y < static_cast<uint32>(C::input_size(1)) && at.x < static_cast<uint32>(C::input_size(2));
    const int64 from = static_cast<int64>(at.n) * C::input_stride(0) +
                       (group * C::in_channels + first) * C::input_stride(1) + at.z * C::input_stride(2) +
                       at.y * C::input_stride(3) + at.x * C::input_stride(4);
    float x[16];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_octet<Input, static_cast<int>(C::in_channels), C::in_channels % 16 == 0, in_vectors>(
          p.input, from + 8 * half * C::input_stride(1), C::input_stride(1), first + 8 * half, inside,
          *reinterpret_cast<float(*)[8]>(x + 8 * half));
    }
    if constexpr (Numbers::guards) {
#pragma unroll
      for (int k = 0; k < 16; ++k) x[k] *= gemm::input_scale;
    }
    if (place < p.length) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        static_cast<uint4*>(p.packed_input)[(2 * pair + half) * p.length + place] =
            uint4{pack_operands<C, Operand>(x[8 * half], x[8 * half + 1]),
                  pack_operands<C, Operand>(x[8 * half + 2], x[8 * half + 3]),
                  pack_operands<C, Operand>(x[8 * half + 4], x[8 * half + 5]),
                  pack_operands<C, Operand>(x[8 * half + 6], x[8 * half + 7])};
      }
    }
    if constexpr (Numbers::guards) {
      float largest = 0.0f;
#pragma unroll
      for (int k = 0; k < 16; ++k) largest = gemm::largest_of(largest, x[k]);
      leave_largest(inside ? static_cast<int>(at.n) * static_cast<int>(C::groups) + group : -1,
                    __float_as_uint(largest));
    }
  }

  // Publishes the largest magnitude of each sample that the warp's positions lie in; n is -1 outside.
  __device__ __forceinline__ void leave_largest(int n, uint32 bits) const {
    const int low = static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<uint32>(n)));
    const int high = __reduce_max_sync(0xffffffffu, n);
    // All positions are of one group. The loop is empty where no lane has a sample.
    for (int own = low < 0 ? 0 : low; own <= high; own += static_cast<int>(C::groups)) {
      const uint32 largest = __reduce_max_sync(0xffffffffu, n == own ? bits : 0u);
      if (threadIdx.x % 32 == 0 && largest > __ldcg(p.guard + own)) atomicMax(p.guard + own, largest);
    }
  }
};

// Scales of rows. Packs rows of f32 weights again whose largest element does not suit weight_scale. A block
// has 32 rows; most blocks find nothing to do.
template <class C, class Numbers, class Pieces, class Parameters>
struct PackedGemmScales {
  using Geometry = typename Pieces::Geometry;
  static constexpr int threads = 256;
  static constexpr int rows = Pieces::rows;

  const Parameters& p;

  __device__ __forceinline__ void run() const {
    __shared__ uint32 again;
    const int first = static_cast<int>(blockIdx.x) * rows;
    if (threadIdx.x < 32) {
      const int o = first + static_cast<int>(threadIdx.x);
      const bool exists = Geometry::exists(o);
      const uint32 bits = exists ? __ldcg(p.row_largest + o) : 0u;
      const float largest = __uint_as_float(bits);
      const bool suits = bits == 0 || (largest < gemm::most_weight && largest >= gemm::least_weight);
      if (exists) p.scales[o] = 1.0f / (gemm::weight_scale * gemm::input_scale);
      leave_sum(exists && suits ? static_cast<float>(__ldcg(p.row_sums + o)) * 0x1p-20f : 0.0f);
      const uint32 others = __ballot_sync(0xffffffffu, !suits);
      if (threadIdx.x == 0) again = others;
    }
    __syncthreads();
    for (uint32 left = again; left != 0; left &= left - 1) pack(first + __ffs(static_cast<int>(left)) - 1);
  }

 private:
  // Publishes the largest of a warp's sums. Bits of positive numbers are ordered as the numbers are.
  __device__ __forceinline__ void leave_sum(float sum) const {
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(sum));
    if (threadIdx.x % 32 == 0)
      atomicMax(reinterpret_cast<uint32*>(p.scales + Numbers::padded_channels), bits);
  }

  __device__ __forceinline__ void pack(int o) const {
    const uint32 bits = __ldcg(p.row_largest + o);
    float scale = 1.0f;
    if (__uint_as_float(bits) <= 3.4028235e38f) {
      scale = gemm::operand_scale(bits);
    } else if (threadIdx.x == 0) {
      atomicMax(reinterpret_cast<uint32*>(p.scales + Numbers::padded_channels + 1),
                static_cast<uint32>(redo_all));
    }
    float sum[1] = {};
    for (int i = threadIdx.x; i < Numbers::input_channels / 8 * Numbers::taps; i += threads) {
      const int eight = i / Numbers::taps;
      const int tap = i - eight * Numbers::taps;
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = eight * 8 + k;
        x[k] = c < C::in_channels && Geometry::has_tap(o, tap)
                   ? load_one<typename C::Weight>(p.parameter[0], Geometry::weight_index(o, c, tap))
                   : 0.0f;
        sum[0] += fabsf(x[k]);
      }
      Pieces::put(p, o, eight / 2, tap, eight % 2, x, scale);
    }
    __shared__ float scratch[2 * threads / 32];
    block_sum<threads>(sum, scratch);
    if (threadIdx.x < 32) leave_sum(sum[0]);
    if (threadIdx.x == 0) p.scales[o] = 1.0f / scale / gemm::input_scale;
  }
};

// Marks samples whose values overflow f16 (f32 operands). A block for each sample; it also clears the control
// words of the redo kernel.
template <class Tail, class Numbers, class Parameters>
struct PackedGemmJudge {
  const Parameters& p;

  __device__ __forceinline__ void run() const {
    const int64 n = blockIdx.x;
    if (n == 0 && threadIdx.x == 0) gemm::mark_by_weights<Numbers>(p);
    if (threadIdx.x < (n == 0 ? 8 : 4))
      p.control[threadIdx.x < 4 ? n * 4 + threadIdx.x : p.batch * 4 + threadIdx.x - 4] = 0;
    if constexpr (Tail::has_norm) {
      constexpr int slabs = Tail::channels / Tail::group_channels;
      float largest = 0.0f;
#pragma unroll 4
      for (int c = threadIdx.x; c < Tail::channels; c += blockDim.x) {
        const float deviation = __ldcg(p.statistics + 2 * (n * slabs + c / Tail::group_channels) + 1);
        largest = gemm::largest_of(largest, Tail::weight(p, Tail::channel(n, c)) * deviation);
      }
      gemm::judge<Tail, Numbers>(p, n, largest / gemm::input_scale);
    } else {
      if (threadIdx.x == 0) gemm::judge<Tail, Numbers>(p, n, 1.0f);
    }
  }
};

}  // namespace onepass
