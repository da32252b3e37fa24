// Gradients of a convolution whose groups have few channels: any kernel, stride, padding, dilation,
// transposed or not, on CUDA cores.
//
//   dweight[g, o, c, t] = sum over samples n, positions q:  u[n, o, q] v[n, c, q step + base + t delta]
//
// u is dy and v is x; of a transposed convolution u is x and v is dy. A block adds a part of all boxes of
// positions. It stages u's box and v's window as f32, with zeros outside (narrow/staging.cuh). A thread holds
// sums of some channels and rows of taps over its share of the box. It loads a segment of a row once for all
// taps of x, and for several rows of u. Chains of at most 256 terms are folded. The threads' sums are added,
// then the parts, in their order. Moves u and v once, apart from halos.
//
// dbias is added along where u is dy. dx is the row "narrow" of the adjoint convolution.
#pragma once

#include "direct/narrow/gradient_sum.cuh"
#include "direct/narrow/weight_gradient.cuh"
