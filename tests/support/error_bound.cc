// The result a block should have and how far an honest implementation may be from it, element by element.
#include "support/error_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "block/convert.h"
#include "reference/reference.h"
#include "tool/judged_error.h"

namespace onepass::testing {
namespace {

using reference::Sizes;
using reference::Values;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double conv_factor = 4;
constexpr double split_factor = 8;
constexpr double stage_factor = 8;

struct Arithmetic {
  double roundoff;
  double underflow;  // the most that one operation loses among denormals

  explicit Arithmetic(DType dtype)
      : roundoff(dtype == DType::f64 ? 0x1p-53 : 0x1p-24),
        underflow(dtype == DType::f64 ? 0x1p-1074 : 0x1p-149) {}
};

std::vector<double> squares(Values values) {
  std::vector<double> result(values.begin(), values.end());
  for (double& value : result) value *= value;
  return result;
}

double mean_of(Values values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double mean_magnitude(Values values) {
  double sum = 0;
  for (const double value : values) sum += std::abs(value);
  return sum / static_cast<double>(values.size());
}

// How far the operation moves when x moves by up to e.
double change(const Pointwise& pointwise, double x, double p, double e) {
  const double v = reference::pointwise_value(pointwise, x, p);
  return std::max(std::abs(reference::pointwise_value(pointwise, x + e, p) - v),
                  std::abs(reference::pointwise_value(pointwise, x - e, p) - v));
}

// What the rounding errors of evaluating the operation at x, with result v, are proportional to.
double rounding_scale(Op op, double x, double v) {
  switch (op) {
    case Op::relu:
    case Op::relu6:
    case Op::leaky_relu:
    case Op::prelu:
    case Op::clamp:
    case Op::hardtanh:
    case Op::mul:
    case Op::channel_mul:
      return std::abs(v);
    case Op::hardsigmoid:
      return 1;
    default:
      return std::isfinite(x) ? std::abs(x) + std::abs(v) : std::abs(v);
  }
}

class BoundedForward {
 public:
  BoundedForward(const Problem& problem, const std::vector<double>& input,
                 const std::vector<std::vector<double>>& parameters, const Accuracy& accuracy,
                 bool with_statistics, std::vector<Expected>* stage_inputs = nullptr)
      : arithmetic_(problem.output.dtype),
        truncates_(problem.rounds_to_tf32() || tool::rounds_input(problem, accuracy)),
        splits_(problem.device.kind == Device::Kind::cuda && problem.input.dtype == DType::f32 &&
                !truncates_),
        accuracy_(accuracy),
        dithering_(problem.precision == Precision::tf32 ? tool::dithering(accuracy) : 0),
        with_statistics_(with_statistics),
        input_(input),
        parameters_(parameters),
        input_sizes_(problem.input.sizes),
        sizes_(problem.block.conv_output_shape(problem.input.sizes)),
        values_(input) {
    if (problem.block.conv() != nullptr) tool::round_operands(problem, accuracy, input_, parameters_[0]);
    if (problem.block.conv() != nullptr) values_.resize(static_cast<size_t>(sizes_.elements()));
    bounds_.assign(values_.size(), 0);
    const bool is_allowed = accuracy.sigmoid > 0 || dithering_ > 0 || accuracy.cut_terms > 0;
    if (with_statistics && is_allowed && problem.block.norm() != nullptr) exact_bounds_ = bounds_;
    const std::vector<Stage>& stages = problem.block.stages();
    for (size_t i = 0; i < stages.size(); ++i) {
      if (stage_inputs != nullptr) {
        stage_inputs->push_back(i == 0 ? Expected{input_, std::vector<double>(input_.size(), 0)}
                                       : Expected{values_, bounds_});
        if (i + 1 == stages.size()) return;  // nobody gets what the last one gives
      }
      std::visit([this](const auto& typed) { apply(typed); }, stages[i]);
    }
  }

  Expected result() && {
    return {std::move(values_), std::move(bounds_), std::move(statistics_), std::move(granted_)};
  }

 private:
  const std::vector<double>& next_parameter() { return parameters_[used_parameters_++]; }

  // `inherited` is what the stage makes of the bounds before it: infinite stays infinite. Otherwise what is
  // not finite has no error.
  double bound(size_t i, double inherited, double rounding) const {
    if (!(inherited < infinity)) return infinity;
    return std::isfinite(values_[i]) ? inherited + rounding + 4 * arithmetic_.underflow : 0;
  }
  void set_bound(size_t i, double inherited, double rounding) { bounds_[i] = bound(i, inherited, rounding); }

  void apply(const Conv& conv) {
    static const std::vector<double> none;
    const auto& weight = next_parameter();
    const auto& bias = conv.bias ? next_parameter() : none;
    reference::convolve(conv, input_sizes_, sizes_, input_, weight, bias, values_, executor_);
    reference::convolve(conv, input_sizes_, sizes_, squares(input_), squares(weight), squares(bias), bounds_,
                        executor_);
    const auto terms = static_cast<double>(reference::weight_elements(conv) / conv.out_channels + 1);
    for (size_t i = 0; i < values_.size(); ++i) {
      const double walk = std::sqrt(bounds_[i]) + std::abs(values_[i]);
      const double roundings =
          conv_factor * std::sqrt(terms) + (truncates_ ? terms / 2 : 0) + (splits_ ? split_factor : 0);
      // In tf32 every row is allowed as much; the row that says so is for its statistics too.
      const double cut = tool::cutting_error(accuracy_) * walk;
      const double rounding = roundings * arithmetic_.roundoff * walk + terms * arithmetic_.underflow;
      const double dithered = dithering_ * std::sqrt(bounds_[i]);
      if (!exact_bounds_.empty()) exact_bounds_[i] = bound(i, 0, rounding);
      set_bound(i, 0, rounding + dithered + cut);
    }
  }

  void apply(const Pointwise& pointwise) {
    static const std::vector<double> none;
    const bool has_argument = argument_kind(pointwise.op) != ArgumentKind::none;
    const auto& argument = has_argument ? next_parameter() : none;
    for (size_t i = 0; i < values_.size(); ++i) {
      const double p = has_argument ? argument[argument_index(pointwise, i)] : 0;
      const double x = values_[i];
      values_[i] = reference::pointwise_value(pointwise, x, p);
      const double rounding =
          stage_factor * arithmetic_.roundoff * rounding_scale(pointwise.op, x, values_[i]);
      const auto inherited = [&](double e) { return e > 0 && e < infinity ? change(pointwise, x, p, e) : e; };
      set_bound(i, inherited(bounds_[i]),
                rounding + accuracy_.sigmoid * tool::sigmoid_scale(pointwise.op, x));
      if (!exact_bounds_.empty()) exact_bounds_[i] = bound(i, inherited(exact_bounds_[i]), rounding);
    }
  }

  size_t argument_index(const Pointwise& pointwise, size_t element) const {
    const auto index = static_cast<int64_t>(element);
    const int64_t plane = index / sizes_.positions();
    return static_cast<size_t>(reference::argument_index(
        pointwise, sizes_, plane / sizes_.channels, plane % sizes_.channels, index % sizes_.positions()));
  }

  void apply(const Norm& norm) {
    static const std::vector<double> none;
    const auto& weight = norm.affine ? next_parameter() : none;
    const auto& bias = norm.affine ? next_parameter() : none;
    const std::vector<double> x = values_;
    reference::normalise(norm, sizes_, weight, bias, values_, executor_);

    const auto group_channels = static_cast<size_t>(sizes_.channels / norm.group_count(sizes_.channels));
    const auto positions = static_cast<size_t>(sizes_.positions());
    const size_t slab_elements = group_channels * positions;
    for (size_t first = 0; first < x.size(); first += slab_elements) {
      const Values own = Values(x).subspan(first, slab_elements);
      const SlabError slab = slab_error(norm, own, Values(bounds_).subspan(first, slab_elements));
      if (with_statistics_) statistics_.insert(statistics_.end(), {slab.mean, slab.rstd});
      if (!exact_bounds_.empty()) {
        const SlabError exact = slab_error(norm, own, Values(exact_bounds_).subspan(first, slab_elements));
        granted_.push_back(slab.mean_error - exact.mean_error);
        granted_.push_back((slab.variance_error - exact.variance_error) / 2);
      }
      for (size_t i = first; i < first + slab_elements; ++i) {
        const size_t c = i / positions % static_cast<size_t>(sizes_.channels);
        const double scale = norm.affine ? std::abs(weight[c]) : 1;
        const double shift = norm.affine ? std::abs(bias[c]) : 0;
        const double xhat = std::abs(x[i] - slab.mean) * slab.rstd;
        const double rounding = scale * (xhat + std::abs(slab.mean) * slab.rstd) + shift;
        const double holding = scale * tool::holding_error(accuracy_.held, xhat, slab.farthest * slab.rstd);
        set_bound(i, inherited_by_norm(slab, bounds_[i], xhat, scale),
                  stage_factor * arithmetic_.roundoff * rounding + holding);
      }
    }
    exact_bounds_.clear();
  }

  struct SlabError {
    double mean = 0;
    double farthest = 0;  // from it
    double rstd = 0;
    double mean_error = 0;
    double variance_error = 0;  // relative
  };

  SlabError slab_error(const Norm& norm, Values x, Values e) const {
    const auto count = static_cast<double>(x.size());
    const double rounding = stage_factor * arithmetic_.roundoff;
    SlabError slab;
    slab.mean = mean_of(x);
    double variance = 0;
    double difference = arithmetic_.underflow;
    for (size_t i = 0; i < x.size(); ++i) {
      const double deviation = std::abs(x[i] - slab.mean);
      variance += deviation * deviation / count;
      slab.farthest = std::max(slab.farthest, deviation);
      difference += (2 * deviation + e[i]) * e[i] / count;
    }
    slab.mean_error =
        mean_of(e) + rounding * (std::abs(slab.mean) + 4 * std::sqrt(variance)) + arithmetic_.underflow;
    difference += slab.mean_error * slab.mean_error;
    slab.rstd = 1 / std::sqrt(variance + norm.eps);
    slab.variance_error = difference / (variance + norm.eps) + rounding;
    return slab;
  }

  // A slab that is not finite gives NaN; one whose variance is lost among rounding errors gives noise.
  static double inherited_by_norm(const SlabError& slab, double e, double xhat, double scale) {
    if (!std::isfinite(slab.mean)) return 0;
    if (!(slab.variance_error <= 0.5)) return infinity;
    return scale * ((e + slab.mean_error) * slab.rstd + slab.variance_error * xhat);
  }

  void apply(const Mean&) {
    const std::vector<double> x = std::move(values_);
    const std::vector<double> e = std::move(bounds_);
    const auto positions = static_cast<size_t>(sizes_.positions());
    const auto planes = static_cast<size_t>(sizes_.batch * sizes_.channels);
    values_.assign(planes, 0);
    bounds_.assign(planes, 0);
    reference::mean_over_space(sizes_, x, values_, executor_);
    for (size_t i = 0; i < planes; ++i) {
      const double magnitude = mean_magnitude(Values(x).subspan(i * positions, positions));
      const double factor = stage_factor + std::sqrt(static_cast<double>(positions)) / 4;
      set_bound(i, mean_of(Values(e).subspan(i * positions, positions)),
                factor * arithmetic_.roundoff * magnitude);
    }
  }

  Arithmetic arithmetic_;
  bool truncates_;
  bool splits_;  // operands of f32 in two
  Accuracy accuracy_;
  double dithering_;
  bool with_statistics_;
  std::vector<double> input_;  // in tf32 rounded as the row does
  std::vector<std::vector<double>> parameters_;
  size_t used_parameters_ = 0;
  Sizes input_sizes_;
  Sizes sizes_;  // after the convolution
  SerialExecutor executor_;
  std::vector<double> values_;
  std::vector<double> bounds_;
  // Up to the norm: what the bounds were if sigmoids, weights and long sums were as exact as everything
  // else; empty where they are.
  std::vector<double> exact_bounds_;
  std::vector<double> statistics_;
  std::vector<double> granted_;
};

}  // namespace

Expected expected_output(const Problem& problem, const std::vector<double>& input,
                         const std::vector<std::vector<double>>& parameters, const Accuracy& accuracy) {
  return BoundedForward(problem, input, parameters, accuracy, false).result();
}

Expected expected_with_statistics(const Problem& problem, const std::vector<double>& input,
                                  const std::vector<std::vector<double>>& parameters,
                                  const Accuracy& accuracy) {
  return BoundedForward(problem, input, parameters, accuracy, true).result();
}

std::vector<Expected> expected_stage_inputs(const Problem& problem, const std::vector<double>& input,
                                            const std::vector<std::vector<double>>& parameters,
                                            double sigmoid_error) {
  std::vector<Expected> stage_inputs;
  // Operands are given as the kernels multiply them.
  const Accuracy accuracy{.tf32 = Accuracy::Tf32::whole, .sigmoid = sigmoid_error};
  BoundedForward(problem, input, parameters, accuracy, false, &stage_inputs);
  return stage_inputs;
}

bool is_acceptable(DType dtype, double actual, double value, double bound) {
  if (!std::isfinite(bound)) return true;
  if (std::isnan(value)) return std::isnan(actual);
  return actual >= round_to(dtype, value - bound) && actual <= round_to(dtype, value + bound);
}

}  // namespace onepass::testing
