// The gradients of a block: its backward pass in double, one plain loop nest per stage.
//
// Tensors are dense NCHW. Nothing here allocates but the function that returns vectors.
#pragma once

#include <span>
#include <vector>

#include "reference/reference.h"

namespace onepass::reference {

// Gradients of a convolution, ordinary or transposed; an empty span is not computed.
struct ConvGradients {
  std::span<double> input;
  std::span<double> weight;
  std::span<double> bias;
};
void convolve_backward(const Conv& conv, const Sizes& input_sizes, const Sizes& output_sizes, Values input,
                       Values weight, Values output_gradient, const ConvGradients& gradients,
                       Executor& executor);

// dx = rstd (weight dy - mean(weight dy) - xhat mean(weight dy xhat)), means over x's slab; dweight = sum of
// dy xhat and dbias = sum of dy, over samples and positions. `gradient` is dy on entry and dx on return.
void normalise_backward(const Norm& norm, const Sizes& sizes, Values x, Values weight,
                        std::span<double> gradient, std::span<double> weight_gradient,
                        std::span<double> bias_gradient);

// `gradient` is that of the stage's result on entry and that of x on return.
void apply_pointwise_backward(const Pointwise& pointwise, const Sizes& sizes, Values argument, Values x,
                              std::span<double> gradient, std::span<double> argument_gradient);

// dx[n,c,p] = dy[n,c] / positions.
void mean_over_space_backward(const Sizes& sizes, Values output_gradient, std::span<double> gradient);

// How many values backward() needs as scratch: the input of each stage, and a gradient.
int64_t backward_scratch_elements(const Block& block, const Sizes& activation_sizes);

// All gradients; parameter gradients lie one after another, as the parameters do. With `input_gradient` empty
// that of a convolution's input is not computed.
void backward(const Block& block, const Sizes& input_sizes, const Sizes& activation_sizes, Values input,
              Values parameters, Values output_gradient, std::span<double> scratch,
              std::span<double> input_gradient, std::span<double> parameter_gradients, Executor& executor);

struct Gradients {
  std::vector<double> input;
  std::vector<std::vector<double>> parameters;
};
Gradients backward(const Block& block, const Shape& input_sizes, Values input,
                   std::span<const std::vector<double>> parameters, Values output_gradient);

}  // namespace onepass::reference
