// The gradients a block should have and how far an honest implementation may be from them, element by
// element.
//
// The rule. u = 2^-24. The forward values v and their bounds e at the input of each stage are those of
// error_bound.h. A gradient g with bound b goes back through the stages; b = 0 at first.
//
//   sum           of n terms t with bounds b: sum(b) + (8 + sqrt(n) / 4) u sum|t|, so that what counts is the
//   magnitude
//                 of what is added, not of the result
//   mean          g / positions, b / positions + 2 u |g|
//   pointwise     with D the derivative at v: |D| b + |g| (change of D between v - e and v + e + 8 u s), s
//   what the
//                 rounding errors of D are proportional to: |D| where it selects or multiplies, else 1, and
//                 more where a factor x or x^3 multiplies a difference from 1. Where sigmoids and
//                 gelu's distribution function are approximated (error_bound.h) and D has one, |g| 2^-17 s
//                 besides
//   argument      terms t = g dp with bounds of the same kind, summed
//   norm          with q = gamma dz, m1 = mean(q), m2 = mean(q xhat), r the relative error of rstd and f the
//   error of
//                 xhat (both as in error_bound.h):
//                 rstd (b(q) + b(m1) + f |m2| + |xhat| b(m2)) + (r + 8 u) rstd (|q| + |m1| + |xhat m2|)
//
//   convolution   sums of K products t with the gradient (of the input's, the weights' and the bias's own):
//                 what b makes of them, plus u (4 sqrt(K) + 32) (sqrt(sum of t^2) + |sum|). In tf32 (operands
//                 are given as rounded) and with operands of 16 bits K / 2 in place of 32, as in
//                 error_bound.h, and 4 * 2^-11 sqrt(sum of t^2): the gradient is an operand rounded to tf32.
//
// A slab whose variance is lost among rounding errors is not checked, nor is a sum that it enters.
#pragma once

#include <vector>

#include "onepass/backward.h"
#include "support/error_bound.h"

namespace onepass::testing {

struct ExpectedGradients {
  Expected input;
  std::vector<Expected> parameters;
};

// Of a convolution alone on a CPU every gradient is a sum of K products t, off by up to 4 u sqrt(K)
// (sqrt(sum of t^2) + |sum|) as in error_bound.h. All values are dense NCHW, already rounded to the element
// types of the problem.
ExpectedGradients expected_gradients(const BackwardProblem& problem, const std::vector<double>& input,
                                     const std::vector<std::vector<double>>& parameters,
                                     const std::vector<double>& output_gradient);

}  // namespace onepass::testing
