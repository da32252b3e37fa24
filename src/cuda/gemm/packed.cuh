// The kernels of the row "gemm_packed": a wide convolution of stride 1 as a matrix product over the positions
// of all samples, for layers whose samples are too small to fill a GPU with tiles of their own. What follows
// the convolution is a tail's.
//
// Operands are packed first, as 16-bit elements: x as [eight channels][position][8] over one flat index of
// all samples, weights as products read them. Rows, planes and samples of the index have pitches that leave
// zeros wherever a tap can reach beyond them (as in gemm/gemm.cuh). A tile is any run of that index, across
// samples, so that there can be as many tiles as multiprocessors. Nothing is converted in the product. The
// groups of a convolution follow one another, each padded to whole chunks of input channels and whole tiles
// of output channels.
//
//   PackedGemmOperands  packs x and the weights; f32 weights are scaled by a power of two that suits most
//   PackedGemmScales    packs rows of f32 weights again whose largest element it does not suit
//   PackedGemm          the product, with the bias, as f32 (gemm/packed/product.cuh)
//   PackedGemmJudge     marks samples whose values overflow f16 (f32), which another kernel recomputes
#pragma once

#include "gemm/packed/operands.cuh"

namespace onepass {

// Marks samples whose values overflow f16 (f32 operands). A block for each sample; it also clears the control
// words of the redo kernel.
template <class C, class Tail, class Numbers>
struct PackedGemmJudge {
  using Parameters = PackedGemmParameters<Tail::parameters>;
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

// All launches but the product are one kernel: three kernels take longer to compile.
template <class C, class Tail, class Numbers>
struct PackedGemmSteps {
  using Parameters = PackedGemmParameters<Tail::parameters>;
  struct alignas(128) Shared {
    unsigned char piece[Numbers::piece_bytes];  // of weights
  };

  const Parameters& p;
  Shared& s;

  __device__ __forceinline__ void run() const {
    allow_kernel_after();
    wait_for_kernel_before();
    if (p.step == step_pack_again) {
      if constexpr (Numbers::guards) PackedGemmScales<C, Tail, Numbers>{p}.run();
    } else if (p.step == step_judge) {
      if constexpr (Numbers::guards) PackedGemmJudge<C, Tail, Numbers>{p}.run();
    } else {
      PackedGemmOperands<C, Tail, Numbers>{p, s.piece}.run();
    }
  }
};

}  // namespace onepass
