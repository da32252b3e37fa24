// The gradients of a wide convolution of stride 1, as matrix products on Hopper's tensor cores.
//
// Both gradients are sums over a convolution "v -> u" of stride 1: the forward one, or the adjoint of a
// transposed one. Positions have one flat index: tap t of u's position p lies at v's position p + shift(t).
// The pitches of rows, planes and samples leave zeros wherever a tap can reach beyond one of them.
//
// Both tensors are packed first: 16-bit elements, [eight channels][position][8], zeros in the gaps. A packed
// position is 16 bytes and can begin an operand of either order. f32 elements are scaled by a power of two
// into the range of f16, which has tf32's ten bits. The first scale comes from probed elements. If it does
// not fit all elements, a further launch packs the tensor again.
//
//   GemmPackTensor       packs a tensor; sums of channels for dbias
//   GemmWeightGradient   G[u][v][t] = sum over p of U[u][p] V[v][p + shift(t)]. Positions are the terms. A
//                        block has 64 channels of u, some of v and some taps, for a part of all positions. V
//                        passes through a ring buffer: a position is loaded once for all taps.
//   GemmWeightSum        adds the parts of G in a fixed order
//   GemmPackAdjoint      packs the weights for dx
//   GemmInputGradient    dx[c][p] = sum over o and t of W[c][o][t] DH[o][p +- shift(t)]. Weights are the left
//                        operand, positions the columns.
#pragma once

#include "gemm/backward/input_gradient.cuh"
#include "gemm/backward/pack.cuh"
#include "gemm/backward/pack_adjoint.cuh"
#include "gemm/backward/weight_sum.cuh"
