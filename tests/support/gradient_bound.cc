// The gradients a block should have and how far an honest implementation may be from them, element by
// element.
#include "support/gradient_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/backward.h"
#include "tool/judged_error.h"

namespace onepass::testing {
namespace {

using reference::PointwiseGradient;
using reference::Sizes;
using reference::Values;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double roundoff = 0x1p-24;
constexpr double underflow = 4 * 0x1p-149;
constexpr double stage_factor = 8;

// A sum as the terms come in. Roundings add up like a random walk; those of equal terms one after the other,
// as a mean hands them back, go the same way.
struct Sum {
  double value = 0;
  double magnitude = 0;
  double bound = 0;
  double count = 0;
  double last = 0;
  double repeats = 0;

  void add(double term, double term_bound) {
    if (count > 0 && term == last) ++repeats;
    last = term;
    value += term;
    magnitude += std::abs(term);
    bound += term_bound;
    ++count;
  }
  double total_bound() const {
    if (!(bound < infinity)) return infinity;
    const double roundings = stage_factor + std::sqrt(count) / 4 + repeats / 8;
    return bound + roundings * roundoff * magnitude + count * underflow;
  }
};

// What the rounding errors of evaluating the derivative at x are proportional to.
double derivative_scale(Op op, double x, double derivative) {
  switch (op) {
    case Op::hardswish:
    case Op::sigmoid:
    case Op::softplus:
    case Op::tanh:
    case Op::elu:
      return 1 + std::abs(derivative);
    case Op::gelu:
    case Op::swish:
    case Op::mish:
      return 1 + std::min(std::abs(x), 20.0);
    case Op::gelu_tanh:
      return 1 + std::min(std::abs(x * x * x), 100.0);
    default:
      return std::abs(derivative);
  }
}

// Whether the derivative is computed from a sigmoid or the normal distribution function.
bool has_sigmoid(Op op) {
  return op == Op::sigmoid || op == Op::softplus || op == Op::swish || op == Op::gelu || op == Op::gelu_tanh;
}

class BoundedBackward {
 public:
  BoundedBackward(const BackwardProblem& problem, const std::vector<double>& input,
                  const std::vector<std::vector<double>>& parameters,
                  const std::vector<double>& output_gradient)
      : problem_(problem.forward),
        multiplies_tf32_(has_tf32_products(problem.forward)),
        sigmoid_error_(problem.forward.numerics == Numerics::strict
                           ? 0
                           : tool::sigmoid_error(problem.forward.device, problem.input_gradient.dtype)),
        sizes_(problem.forward.block.conv_output_shape(problem.forward.input.sizes)),
        input_(input),
        parameters_(parameters),
        next_parameter_(parameters.size()),
        gradient_(output_gradient),
        bounds_(output_gradient.size(), 0),
        stage_inputs_(make_stage_inputs()) {
    result_.parameters.resize(parameters.size());
    const std::vector<Stage>& stages = problem_.block.stages();
    for (size_t i = stages.size(); i-- > 0;) {
      prefix_ = i;
      std::visit([this](const auto& stage) { apply(stage); }, stages[i]);
    }
    result_.input = {std::move(gradient_), std::move(bounds_)};
  }

  ExpectedGradients result() && { return std::move(result_); }

 private:
  std::vector<Expected> make_stage_inputs() const {
    Problem own(problem_.block, problem_.input.sizes);
    if (multiplies_tf32_) own.precision = Precision::tf32;
    return expected_stage_inputs(own, input_, parameters_, sigmoid_error_);
  }
  // The values before the current stage, with their bounds.
  const Expected& stage_input() const { return stage_inputs_[prefix_]; }

  size_t channel_of(size_t element) const {
    return element / static_cast<size_t>(sizes_.positions()) % static_cast<size_t>(sizes_.channels);
  }

  void keep(size_t parameter, const std::vector<Sum>& sums) {
    Expected& expected = result_.parameters[parameter];
    for (const Sum& sum : sums) {
      expected.values.push_back(sum.value);
      expected.bounds.push_back(sum.total_bound());
    }
  }

  // Whether a kernel may multiply operands of 10 bits: f32 ones of a tf32 problem, or ones of 16 bits.
  static bool has_tf32_products(const Problem& problem) {
    return problem.precision == Precision::tf32 ||
           (problem.input.dtype != DType::f32 && problem.input.dtype != DType::f64);
  }

  bool is_the_same_all_over_channels() const {
    const auto positions = static_cast<size_t>(sizes_.positions());
    for (size_t i = 0; i < gradient_.size(); ++i) {
      if (gradient_[i] != gradient_[i / positions * positions]) return false;
    }
    return true;
  }

  // Sums of products with the gradient, which has a bound of its own.
  void apply(const Conv& conv) {
    const Block alone({conv});
    const Shape& sizes = problem_.input.sizes;
    std::vector<std::vector<double>> weights(parameters_.begin(), parameters_.begin() + (conv.bias ? 2 : 1));
    const auto gradients = [&](double (*of)(double), std::vector<double> gradient) {
      const auto all = [of](std::vector<double> values) {
        for (double& value : values) value = of(value);
        return values;
      };
      std::vector<std::vector<double>> own;
      for (const std::vector<double>& weight : weights) own.push_back(all(weight));
      return reference::backward(alone, sizes, all(input_), own, gradient);
    };
    // Infinite bounds as numbers: products with 0 stay 0.
    constexpr double huge = 1e300;
    std::vector<double> inherited = bounds_;
    // Right after a mean the gradient is the same all over a channel, and its rounding does not average out.
    const bool same = multiplies_tf32_ && is_the_same_all_over_channels();
    for (size_t i = 0; i < inherited.size(); ++i) {
      inherited[i] = std::min(inherited[i] + (same ? 0x1p-11 * std::abs(gradient_[i]) : 0), huge);
    }
    std::vector<double> square = gradient_;
    for (double& value : square) value *= value;
    const auto exact = gradients([](double x) { return x; }, gradient_);
    reference::Gradients from_bounds;
    if (std::any_of(inherited.begin(), inherited.end(), [](double bound) { return bound != 0; })) {
      from_bounds = gradients([](double x) { return std::abs(x); }, inherited);
    } else {  // a convolution alone
      from_bounds.input.resize(exact.input.size());
      for (const std::vector<double>& values : exact.parameters)
        from_bounds.parameters.emplace_back(values.size());
    }
    const auto squares = gradients([](double x) { return x * x; }, square);
    const auto bounds = [&](const std::vector<double>& values, const std::vector<double>& own,
                            const std::vector<double>& term_squares, double terms) {
      Expected expected{values, {}};
      for (size_t i = 0; i < values.size(); ++i) {
        const double walk = std::sqrt(term_squares[i]) + std::abs(values[i]);
        // Tensor cores cut off what they add; split operands leave them after 64 terms.
        const double roundings = 4 * std::sqrt(terms) + (multiplies_tf32_ ? terms / 2 : 32);
        const double rounded = multiplies_tf32_ ? 4 * 0x1p-11 * std::sqrt(term_squares[i]) : 0;
        const double bound = own[i] + rounded + roundings * roundoff * walk + (terms + 4) * underflow;
        const bool known = own[i] < huge / 2 && !(std::isnan(bound) && std::isfinite(values[i]));
        expected.bounds.push_back(!known ? infinity : std::isfinite(values[i]) ? bound : 0);
      }
      return expected;
    };
    const double positions = static_cast<double>(sizes_.batch) * static_cast<double>(sizes_.positions()) + 1;
    const double terms =
        static_cast<double>(parameters_[0].size()) / static_cast<double>(conv.in_channels) + 1;
    for (size_t i = 0; i < weights.size(); ++i) {
      result_.parameters[i] =
          bounds(exact.parameters[i], from_bounds.parameters[i], squares.parameters[i], positions);
    }
    Expected input = bounds(exact.input, from_bounds.input, squares.input, terms);
    gradient_ = std::move(input.values);
    bounds_ = std::move(input.bounds);
  }

  void apply(const Mean&) {
    const std::vector<double> g = std::move(gradient_);
    const auto positions = static_cast<size_t>(sizes_.positions());
    gradient_.assign(g.size() * positions, 0);
    bounds_.assign(gradient_.size(), 0);
    for (size_t i = 0; i < gradient_.size(); ++i) {
      gradient_[i] = g[i / positions] / static_cast<double>(positions);
      bounds_[i] = std::isfinite(gradient_[i]) ? 2 * roundoff * std::abs(gradient_[i]) + underflow : 0;
    }
  }

  void apply(const Pointwise& pointwise) {
    const bool has_argument = argument_kind(pointwise.op) != ArgumentKind::none;
    if (has_argument) --next_parameter_;
    const Expected& x = stage_input();
    std::vector<Sum> sums(has_argument ? parameters_[next_parameter_].size() : 0);
    for (size_t i = 0; i < gradient_.size(); ++i) {
      const size_t at = has_argument ? argument_index(pointwise, i) : 0;
      const double p = has_argument ? parameters_[next_parameter_][at] : 0;
      const double e = x.bounds[i];
      if (has_argument) {
        const double term = reference::pointwise_gradient(pointwise, x.values[i], p, gradient_[i]).p;
        sums[at].add(term, argument_bound(pointwise, x.values[i], e, p, gradient_[i], bounds_[i]));
      }
      const double g = gradient_[i];
      gradient_[i] = reference::pointwise_gradient(pointwise, x.values[i], p, g).x;
      bounds_[i] = step_bound(pointwise, x.values[i], e, p, g, bounds_[i], gradient_[i]);
    }
    if (has_argument) keep(next_parameter_, sums);
  }

  double step_bound(const Pointwise& pointwise, double x, double e, double p, double g, double b,
                    double result) const {
    if (!(e < infinity) || !(b < infinity)) return infinity;
    const auto derivative = [&](double at) { return reference::pointwise_gradient(pointwise, at, p, 1).x; };
    const double d = derivative(x);
    const double relative = stage_factor * roundoff + (has_sigmoid(pointwise.op) ? sigmoid_error_ : 0);
    const double own = relative * derivative_scale(pointwise.op, x, d);
    // An infinite gradient times what cannot be told from 0.
    if (std::isinf(g) && d != 0 && std::abs(d) <= own) return infinity;
    if (!std::isfinite(result) || !std::isfinite(d) || !std::isfinite(g)) return 0;
    const double change =
        e > 0 ? std::max(std::abs(derivative(x + e) - d), std::abs(derivative(x - e) - d)) : 0;
    return std::abs(d) * b + std::abs(g) * (change + own) + b * change + underflow;
  }

  static double argument_bound(const Pointwise& pointwise, double x, double e, double p, double g, double b) {
    if (!(e < infinity) || !(b < infinity)) return infinity;
    const auto term = [&](double at, double gradient) {
      return reference::pointwise_gradient(pointwise, at, p, gradient).p;
    };
    const double here = term(x, g);
    if (!std::isfinite(here)) return 0;
    double bound = std::abs(term(x, b)) + 2 * roundoff * std::abs(here);
    if (e > 0)
      bound += std::max(std::abs(term(x + e, std::abs(g) + b) - term(x, std::abs(g) + b)),
                        std::abs(term(x - e, std::abs(g) + b) - term(x, std::abs(g) + b)));
    return bound + underflow;
  }

  size_t argument_index(const Pointwise& pointwise, size_t element) const {
    const auto index = static_cast<int64_t>(element);
    const int64_t plane = index / sizes_.positions();
    return static_cast<size_t>(reference::argument_index(
        pointwise, sizes_, plane / sizes_.channels, plane % sizes_.channels, index % sizes_.positions()));
  }

  struct Slab {
    double mean = 0;
    double rstd = 0;
    double mean_error = 0;
    double rstd_error = 0;  // relative

    double xhat(double x) const { return (x - mean) * rstd; }
    double xhat_error(double x, double e) const {
      const double rounding = stage_factor * roundoff * (std::abs(xhat(x)) + std::abs(mean) * rstd);
      return (e + mean_error) * rstd + rstd_error * std::abs(xhat(x)) + rounding;
    }
  };

  static Slab slab_of(const Norm& norm, Values x, Values e) {
    const auto count = static_cast<double>(x.size());
    Slab slab;
    double mean_bound = 0;
    for (const double value : x) slab.mean += value / count;
    for (const double bound : e) mean_bound += bound / count;
    double variance = 0;
    double difference = underflow;
    for (size_t i = 0; i < x.size(); ++i) {
      const double distance = std::abs(x[i] - slab.mean);
      variance += distance * distance / count;
      difference += (2 * distance + e[i]) * e[i] / count;
    }
    slab.rstd = 1 / std::sqrt(variance + norm.eps);
    slab.mean_error =
        mean_bound + stage_factor * roundoff * (std::abs(slab.mean) + 4 * std::sqrt(variance)) + underflow;
    slab.rstd_error =
        (difference + slab.mean_error * slab.mean_error) * slab.rstd * slab.rstd + stage_factor * roundoff;
    return slab;
  }

  void apply(const Norm& norm) {
    if (norm.affine) next_parameter_ -= 2;
    const Expected& x = stage_input();
    const std::vector<double>* weight = norm.affine ? &parameters_[next_parameter_] : nullptr;
    std::vector<Sum> weight_sums(static_cast<size_t>(sizes_.channels));
    std::vector<Sum> bias_sums(weight_sums.size());
    const auto slab_elements =
        static_cast<size_t>(sizes_.channels / norm.group_count(sizes_.channels) * sizes_.positions());
    for (size_t first = 0; first < gradient_.size(); first += slab_elements) {
      apply_to_slab(norm, weight, x, first, slab_elements, weight_sums, bias_sums);
    }
    if (!norm.affine) return;
    keep(next_parameter_, weight_sums);
    keep(next_parameter_ + 1, bias_sums);
  }

  void apply_to_slab(const Norm& norm, const std::vector<double>* weight, const Expected& x, size_t first,
                     size_t count, std::vector<Sum>& weight_sums, std::vector<Sum>& bias_sums) {
    const Slab slab =
        slab_of(norm, Values(x.values).subspan(first, count), Values(x.bounds).subspan(first, count));
    const bool lost = std::isfinite(slab.mean) && !(slab.rstd_error <= 0.5);
    Sum sum;
    Sum product;
    for (size_t i = first; i < first + count; ++i) {
      const double xhat = slab.xhat(x.values[i]);
      const double error = lost ? infinity : slab.xhat_error(x.values[i], x.bounds[i]);
      const size_t c = channel_of(i);
      const double gamma = weight != nullptr ? (*weight)[c] : 1;
      const double g = gradient_[i];
      const double b = bounds_[i];
      bias_sums[c].add(g, b);
      weight_sums[c].add(g * xhat, product_bound(g, b, xhat, error));
      sum.add(gamma * g, std::abs(gamma) * b);
      product.add(gamma * g * xhat, std::abs(gamma) * product_bound(g, b, xhat, error));
    }
    const auto elements = static_cast<double>(count);
    const double m1 = sum.value / elements;
    const double m2 = product.value / elements;
    for (size_t i = first; i < first + count; ++i) {
      const double xhat = slab.xhat(x.values[i]);
      const double error = lost ? infinity : slab.xhat_error(x.values[i], x.bounds[i]);
      const double gamma = weight != nullptr ? (*weight)[channel_of(i)] : 1;
      const double q = gamma * gradient_[i];
      const double inherited = std::abs(gamma) * bounds_[i] + sum.total_bound() / elements +
                               error * std::abs(m2) +
                               (std::abs(xhat) + error) * product.total_bound() / elements + underflow;
      const double rounding =
          (slab.rstd_error + stage_factor * roundoff) * (std::abs(q) + std::abs(m1) + std::abs(xhat * m2));
      gradient_[i] = slab.rstd * (q - m1 - xhat * m2);
      bounds_[i] = std::isnan(gradient_[i]) && !lost ? 0 : slab.rstd * (inherited + rounding) + underflow;
      if (!(bounds_[i] < infinity)) bounds_[i] = infinity;
    }
  }

  static double product_bound(double g, double b, double xhat, double error) {
    if (!(b < infinity) || !(error < infinity)) return infinity;
    if (!std::isfinite(g * xhat)) return 0;
    return std::abs(g) * error + b * (std::abs(xhat) + error) + underflow;
  }

  const Problem& problem_;
  bool multiplies_tf32_;
  double sigmoid_error_;
  Sizes sizes_;  // after the convolution
  const std::vector<double>& input_;
  const std::vector<std::vector<double>>& parameters_;
  size_t next_parameter_;  // the first that the stages taken back have
  size_t prefix_ = 0;      // stages before the current one
  std::vector<double> gradient_;
  std::vector<double> bounds_;
  std::vector<Expected> stage_inputs_;
  ExpectedGradients result_;
};

std::vector<double> squares(const std::vector<double>& values) {
  std::vector<double> result = values;
  for (double& value : result) value *= value;
  return result;
}

// A convolution alone: of every gradient the random walk along the partial sums, as error_bound.h has it.
ExpectedGradients bounds_of_convolution(const BackwardProblem& problem, const std::vector<double>& input,
                                        const std::vector<std::vector<double>>& parameters,
                                        const std::vector<double>& output_gradient) {
  constexpr double conv_factor = 4;
  const Block& block = problem.forward.block;
  const Shape& sizes = problem.forward.input.sizes;
  std::vector<std::vector<double>> squared;
  for (const std::vector<double>& parameter : parameters) squared.push_back(squares(parameter));
  const reference::Gradients exact = reference::backward(block, sizes, input, parameters, output_gradient);
  const reference::Gradients squared_terms =
      reference::backward(block, sizes, squares(input), squared, squares(output_gradient));
  const auto bounds = [](const std::vector<double>& values, const std::vector<double>& term_squares,
                         double terms) {
    Expected expected{values, {}};
    for (size_t i = 0; i < values.size(); ++i) {
      const double walk = std::sqrt(term_squares[i]) + std::abs(values[i]);
      expected.bounds.push_back(conv_factor * roundoff * std::sqrt(terms) * walk + (terms + 4) * underflow);
    }
    return expected;
  };
  const Shape output_sizes = block.output_shape(sizes);
  const auto positions = static_cast<double>(element_count(output_sizes) / output_sizes[1]) + 1;
  const double terms =
      static_cast<double>(parameters[0].size()) / static_cast<double>(block.conv()->in_channels) + 1;
  ExpectedGradients expected;
  expected.input = bounds(exact.input, squared_terms.input, terms);
  expected.parameters.push_back(bounds(exact.parameters[0], squared_terms.parameters[0], positions));
  if (!block.conv()->bias) return expected;
  // The terms of a bias are the gradient itself, and those of the squares its squares.
  expected.parameters.push_back(bounds(exact.parameters[1], squared_terms.parameters[1], positions));
  return expected;
}

}  // namespace

ExpectedGradients expected_gradients(const BackwardProblem& problem, const std::vector<double>& input,
                                     const std::vector<std::vector<double>>& parameters,
                                     const std::vector<double>& output_gradient) {
  const Problem& forward = problem.forward;
  if (forward.block.conv() != nullptr && forward.block.stages().size() == 1 &&
      forward.device.kind == Device::Kind::cpu) {
    return bounds_of_convolution(problem, input, parameters, output_gradient);
  }
  ExpectedGradients expected = BoundedBackward(problem, input, parameters, output_gradient).result();
  // The judge is the reference; the walk above gives the bounds. Of a convolution alone it has the values of
  // the reference as they are.
  if (forward.block.conv() != nullptr && forward.block.stages().size() == 1) return expected;
  reference::Gradients gradients = reference::backward(problem.forward.block, problem.forward.input.sizes,
                                                       input, parameters, output_gradient);
  expected.input.values = std::move(gradients.input);
  for (size_t i = 0; i < parameters.size(); ++i)
    expected.parameters[i].values = std::move(gradients.parameters[i]);
  return expected;
}

}  // namespace onepass::testing
