// The error that kernels may have besides roundings of f32, one rule for the tool and the tests. A plan
// declares what its row needs (Plan::accuracy); no other row gets it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "block/convert.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::tool {

// The accuracy of gradients by any row, and of the forward that wrote their statistics. Kernels with 16-bit
// results compute sigmoids and the normal distribution function by tanh.approx (bits_of in cuda/source.h),
// off by 4e-6 and 6e-6.
inline double sigmoid_error(const Device& device, DType result) {
  return device.kind == Device::Kind::cuda && byte_size(result) == 2 ? 0x1p-17 : 0;
}

// What the error of a sigmoid, or of the normal distribution function, is multiplied by in the operation at
// x; beyond 20 both are exact.
inline double sigmoid_scale(Op op, double x) {
  return op == Op::sigmoid ? 1 : op == Op::swish || op == Op::gelu ? std::min(std::abs(x), 20.0) : 0;
}

// The error, in deviations, of an element that was held before its norm. Arguments are its distance from the
// mean and the largest of its slab. In f16 the distance from a value near the mean is held; where the norm is
// applied in f16 too, its factor is rounded as the distance is. Integers are parts of the farthest of some
// elements, from a mean of their own.
inline double holding_error(Accuracy::Held held, double distance, double farthest) {
  switch (held) {
    case Accuracy::Held::as_computed:
      return 0;
    case Accuracy::Held::as_f16:
      return 0x1p-11 * (distance + 4);
    case Accuracy::Held::in_20_bits:
      return 0x1p-18 * farthest;
    case Accuracy::Held::normed_in_f16:
      return 0x1p-10 * (distance + 4);
  }
  return 0;
}

// Whether the row rounds the input of the convolution to tf32. In tf32 it does unless it says otherwise. In
// near_f32 it does where it says that only the weights are whole.
inline bool rounds_input(const Problem& problem, const Accuracy& accuracy) {
  if (problem.precision == Precision::near_f32) return accuracy.tf32 == Accuracy::Tf32::weights_whole;
  return problem.rounds_to_tf32() && accuracy.tf32 != Accuracy::Tf32::whole;
}

// The operands that the row multiplies, of those it is given.
inline void round_operands(const Problem& problem, const Accuracy& accuracy, std::vector<double>& input,
                           std::vector<double>& weight) {
  if (!rounds_input(problem, accuracy)) return;
  const auto round = problem.precision == Precision::tf32_away ? round_to_tf32_away : round_to_tf32;
  for (double& value : input) value = round(value);
  if (accuracy.tf32 != Accuracy::Tf32::rounded) return;
  for (double& value : weight) value = round(value);
}

// The error that dithered weights leave in a mean over many sums, in units of a sum's random walk. One
// version is off by up to a unit of 2^-10, all versions together by a twelfth of it.
inline constexpr double dithering_error = 0x1p-11;
inline double dithering(const Accuracy& accuracy) {
  return accuracy.tf32 == Accuracy::Tf32::weights_dithered ? dithering_error : 0;
}

// What tensor cores cut off a sum of many terms, in units of its random walk with its value. They do so after
// 8 terms, by up to two roundings.
inline double cutting_error(const Accuracy& accuracy) {
  return 0x1p-24 * static_cast<double>(accuracy.cut_terms) / 2;
}

}  // namespace onepass::tool
