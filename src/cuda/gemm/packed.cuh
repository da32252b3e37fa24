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
      if constexpr (Numbers::guards)
        PackedGemmScales<C, Numbers, PackedGemmWeightPieces<C, Numbers>, Parameters>{p}.run();
    } else if (p.step == step_judge) {
      if constexpr (Numbers::guards) PackedGemmJudge<Tail, Numbers, Parameters>{p}.run();
    } else {
      PackedGemmOperands<C, Tail, Numbers>{p, s.piece}.run();
    }
  }
};

}  // namespace onepass
