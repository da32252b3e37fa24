// The meaning of a block: its forward pass in double, one plain loop nest per stage.
//
// Tensors are dense NCHW. Nothing here allocates but the functions that return vectors.
#pragma once

#include <span>
#include <vector>

#include "onepass/block.h"
#include "onepass/executor.h"
#include "onepass/tensor.h"

namespace onepass::reference {

using Values = std::span<const double>;

// A tensor's sizes as plain numbers; spatial dimensions it does not have are 1, after those it has.
struct Sizes {
  int64_t batch = 1;
  int64_t channels = 1;
  Extents space{1, 1, 1};

  explicit Sizes(const Shape& shape);
  int64_t positions() const { return space[0] * space[1] * space[2]; }
  int64_t elements() const { return batch * channels * positions(); }
};

// y[n,o,q] = bias[o] + sum over i in o's group and taps k of x[n,i,p] * weight[o,i,k], where
// p = q * stride + k * dilation - padding_before. A tap on padding is skipped, never multiplied.
// Transposed, y starts as bias, then x[n,i,p] * weight[i,o,k] is added to y[n,o,q] for each p and k, where
// q = p * stride + k * dilation - padding_before; what falls outside y is dropped.
void convolve(const Conv& conv, const Sizes& input_sizes, const Sizes& output_sizes, Values input,
              Values weight, Values bias, std::span<double> output, Executor& executor);

// x := (x - mean) / sqrt(variance + eps) * weight[c] + bias[c], mean and (biased) variance of x's slab.
// `statistics`, where not null, gets mean and 1 / sqrt(variance + eps) of each slab.
void normalise(const Norm& norm, const Sizes& sizes, Values weight, Values bias, std::span<double> x,
               Executor& executor, float* statistics = nullptr);

// The formula of pointwise.def at x; p is the element of the argument that belongs to x.
double pointwise_value(const Pointwise& pointwise, double x, double p);

// What x and p get of the gradient g that pointwise_value(x, p) got.
struct PointwiseGradient {
  double x = 0;
  double p = 0;
};
PointwiseGradient pointwise_gradient(const Pointwise& pointwise, double x, double p, double g);

// The block with its limits rounded as PyTorch compares them: f64 as written, other types in f32. An element
// that equals the rounded limit so is at the limit.
Block with_limits_of(DType dtype, const Block& block);

// x := pointwise_value(x, p) for each element.
void apply_pointwise(const Pointwise& pointwise, const Sizes& sizes, Values argument, std::span<double> x,
                     Executor& executor);

// How many values the argument of a pointwise stage holds.
int64_t argument_elements(const Pointwise& pointwise, const Sizes& sizes);
// Which of them belongs to the element of sample n and channel c at a position.
int64_t argument_index(const Pointwise& pointwise, const Sizes& sizes, int64_t n, int64_t c,
                       int64_t position);

// y[n,c] = mean over positions of x[n,c].
void mean_over_space(const Sizes& sizes, Values x, std::span<double> output, Executor& executor);

// The parameters of a block lie one after another; take() hands out the next stage's.
class ParameterCursor {
 public:
  explicit ParameterCursor(Values all) : rest_(all) {}
  Values take(int64_t count) {
    const Values taken = rest_.first(static_cast<size_t>(count));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

 private:
  Values rest_;
};

int64_t weight_elements(const Conv& conv);

// Runs all stages. `activation` is the shape after the convolution (the input's, where there is none).
// `scratch` has activation.elements() values where the block ends in a mean, none otherwise. `statistics`,
// where not null, gets mean and 1 / sqrt(variance + eps) of each of the norm's slabs.
void forward(const Block& block, const Sizes& input_sizes, const Sizes& activation_sizes, Values input,
             Values parameters, std::span<double> scratch, std::span<double> output, Executor& executor,
             float* statistics = nullptr);

std::vector<double> forward(const Block& block, const Shape& input_sizes, Values input,
                            std::span<const std::vector<double>> parameters);

}  // namespace onepass::reference
