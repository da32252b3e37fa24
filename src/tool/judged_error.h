// What kernels may be off by besides the roundings of f32: one rule for the tool's judge and for the tests'.
#pragma once

#include <algorithm>
#include <cmath>
#include <variant>

#include "onepass/problem.h"

namespace onepass::tool {

// Kernels whose results are rounded to 16 bits compute sigmoids and the normal distribution function by
// tanh.approx (bits_of in cuda/source.h), off by 4e-6 and 6e-6. `result` is the type that the kernel stores:
// the output's, or the input's gradient's. Rows that are exact all the same (direct, thin_cores,
// thin_samples) cannot be told by the problem: they are granted it too.
inline double sigmoid_error(const Device& device, DType result) {
  return device.kind == Device::Kind::cuda && byte_size(result) == 2 ? 0x1p-17 : 0;
}

// What the error of a sigmoid, or of the normal distribution function, is multiplied by in the operation at
// x; beyond 20 both are exact.
inline double sigmoid_scale(Op op, double x) {
  return op == Op::sigmoid ? 1 : op == Op::swish || op == Op::gelu ? std::min(std::abs(x), 20.0) : 0;
}

// Whether what a norm gets may have waited as f16 on a GPU: in bf16 by tail_overlapped, and in 16 bits by
// gemm_turns, which takes convolutions of 16 channels and more to no more than 64. Other rows that take such
// a block cannot be told by the problem: they are granted it too.
inline bool waits_as_f16(const Problem& problem) {
  if (problem.device.kind != Device::Kind::cuda || byte_size(problem.input.dtype) != 2 ||
      problem.output.dtype != problem.input.dtype ||
      std::holds_alternative<Mean>(problem.block.stages().back()))
    return false;
  const Conv* conv = problem.block.conv();
  if (conv == nullptr)
    return problem.input.dtype == DType::bf16 &&
           !std::holds_alternative<Norm>(problem.block.stages().front());
  return conv->in_channels >= 16 && conv->out_channels >= 16 && conv->out_channels <= 64;
}

}  // namespace onepass::tool
