// How far sigmoids may be off besides their rounding: one rule for the tool's judge and for the tests'.
#pragma once

#include <algorithm>
#include <cmath>

#include "onepass/problem.h"

namespace onepass::tool {

// Kernels whose results are rounded to 16 bits compute sigmoids by tanh.approx (bits_of in cuda/source.h),
// off by 4e-6. `result` is the type that the kernel stores: the output's, or the input's gradient's. Rows
// that are exact all the same (direct, thin_cores, thin_samples) cannot be told by the problem: they are
// granted it too.
inline double sigmoid_error(const Device& device, DType result) {
  return device.kind == Device::Kind::cuda && byte_size(result) == 2 ? 0x1p-17 : 0;
}

// What the error of a sigmoid is multiplied by in the operation at x; beyond 20 it is exact.
inline double sigmoid_scale(Op op, double x) {
  return op == Op::sigmoid ? 1 : op == Op::swish ? std::min(std::abs(x), 20.0) : 0;
}

}  // namespace onepass::tool
