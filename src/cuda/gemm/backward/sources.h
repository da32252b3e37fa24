// The kernels of the row "gemm_backward" as source text.
#pragma once

#include <string>

#include "cuda/gemm/backward/numbers.h"

namespace onepass::cuda {

// How GemmPackTensor packs a tensor.
struct PackNumbers {
  static constexpr int64_t threads = 256;
  static constexpr int64_t probes = 16384;  // runs of 32 elements that the first scale is taken from

  int64_t octets = 1;
  int64_t lanes = 1;  // neighbouring threads that have neighbouring octets: where channels are contiguous
  int64_t part_positions = 1;  // of a block

  PackNumbers(const TensorSpec& spec, const GradientNumbers& numbers);
  Number parts(const Number& length) const { return divide_up(length, part_positions); }
};

class GradientSources {
 public:
  static constexpr int64_t sum_threads = 256;

  GradientSources(const BackwardProblem& problem, const GradientNumbers& numbers)
      : problem_(problem), numbers_(numbers) {}

  Source pack_gradient() const;
  Source pack_input() const;
  Source weight_gradient() const;
  Source weight_sum() const;
  Source pack_adjoint() const;
  Source input_gradient() const;

  // f32 elements are scaled to f16.
  bool scales() const { return problem_.forward.input.dtype == DType::f32; }
  bool wants_bias() const { return problem_.forward.block.conv()->bias && problem_.wants_parameter(1); }
  // Blocks of the sum that have weights.
  int64_t weight_sum_blocks() const;

 private:
  const char* operand() const { return problem_.forward.input.dtype == DType::bf16 ? "bf16" : "f16"; }
  Source pack(const char* name, const TensorSpec& spec, bool has_sums) const;
  std::string weight_numbers() const;
  std::string input_numbers() const;

  const BackwardProblem& problem_;
  const GradientNumbers& numbers_;
};

}  // namespace onepass::cuda
