// The result a block should have and how far an honest implementation may be from it, element by element.
//
// The rule. u is the unit roundoff of the arithmetic: 2^-24 (f32 inside, also for f16 and bf16) or 2^-53
// (f64). Each stage takes the value v and the bound e of every element from the stage before; e = 0 at first.
//
//   convolution   e = 4 u sqrt(K) (sqrt(sum of (w x)^2) + |v|), K the terms of a sum with the bias: rounding
//                 errors add up like a random walk along partial sums that are one too. A missing or a wrong
//                 term is off by about sqrt(sum of (w x)^2 / K): 2e6 / K times as much. In tf32, whose
//                 operands are given as rounded, and in near_f32 before a mean, whose input is, u K / 2 of
//                 that besides: tensor cores cut sums off after 8 terms. In f32 on a GPU 8 u besides:
//                 operands split in two leave so much of a term.
//   pointwise     e = the change of the operation between x - e and x + e, plus 8 u (|x| + |v|): 4 ulp for an
//                 approximation, and 0.5 x (1 + erf) cancels. Operations that only select or multiply: 8 u
//                 |v|; hardsigmoid: 8 u. In 16 bits on a GPU sigmoids and gelu's distribution
//                 function are by tanh.approx: what tool/judged_error.h says besides.
//   norm          e = |weight| ((e + d) rstd + r |xhat|) + 8 u (|weight| (|xhat| + |mean| rstd) + |bias|),
//                 d = mean(e) + 8 u (|mean| + 4 std) the error of the mean, r the relative one of the
//                 variance: (2 mean(|x - mean| e) + mean(e^2) + d^2) / (variance + eps) + 8 u. So the mean
//                 costs u |mean| / std, and E[x^2] - E[x]^2, which costs u (mean / std)^2, is caught. Where r
//                 > 1/2 the result is noise and the slab is not checked. On a GPU |weight| 2^-11
//                 (|xhat| + 4) besides where what the norm gets may wait as f16, less a value near the mean,
//                 and |weight| 2^-18 of the largest |xhat| where it may wait as integers (waits in
//                 tool/judged_error.h).
//   mean          e = mean(e) + (8 + sqrt(positions) / 4) u mean|x|
//
// Each stage adds a few of the least f32 denormals. An element passes when it lies between v - e and v + e,
// both rounded to the output's type: the one rounding at the end is in the rule exactly, overflow to Inf
// included. What is not finite has no error: NaN must be NaN and Inf must be Inf of the same sign.
#pragma once

#include <vector>

#include "onepass/problem.h"

namespace onepass::testing {

struct Expected {
  std::vector<double> values;
  std::vector<double> bounds;  // infinite where the result is noise
  // Of each slab, where asked for: its mean and its 1 / deviation.
  std::vector<double> statistics = {};
  // What they may be off by, the latter relatively, besides roundings: that of sigmoids in 16 bits. Empty
  // where there is nothing.
  std::vector<double> granted = {};
};

// `input` and `parameters` are dense NCHW, already rounded to the element types of the problem.
Expected expected_output(const Problem& problem, const std::vector<double>& input,
                         const std::vector<std::vector<double>>& parameters);
// The same with the statistics of slabs.
Expected expected_with_statistics(const Problem& problem, const std::vector<double>& input,
                                  const std::vector<std::vector<double>>& parameters);
// The same with sigmoids that may be off by so much, besides their rounding.
Expected expected_output(const Problem& problem, const std::vector<double>& input,
                         const std::vector<std::vector<double>>& parameters, double sigmoid_error);

// What each stage of the block gets, with the bounds of that: the input first.
std::vector<Expected> expected_stage_inputs(const Problem& problem, const std::vector<double>& input,
                                            const std::vector<std::vector<double>>& parameters,
                                            double sigmoid_error);

// Whether an implementation may give `actual` for an element of this type.
bool is_acceptable(DType dtype, double actual, double value, double bound);

}  // namespace onepass::testing
