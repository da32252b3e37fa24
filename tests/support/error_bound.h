// The result a block should have and how far an honest implementation may be from it, element by element.
//
// The rule. u is the unit roundoff of the arithmetic: 2^-24 (f32 inside, also for f16 and bf16) or 2^-53
// (f64). Each stage takes the value v and the bound e of every element from the stage before; e = 0 at first.
//
//   convolution   e = 4 u sqrt(K) (sqrt(sum of (w x)^2) + |v|), K the terms of a sum with the bias: rounding
//                 errors add up like a random walk along partial sums that are one too. A missing or a wrong
//                 term is off by about sqrt(sum of (w x)^2 / K): 2e6 / K times as much. In tf32, and in
//                 near_f32 where the row rounds the input, u K / 2 of that besides, of rounded operands:
//                 tensor cores cut sums off after 8 terms; in every type the same of as many terms as the row
//                 says that they add (Accuracy::cut_terms); where the row dithers weights 2^-11
//                 sqrt(sum of (w x)^2) too. In f32 on a GPU 8 u besides:
//                 operands split in two leave so much of a term.
//   pointwise     e = the change of the operation between x - e and x + e, plus 8 u (|x| + |v|): 4 ulp for an
//                 approximation, and 0.5 x (1 + erf) cancels. Operations that only select or multiply: 8 u
//                 |v|; hardsigmoid: 8 u. Sigmoids and gelu's distribution function: what the row says
//                 besides (Accuracy::sigmoid).
//   norm          e = |weight| ((e + d) rstd + r |xhat|) + 8 u (|weight| (|xhat| + |mean| rstd) + |bias|),
//                 d = mean(e) + 8 u (|mean| + 4 std) the error of the mean, r the relative one of the
//                 variance: (2 mean(|x - mean| e) + mean(e^2) + d^2) / (variance + eps) + 8 u. So the mean
//                 costs u |mean| / std, and E[x^2] - E[x]^2, which costs u (mean / std)^2, is caught. Where r
//                 > 1/2 the result is noise and the slab is not checked. |weight| 2^-11
//                 (|xhat| + 4) besides where the row holds what the norm gets as f16, less a value near the
//                 mean, and |weight| 2^-18 of the largest |xhat| where it holds integers.
//   mean          e = mean(e) + (8 + sqrt(positions) / 4) u mean|x|
//
// Each stage adds a few of the least f32 denormals. An element passes when it lies between v - e and v + e,
// both rounded to the output's type: the one rounding at the end is in the rule exactly, overflow to Inf
// included. What is not finite has no error: NaN must be NaN and Inf must be Inf of the same sign.
#pragma once

#include <vector>

#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::testing {

struct Expected {
  std::vector<double> values;
  std::vector<double> bounds;  // infinite where the result is noise
  // Of each slab, where asked for: its mean and its 1 / deviation.
  std::vector<double> statistics = {};
  // What they may be off by, the latter relatively, besides roundings: that of sigmoids in 16 bits, dithered
  // weights and long sums. Empty where there is nothing.
  std::vector<double> allowed = {};
};

// `input` and `parameters` are dense NCHW, already rounded to the element types of the problem. Operands of
// tf32 are rounded here, as the row says. What a row needs besides is allowed to it alone (Plan::accuracy).
Expected expected_output(const Problem& problem, const std::vector<double>& input,
                         const std::vector<std::vector<double>>& parameters, const Accuracy& accuracy = {});
// The same with the statistics of slabs.
Expected expected_with_statistics(const Problem& problem, const std::vector<double>& input,
                                  const std::vector<std::vector<double>>& parameters,
                                  const Accuracy& accuracy = {});

// What each stage of the block gets, with the bounds of that: the input first.
std::vector<Expected> expected_stage_inputs(const Problem& problem, const std::vector<double>& input,
                                            const std::vector<std::vector<double>>& parameters,
                                            double sigmoid_error);

// Whether an implementation may give `actual` for an element of this type.
bool is_acceptable(DType dtype, double actual, double value, double bound);

}  // namespace onepass::testing
