// The pointwise stages of a block as steps over panels, and the small parameters they read as f32 vectors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/tensor_map.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::cpu {

// A parameter converted to f32 in the workspace: one value per column (a single slope is repeated), or per
// sample and column. Each vector has `slack` floats behind it, so that steps may read whole SIMD vectors.
struct ParameterVector {
  size_t parameter = 0;  // index into Arguments::parameters
  bool per_sample = false;
  int64_t offset = 0;  // floats from the start of the chain's part of the workspace
};

struct Step {
  int function = identity_step;  // row of Isa::steps
  Affine affine = Affine::none;
  float a = 0;
  float b = 0;
  int vector = -1;  // index into Chain::vectors of its per-channel operand
  int tensor = -1;  // index into Chain::tensors of its tensor operand
};

struct TensorOperand {
  size_t parameter = 0;
  TensorMap map;
};

// What the norm does to each column from this one on: (x - centre) * scale + shift.
struct NormCoefficients {
  int64_t first_column = 0;
  const float* centre = nullptr;
  const float* scale = nullptr;
  const float* shift = nullptr;
};

// What the steps of one panel read besides it.
struct StepContext {
  const float* floats = nullptr;  // the chain's part of the workspace
  const std::vector<const void*>* parameters = nullptr;
  NormCoefficients norm;
  float* operand_scratch = nullptr;  // a panel, for a tensor operand that does not lie as one
};

// before: up to the norm (all stages where there is none); after: the norm itself and what follows it.
struct Chain {
  int64_t channels = 0;
  int64_t repeat = 1;  // columns of a channel: its value is repeated in every vector
  int64_t batch = 0;
  std::vector<Step> before;
  std::vector<Step> after;
  std::vector<ParameterVector> vectors;
  std::vector<TensorOperand> tensors;
  int conv_bias = -1;  // indices into vectors; the convolution adds its bias itself
  int norm_weight = -1;
  int norm_bias = -1;
  int64_t workspace_floats = 0;
  float least_before_norm;  // no value that the norm gets lies below: -infinity where nothing is known

  explicit Chain(const Problem& problem, int64_t columns_of_channel = 1);

  // Converts every parameter vector into `floats`.
  void load_parameters(const Problem& problem, const std::vector<const void*>& parameters,
                       float* floats) const;
  int64_t columns() const { return channels * repeat; }
  // The values of one vector for a sample, from column 0.
  const float* values(int vector, int64_t sample, const float* floats) const;
  // The vector, or null for index -1.
  const float* values_or_null(int vector, int64_t sample, const float* floats) const {
    return vector < 0 ? nullptr : values(vector, sample, floats);
  }
  // What a step over a panel of the sample needs but its destination and a tensor operand.
  StepArguments column_arguments(const Step& step, const StepContext& context, int64_t sample,
                                 int64_t first_column) const;
  // All that a step over a panel needs but its destination. A column is a channel here.
  StepArguments step_arguments(const Isa& isa, const Step& step, const StepContext& context,
                               const Region& region, Orientation orientation, PanelView source) const;
  static int64_t slack();  // the widest SIMD vector
};

}  // namespace onepass::cpu
