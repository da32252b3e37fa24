// The gradients of a block: its backward pass in double, one plain loop nest per stage.
#include "reference/backward.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "reference/loops.h"

namespace onepass::reference {
namespace {

// The convolution that takes a gradient back: the other kind, with inputs and outputs exchanged. Its weights
// lie as those of the original do, [coarse channel][fine channel of the group][tap].
Conv adjoint(const Conv& conv) {
  Conv back = conv;
  back.transposed = !conv.transposed;
  std::swap(back.in_channels, back.out_channels);
  back.bias = false;
  return back;
}

// dweight[c,f,k] = sum over samples and coarse positions q of coarse[n,c,q] * fine[n,f,p], p where tap k,
// applied at q, lies on the fine side.
void weight_backward(const Conv& conv, const Sizes& coarse_sizes, const Sizes& fine_sizes, Values coarse,
                     Values fine, std::span<double> gradient, Executor& executor) {
  const int64_t group_coarse = coarse_sizes.channels / conv.groups;
  const int64_t group_fine = fine_sizes.channels / conv.groups;
  executor.for_each(coarse_sizes.channels * group_fine, [&](int64_t task, int) {
    const int64_t c = task / group_fine;
    const int64_t f = c / group_coarse * group_fine + task % group_fine;
    for_each_position(conv.kernel, [&](const Extents& k, int64_t tap) {
      double sum = 0;
      for (int64_t n = 0; n < coarse_sizes.batch; ++n) {
        const int64_t coarse_plane = (n * coarse_sizes.channels + c) * coarse_sizes.positions();
        const int64_t fine_plane = (n * fine_sizes.channels + f) * fine_sizes.positions();
        for_each_row_of_tap(conv, k, coarse_sizes.space, fine_sizes.space,
                            [&](int64_t q, int64_t p, int64_t count) {
                              for (int64_t j = 0; j < count; ++j)
                                sum += coarse[index_of(coarse_plane + q + j)] *
                                       fine[index_of(fine_plane + p + j * conv.stride[2])];
                            });
      }
      gradient[index_of(task * tap_count(conv) + tap)] = sum;
    });
  });
}

// gradient[c] = sum of x over samples and positions.
void sum_over_channel(const Sizes& sizes, Values x, std::span<double> gradient) {
  for (int64_t c = 0; c < sizes.channels; ++c) {
    double sum = 0;
    for (int64_t n = 0; n < sizes.batch; ++n) {
      const int64_t plane = (n * sizes.channels + c) * sizes.positions();
      for (const double value : x.subspan(index_of(plane), index_of(sizes.positions()))) sum += value;
    }
    gradient[index_of(c)] = sum;
  }
}

// The stages of a block in reverse, each with its input and its part of the parameters and gradients.
class Backward {
 public:
  Backward(const Block& block, const Sizes& input_sizes, const Sizes& sizes, Values input, Values parameters,
           std::span<double> scratch, std::span<double> parameter_gradients, Executor& executor)
      : block_(block),
        input_sizes_(input_sizes),
        sizes_(sizes),
        input_(input),
        rest_parameters_(parameters),
        rest_gradients_(parameter_gradients),
        activations_(scratch.first(index_of(sizes.elements()) * block.stages().size())),
        gradient_(scratch.subspan(activations_.size(), index_of(sizes.elements()))),
        executor_(executor) {}

  void run(Values output_gradient, std::span<double> input_gradient) {
    recompute();
    if (!block_.has_mean()) std::copy(output_gradient.begin(), output_gradient.end(), gradient_.begin());
    for (size_t i = block_.stages().size(); i-- > 0;) {
      const Stage& stage = block_.stages()[i];
      if (const auto* conv = std::get_if<Conv>(&stage)) {
        apply(*conv, input_gradient);
      } else if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
        apply(*pointwise, activation(i));
      } else if (const auto* norm = std::get_if<Norm>(&stage)) {
        apply(*norm, activation(i));
      } else {
        mean_over_space_backward(sizes_, output_gradient, gradient_);
      }
    }
    if (block_.conv() == nullptr && !input_gradient.empty())
      std::copy(gradient_.begin(), gradient_.end(), input_gradient.begin());
  }

 private:
  // The input of stage i. That of a convolution, whose size differs, is input_ itself.
  std::span<double> activation(size_t i) const {
    return activations_.subspan(i * index_of(sizes_.elements()), index_of(sizes_.elements()));
  }

  // The forward pass, with the input of every stage kept.
  void recompute() {
    ParameterCursor cursor(rest_parameters_);
    if (block_.conv() == nullptr) std::copy(input_.begin(), input_.end(), activation(0).begin());
    for (size_t i = 0; i + 1 < block_.stages().size(); ++i) {
      const Stage& stage = block_.stages()[i];
      const std::span<double> output = activation(i + 1);
      if (const auto* conv = std::get_if<Conv>(&stage)) {
        const Values weight = cursor.take(weight_elements(*conv));
        const Values bias = cursor.take(conv->bias ? conv->out_channels : 0);
        convolve(*conv, input_sizes_, sizes_, input_, weight, bias, output, executor_);
        continue;
      }
      std::copy_n(activation(i).begin(), output.size(), output.begin());
      if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
        apply_pointwise(*pointwise, sizes_, cursor.take(argument_elements(*pointwise, sizes_)), output,
                        executor_);
      } else if (const auto* norm = std::get_if<Norm>(&stage)) {
        const int64_t affine_elements = norm->affine ? sizes_.channels : 0;
        const Values weight = cursor.take(affine_elements);
        const Values bias = cursor.take(affine_elements);
        normalise(*norm, sizes_, weight, bias, output, executor_);
      }
    }
  }

  // The last `count` parameters, or their gradients, that no stage has taken yet.
  Values take_parameters(int64_t count) {
    const Values taken = rest_parameters_.last(index_of(count));
    rest_parameters_ = rest_parameters_.first(rest_parameters_.size() - taken.size());
    return taken;
  }
  std::span<double> take_gradients(int64_t count) {
    const std::span<double> taken = rest_gradients_.last(index_of(count));
    rest_gradients_ = rest_gradients_.first(rest_gradients_.size() - taken.size());
    return taken;
  }

  void apply(const Conv& conv, std::span<double> input_gradient) {
    ConvGradients gradients;
    gradients.input = input_gradient;
    const int64_t bias_elements = conv.bias ? conv.out_channels : 0;
    take_parameters(bias_elements);
    gradients.bias = take_gradients(bias_elements);
    const Values weight = take_parameters(weight_elements(conv));
    gradients.weight = take_gradients(weight_elements(conv));
    convolve_backward(conv, input_sizes_, sizes_, input_, weight, gradient_, gradients, executor_);
  }

  void apply(const Pointwise& pointwise, Values x) {
    const int64_t count = argument_elements(pointwise, sizes_);
    const Values argument = take_parameters(count);
    apply_pointwise_backward(pointwise, sizes_, argument, x, gradient_, take_gradients(count));
  }

  void apply(const Norm& norm, Values x) {
    const int64_t count = norm.affine ? sizes_.channels : 0;
    take_parameters(count);
    const Values weight = take_parameters(count);
    const std::span<double> bias_gradient = take_gradients(count);
    const std::span<double> weight_gradient = take_gradients(count);
    normalise_backward(norm, sizes_, x, weight, gradient_, weight_gradient, bias_gradient);
  }

  const Block& block_;
  const Sizes& input_sizes_;
  const Sizes& sizes_;  // after the convolution
  Values input_;
  Values rest_parameters_;
  std::span<double> rest_gradients_;
  std::span<double> activations_;
  std::span<double> gradient_;
  Executor& executor_;
};

}  // namespace

void convolve_backward(const Conv& conv, const Sizes& input_sizes, const Sizes& output_sizes, Values input,
                       Values weight, Values output_gradient, const ConvGradients& gradients,
                       Executor& executor) {
  if (!gradients.input.empty()) {
    convolve(adjoint(conv), output_sizes, input_sizes, output_gradient, weight, {}, gradients.input,
             executor);
  }
  if (!gradients.weight.empty()) {
    const bool t = conv.transposed;
    weight_backward(conv, t ? input_sizes : output_sizes, t ? output_sizes : input_sizes,
                    t ? input : output_gradient, t ? output_gradient : input, gradients.weight, executor);
  }
  if (!gradients.bias.empty()) sum_over_channel(output_sizes, output_gradient, gradients.bias);
}

void normalise_backward(const Norm& norm, const Sizes& sizes, Values x, Values weight,
                        std::span<double> gradient, std::span<double> weight_gradient,
                        std::span<double> bias_gradient) {
  const int64_t groups = norm.group_count(sizes.channels);
  const int64_t group_channels = sizes.channels / groups;
  const int64_t slab_elements = group_channels * sizes.positions();
  std::fill(weight_gradient.begin(), weight_gradient.end(), 0);
  std::fill(bias_gradient.begin(), bias_gradient.end(), 0);
  for (int64_t slab = 0; slab < sizes.batch * groups; ++slab) {
    const Values values = x.subspan(index_of(slab * slab_elements), index_of(slab_elements));
    const std::span<double> g = gradient.subspan(index_of(slab * slab_elements), index_of(slab_elements));
    const auto [mean, variance] = moments(values);
    const double rstd = 1 / std::sqrt(variance + norm.eps);
    double sum = 0;
    double product = 0;
    for (int64_t i = 0; i < slab_elements; ++i) {
      const size_t c = index_of(slab % groups * group_channels + i / sizes.positions());
      const double xhat = (values[index_of(i)] - mean) * rstd;
      double& dy = g[index_of(i)];
      if (norm.affine) {
        weight_gradient[c] += dy * xhat;
        bias_gradient[c] += dy;
        dy *= weight[c];
      }
      sum += dy;
      product += dy * xhat;
    }
    const auto count = static_cast<double>(slab_elements);
    for (int64_t i = 0; i < slab_elements; ++i) {
      const double xhat = (values[index_of(i)] - mean) * rstd;
      g[index_of(i)] = rstd * (g[index_of(i)] - sum / count - xhat * product / count);
    }
  }
}

void apply_pointwise_backward(const Pointwise& pointwise, const Sizes& sizes, Values argument, Values x,
                              std::span<double> gradient, std::span<double> argument_gradient) {
  std::fill(argument_gradient.begin(), argument_gradient.end(), 0);
  for (int64_t plane = 0; plane < sizes.batch * sizes.channels; ++plane) {
    const int64_t n = plane / sizes.channels;
    const int64_t c = plane % sizes.channels;
    for (int64_t position = 0; position < sizes.positions(); ++position) {
      const size_t i = index_of(plane * sizes.positions() + position);
      const size_t at = index_of(argument_index(pointwise, sizes, n, c, position));
      const PointwiseGradient result =
          pointwise_gradient(pointwise, x[i], argument.empty() ? 0 : argument[at], gradient[i]);
      gradient[i] = result.x;
      if (!argument.empty()) argument_gradient[at] += result.p;
    }
  }
}

void mean_over_space_backward(const Sizes& sizes, Values output_gradient, std::span<double> gradient) {
  for (int64_t i = 0; i < sizes.elements(); ++i)
    gradient[index_of(i)] =
        output_gradient[index_of(i / sizes.positions())] / static_cast<double>(sizes.positions());
}

int64_t backward_scratch_elements(const Block& block, const Sizes& activation_sizes) {
  return activation_sizes.elements() * (static_cast<int64_t>(block.stages().size()) + 1);
}

void backward(const Block& block, const Sizes& input_sizes, const Sizes& activation_sizes, Values input,
              Values parameters, Values output_gradient, std::span<double> scratch,
              std::span<double> input_gradient, std::span<double> parameter_gradients, Executor& executor) {
  Backward(block, input_sizes, activation_sizes, input, parameters, scratch, parameter_gradients, executor)
      .run(output_gradient, input_gradient);
}

Gradients backward(const Block& block, const Shape& input_sizes, Values input,
                   std::span<const std::vector<double>> parameters, Values output_gradient) {
  std::vector<double> all_parameters;
  for (const std::vector<double>& parameter : parameters)
    all_parameters.insert(all_parameters.end(), parameter.begin(), parameter.end());
  const Sizes activation_sizes(block.conv_output_shape(input_sizes));
  std::vector<double> scratch(index_of(backward_scratch_elements(block, activation_sizes)));
  std::vector<double> all_gradients(all_parameters.size());
  Gradients gradients;
  gradients.input.resize(input.size());
  SerialExecutor executor;
  backward(block, Sizes(input_sizes), activation_sizes, input, all_parameters, output_gradient, scratch,
           gradients.input, all_gradients, executor);
  auto at = all_gradients.begin();
  for (const std::vector<double>& parameter : parameters) {
    const auto end = at + static_cast<std::ptrdiff_t>(parameter.size());
    gradients.parameters.emplace_back(at, end);
    at = end;
  }
  return gradients;
}

}  // namespace onepass::reference
