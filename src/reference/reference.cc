// The meaning of a block: its forward pass in double, one plain loop nest per stage.
#include "reference/reference.h"

#include <algorithm>
#include <cmath>

#include "block/stages.h"
#include "reference/loops.h"

namespace onepass::reference {

Sizes::Sizes(const Shape& shape) : batch(shape[0]), channels(shape[1]) {
  std::copy(shape.begin() + 2, shape.end(), space.begin());
}

void convolve(const Conv& conv, const Sizes& input_sizes, const Sizes& output_sizes, Values input,
              Values weight, Values bias, std::span<double> output, Executor& executor) {
  const int64_t group_inputs = conv.in_channels / conv.groups;
  const int64_t group_outputs = conv.out_channels / conv.groups;
  const int64_t taps = tap_count(conv);
  const int64_t step = conv.stride[2];
  const Sizes& coarse = conv.transposed ? input_sizes : output_sizes;
  const Sizes& fine = conv.transposed ? output_sizes : input_sizes;
  executor.for_each(output_sizes.batch * conv.out_channels, [&](int64_t task, int) {
    const int64_t n = task / conv.out_channels;
    const int64_t o = task % conv.out_channels;
    const int64_t first_input = o / group_outputs * group_inputs;
    const std::span<double> y =
        output.subspan(index_of(task * output_sizes.positions()), index_of(output_sizes.positions()));
    std::fill(y.begin(), y.end(), conv.bias ? bias[index_of(o)] : 0);
    for (int64_t i = first_input; i < first_input + group_inputs; ++i) {
      const Values x = input.subspan(index_of((n * conv.in_channels + i) * input_sizes.positions()));
      const int64_t pair =
          conv.transposed ? i * group_outputs + o % group_outputs : o * group_inputs + i - first_input;
      for_each_position(conv.kernel, [&](const Extents& k, int64_t tap) {
        const double w = weight[index_of(pair * taps + tap)];
        for_each_row_of_tap(conv, k, coarse.space, fine.space, [&](int64_t q, int64_t p, int64_t count) {
          if (conv.transposed) {
            for (int64_t j = 0; j < count; ++j) y[index_of(p + j * step)] += x[index_of(q + j)] * w;
          } else {
            for (int64_t j = 0; j < count; ++j) y[index_of(q + j)] += x[index_of(p + j * step)] * w;
          }
        });
      });
    }
  });
}

void normalise(const Norm& norm, const Sizes& sizes, Values weight, Values bias, std::span<double> x,
               Executor& executor, float* statistics) {
  const int64_t groups = norm.group_count(sizes.channels);
  const int64_t group_channels = sizes.channels / groups;
  const int64_t slab_elements = group_channels * sizes.positions();
  executor.for_each(sizes.batch * groups, [&](int64_t task, int) {
    const std::span<double> slab = x.subspan(index_of(task * slab_elements), index_of(slab_elements));
    const auto [mean, variance] = moments(slab);
    const double deviation = std::sqrt(variance + norm.eps);
    if (statistics != nullptr) {
      statistics[2 * task] = static_cast<float>(mean);
      statistics[2 * task + 1] = static_cast<float>(1 / deviation);
    }
    for (int64_t i = 0; i < slab_elements; ++i) {
      const int64_t c = task % groups * group_channels + i / sizes.positions();
      double& value = slab[index_of(i)];
      value = (value - mean) / deviation;
      if (norm.affine) value = value * weight[index_of(c)] + bias[index_of(c)];
    }
  });
}

namespace {

// GCC 12 leaves the rounding out where it rounds two neighbours at once on x86: each goes through memory.
double rounded_to_float(double value) {
  const volatile auto rounded = static_cast<float>(value);
  return static_cast<double>(rounded);
}

}  // namespace

Block with_limits_of(DType dtype, const Block& block) {
  std::vector<Stage> stages = block.stages();
  for (Stage& stage : stages) {
    auto* pointwise = std::get_if<Pointwise>(&stage);
    if (pointwise == nullptr || !has_limits(pointwise->op) || dtype == DType::f64) continue;
    pointwise->a = rounded_to_float(pointwise->a);
    pointwise->b = rounded_to_float(pointwise->b);
  }
  return Block(std::move(stages));
}

int64_t argument_elements(const Pointwise& pointwise, const Sizes& sizes) {
  switch (argument_kind(pointwise.op)) {
    case ArgumentKind::none:
      return 0;
    case ArgumentKind::tensor:
      return sizes.elements();
    case ArgumentKind::slope:
    case ArgumentKind::channel:
      break;
  }
  if (pointwise.per == Per::tensor) return 1;
  return pointwise.per == Per::channel ? sizes.channels : sizes.batch * sizes.channels;
}

int64_t argument_index(const Pointwise& pointwise, const Sizes& sizes, int64_t n, int64_t c,
                       int64_t position) {
  if (argument_kind(pointwise.op) == ArgumentKind::tensor)
    return (n * sizes.channels + c) * sizes.positions() + position;
  if (pointwise.per == Per::tensor) return 0;
  return pointwise.per == Per::channel ? c : n * sizes.channels + c;
}

void apply_pointwise(const Pointwise& pointwise, const Sizes& sizes, Values argument, std::span<double> x,
                     Executor& executor) {
  executor.for_each(sizes.batch * sizes.channels, [&](int64_t task, int) {
    const int64_t n = task / sizes.channels;
    const int64_t c = task % sizes.channels;
    for (int64_t position = 0; position < sizes.positions(); ++position) {
      const double p =
          argument.empty() ? 0 : argument[index_of(argument_index(pointwise, sizes, n, c, position))];
      double& value = x[index_of(task * sizes.positions() + position)];
      value = pointwise_value(pointwise, value, p);
    }
  });
}

void mean_over_space(const Sizes& sizes, Values x, std::span<double> output, Executor& executor) {
  executor.for_each(sizes.batch * sizes.channels, [&](int64_t task, int) {
    double sum = 0;
    for (int64_t position = 0; position < sizes.positions(); ++position)
      sum += x[index_of(task * sizes.positions() + position)];
    output[index_of(task)] = sum / static_cast<double>(sizes.positions());
  });
}

int64_t weight_elements(const Conv& conv) {
  return conv.in_channels * conv.out_channels / conv.groups * tap_count(conv);
}

void forward(const Block& block, const Sizes& input_sizes, const Sizes& activation_sizes, Values input,
             Values parameters, std::span<double> scratch, std::span<double> output, Executor& executor,
             float* statistics) {
  const std::span<double> activation = block.has_mean() ? scratch : output;
  ParameterCursor cursor(parameters);
  if (block.conv() == nullptr) std::copy(input.begin(), input.end(), activation.begin());
  for (const Stage& stage : block.stages()) {
    if (const auto* conv = std::get_if<Conv>(&stage)) {
      const Values weight = cursor.take(weight_elements(*conv));
      const Values bias = cursor.take(conv->bias ? conv->out_channels : 0);
      convolve(*conv, input_sizes, activation_sizes, input, weight, bias, activation, executor);
    } else if (const auto* pointwise = std::get_if<Pointwise>(&stage)) {
      const Values argument = cursor.take(argument_elements(*pointwise, activation_sizes));
      apply_pointwise(*pointwise, activation_sizes, argument, activation, executor);
    } else if (const auto* norm = std::get_if<Norm>(&stage)) {
      const int64_t affine_elements = norm->affine ? activation_sizes.channels : 0;
      const Values weight = cursor.take(affine_elements);
      const Values bias = cursor.take(affine_elements);
      normalise(*norm, activation_sizes, weight, bias, activation, executor, statistics);
    } else {
      mean_over_space(activation_sizes, activation, output, executor);
    }
  }
}

std::vector<double> forward(const Block& block, const Shape& input_sizes, Values input,
                            std::span<const std::vector<double>> parameters) {
  std::vector<double> all_parameters;
  for (const std::vector<double>& parameter : parameters)
    all_parameters.insert(all_parameters.end(), parameter.begin(), parameter.end());
  const Sizes activation_sizes(block.conv_output_shape(input_sizes));
  std::vector<double> scratch(block.has_mean() ? index_of(activation_sizes.elements()) : 0);
  std::vector<double> output(index_of(element_count(block.output_shape(input_sizes))));
  SerialExecutor executor;
  forward(block, Sizes(input_sizes), activation_sizes, input, all_parameters, scratch, output, executor);
  return output;
}

}  // namespace onepass::reference
