// The gradients of a wide convolution of stride 1, as matrix products on Hopper's tensor cores.
//
// Both are sums over a convolution "v -> u" of stride 1 (the forward one, or, where that is transposed, its
// adjoint): tap t of u's position p lies at v's position p + shift(t) in one flat index of positions, in
// which rows, planes and samples have pitches that leave zeros between them wherever a tap can reach beyond
// (as gemm.cuh has it for a sample).
//
// First both tensors are packed: 16-bit elements, [eight channels][position][8], zeros where nothing is. f32
// elements are multiplied by a power of two, so that f16, which has tf32's ten bits, has room for them: one
// that fits what a part of the elements showed, and where that turns out not to fit the rest, another one by
// a second launch. A position is 16 bytes: it can be the start of an operand of either order.
//
//   GemmWeightGradient   G[u][v][t] = sum over p of U[u][p] V[v][p + shift(t)]: both operands have their
//                        channels contiguous and positions as terms. A block has 64 channels of u, some of v
//                        and some taps, for a part of all positions; V passes through a ring, so that a
//                        position is loaded once for all taps. Parts are added in a fixed order by
//                        GemmWeightSum.
//   GemmInputGradient    dx[c][p] = sum over o and t of W[c][o][t] DH[o][p +- shift(t)]: weights are the left
//                        operand, positions the columns; what gemm.cuh does, of packed positions.
#pragma once

#include "gemm/backward/input_gradient.cuh"
#include "gemm/backward/pack.cuh"
#include "gemm/backward/pack_adjoint.cuh"
#include "gemm/backward/weight_sum.cuh"
