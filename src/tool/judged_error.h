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

// Whether a row may round the input of the convolution to tf32 and leave its weights as they are: in
// near_f32, where it is averaged over many positions (OperandParts in cuda/thin.h).
inline bool may_round_input(const Problem& problem) {
  return problem.precision == Precision::near_f32 && problem.block.has_mean();
}

// What the error of a sigmoid, or of the normal distribution function, is multiplied by in the operation at
// x; beyond 20 both are exact.
inline double sigmoid_scale(Op op, double x) {
  return op == Op::sigmoid ? 1 : op == Op::swish || op == Op::gelu ? std::min(std::abs(x), 20.0) : 0;
}

// How what a norm gets may have waited on a GPU. As f16: in bf16 by tail_overlapped, and in 16 bits by
// gemm_turns, which takes convolutions of 16 channels and more to no more than 64; in tf32 it holds integers
// of 20 bits. Other rows that take such a block cannot be told by the problem: they are granted it too.
enum class Waits { as_it_is, as_f16, in_20_bits };

inline Waits waits(const Problem& problem) {
  if (problem.device.kind != Device::Kind::cuda || problem.numerics == Numerics::strict ||
      problem.output.dtype != problem.input.dtype ||
      std::holds_alternative<Mean>(problem.block.stages().back()))
    return Waits::as_it_is;
  const bool is_short = byte_size(problem.input.dtype) == 2;
  const Conv* conv = problem.block.conv();
  if (conv == nullptr) {
    return problem.input.dtype == DType::bf16 && !std::holds_alternative<Norm>(problem.block.stages().front())
               ? Waits::as_f16
               : Waits::as_it_is;
  }
  if (conv->in_channels < 16 || conv->out_channels < 16 || conv->out_channels > 64) return Waits::as_it_is;
  return is_short                               ? Waits::as_f16
         : problem.precision == Precision::tf32 ? Waits::in_20_bits
                                                : Waits::as_it_is;
}

// What an element is off by then, in deviations: itself, and the farthest of its slab, are so far from the
// mean. Integers are parts of the farthest of some elements, from a mean of their own.
inline double waiting_error(Waits waits, double distance, double farthest) {
  return waits == Waits::as_f16       ? 0x1p-11 * (distance + 4)
         : waits == Waits::in_20_bits ? 0x1p-18 * farthest
                                      : 0;
}

// The error of a sigmoid, or of the normal distribution function, before a block's output. gemm_turns, which
// may take blocks whose values wait, computes as for 16 bits in tf32 too; and gelu with a term less where the
// output has 16, off by 2.9e-5.
inline double sigmoid_error(const Problem& problem) {
  const Waits how = waits(problem);
  if (how == Waits::in_20_bits) return 0x1p-17;
  const auto is_gelu = [](const Stage& stage) {
    const auto* pointwise = std::get_if<Pointwise>(&stage);
    return pointwise != nullptr && pointwise->op == Op::gelu;
  };
  const std::vector<Stage>& stages = problem.block.stages();
  if (how == Waits::as_f16 && problem.block.conv() != nullptr &&
      std::any_of(stages.begin(), stages.end(), is_gelu))
    return 0x1p-15;
  return problem.numerics == Numerics::strict ? 0 : sigmoid_error(problem.device, problem.output.dtype);
}

}  // namespace onepass::tool
