// The expected result of a block for one sample, and the error that an implementation may have.
#include "tool/expected.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "onepass/plan.h"
#include "tool/buffers.h"
#include "tool/judged_error.h"

namespace onepass::tool {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double conv_factor = 4;
constexpr double stage_factor = 8;

using Values = std::vector<double>;

size_t index_of(int64_t index) { return static_cast<size_t>(index); }

double root_mean_square(const Values& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// One stage alone, in double.
Values run_stage(const Stage& stage, const Shape& sizes, const Values& x,
                 const std::vector<const Values*>& parameters, Executor& executor) {
  const Problem problem(Block({stage}), sizes, DType::f64, Device::cpu(executor.concurrency()));
  const Plan reference = plan(problem, {.strategy = "reference", .target = ""});
  const Buffer workspace(reference.workspace_bytes());
  Values output(index_of(element_count(problem.output.sizes)));
  Arguments arguments{x.data(), output.data(), {}};
  for (const Values* parameter : parameters) arguments.parameters.push_back(parameter->data());
  reference.run(arguments, workspace.data(), executor);
  return output;
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

struct Slab {
  double mean = 0;
  double farthest = 0;  // from it
  double rstd = 0;
  double mean_error = 0;
  double variance_error = 0;  // relative
};

class BoundedForward {
 public:
  BoundedForward(const Problem& problem, Values input, const std::vector<Values>& parameters,
                 const Accuracy& accuracy, Executor& executor)
      : roundoff_(problem.output.dtype == DType::f64 ? 0x1p-53 : 0x1p-24),
        underflow_(problem.output.dtype == DType::f64 ? 0x1p-1074 : 0x1p-149),
        accuracy_(accuracy),
        dithering_(problem.precision == Precision::tf32 ? dithering(accuracy) : 0),
        executor_(executor),
        sizes_(problem.input.sizes),
        values_(std::move(input)),
        bounds_(values_.size(), 0) {
    const auto& stages = problem.block.stages();
    const auto named = problem.block.parameters(problem.input.sizes);
    for (size_t s = 0; s < stages.size(); ++s) {
      std::vector<const Values*> own;
      for (size_t i = 0; i < named.size(); ++i) {
        if (named[i].stage == s) own.push_back(&parameters[i]);
      }
      std::visit([&](const auto& stage) { apply(stage, own); }, stages[s]);
    }
  }

  Expected result() && { return {std::move(values_), std::move(bounds_)}; }

 private:
  // Infinite stays infinite. Otherwise what is not finite has no error: NaN must be NaN.
  void set_bound(size_t i, double inherited, double rounding) {
    if (!(inherited < infinity)) {
      bounds_[i] = infinity;
    } else {
      bounds_[i] = std::isfinite(values_[i]) ? inherited + rounding + 4 * underflow_ : 0;
    }
  }

  // f(i) for each element, by all threads.
  template <class F>
  void for_each_element(F&& f) {
    constexpr size_t piece = 1 << 14;
    const size_t count = values_.size();
    executor_.for_each(static_cast<int64_t>((count + piece - 1) / piece), [&](int64_t task, int) {
      const size_t first = index_of(task) * piece;
      for (size_t i = first; i < std::min(count, first + piece); ++i) f(i);
    });
  }

  void apply(const Conv& conv, const std::vector<const Values*>& parameters) {
    const Values& weight = *parameters[0];
    const double terms = static_cast<double>(weight.size()) / static_cast<double>(conv.out_channels) + 1;
    const double walk = std::sqrt(terms) * root_mean_square(weight) * root_mean_square(values_);
    values_ = run_stage(conv, sizes_, values_, parameters, executor_);
    sizes_ = Block({conv}).output_shape(sizes_);
    bounds_.assign(values_.size(), 0);
    for_each_element([&](size_t i) {
      const double rounding = conv_factor * roundoff_ * std::sqrt(terms) * (walk + std::abs(values_[i]));
      const double cut = cutting_error(accuracy_) * (walk + std::abs(values_[i]));
      set_bound(i, 0, rounding + dithering_ * walk + cut + terms * underflow_);
    });
  }

  void apply(const Pointwise& pointwise, const std::vector<const Values*>& parameters) {
    Values x = std::move(values_);
    values_ = run_stage(pointwise, sizes_, x, parameters, executor_);
    const Values above = moved_by_bound(pointwise, x, 1, parameters);
    const Values below = moved_by_bound(pointwise, x, -1, parameters);
    for_each_element([&](size_t i) {
      double inherited = bounds_[i];
      if (inherited > 0 && inherited < infinity) {
        inherited = std::max(std::abs(above[i] - values_[i]), std::abs(below[i] - values_[i]));
      }
      set_bound(i, inherited,
                stage_factor * roundoff_ * rounding_scale(pointwise.op, x[i], values_[i]) +
                    accuracy_.sigmoid * sigmoid_scale(pointwise.op, x[i]));
    });
  }

  Values moved_by_bound(const Pointwise& pointwise, Values x, double direction,
                        const std::vector<const Values*>& parameters) {
    for_each_element([&](size_t i) {
      if (bounds_[i] < infinity) x[i] += direction * bounds_[i];
    });
    return run_stage(pointwise, sizes_, x, parameters, executor_);
  }

  void apply(const Norm& norm, const std::vector<const Values*>& parameters) {
    const Values x = std::move(values_);
    values_ = run_stage(norm, sizes_, x, parameters, executor_);
    const int64_t groups = norm.group_count(sizes_[1]);
    const size_t slab_elements = x.size() / index_of(groups);
    const size_t positions = x.size() / index_of(sizes_[1]);
    executor_.for_each(groups, [&](int64_t group, int) {
      const size_t first = index_of(group) * slab_elements;
      const Slab slab = slab_of(norm, x, first, slab_elements);
      for (size_t i = first; i < first + slab_elements; ++i) {
        const size_t c = i / positions;
        const double scale = norm.affine ? std::abs((*parameters[0])[c]) : 1;
        const double shift = norm.affine ? std::abs((*parameters[1])[c]) : 0;
        const double xhat = std::abs(x[i] - slab.mean) * slab.rstd;
        const double rounding = scale * (xhat + std::abs(slab.mean) * slab.rstd) + shift;
        const double holding = scale * holding_error(accuracy_.held, xhat, slab.farthest * slab.rstd);
        set_bound(i, inherited_by_norm(slab, bounds_[i], xhat, scale),
                  stage_factor * roundoff_ * rounding + holding);
      }
    });
  }

  Slab slab_of(const Norm& norm, const Values& x, size_t first, size_t elements) const {
    const auto count = static_cast<double>(elements);
    double sum = 0;
    double bound_sum = 0;
    for (size_t i = first; i < first + elements; ++i) {
      sum += x[i];
      bound_sum += bounds_[i];
    }
    Slab slab;
    slab.mean = sum / count;
    double variance = 0;
    double difference = underflow_;
    for (size_t i = first; i < first + elements; ++i) {
      const double deviation = std::abs(x[i] - slab.mean);
      variance += deviation * deviation / count;
      slab.farthest = std::max(slab.farthest, deviation);
      difference += (2 * deviation + bounds_[i]) * bounds_[i] / count;
    }
    const double rounding = stage_factor * roundoff_;
    slab.mean_error =
        bound_sum / count + rounding * (std::abs(slab.mean) + 4 * std::sqrt(variance)) + underflow_;
    difference += slab.mean_error * slab.mean_error;
    slab.rstd = 1 / std::sqrt(variance + norm.eps);
    slab.variance_error = difference / (variance + norm.eps) + rounding;
    return slab;
  }

  static double inherited_by_norm(const Slab& slab, double e, double xhat, double scale) {
    if (!std::isfinite(slab.mean)) return 0;
    if (!(slab.variance_error <= 0.5)) return infinity;
    return scale * ((e + slab.mean_error) * slab.rstd + slab.variance_error * xhat);
  }

  void apply(const Mean& mean, const std::vector<const Values*>& parameters) {
    const Values x = std::move(values_);
    const Values e = std::move(bounds_);
    values_ = run_stage(mean, sizes_, x, parameters, executor_);
    bounds_.assign(values_.size(), 0);
    const size_t positions = x.size() / values_.size();
    const auto count = static_cast<double>(positions);
    for (size_t c = 0; c < values_.size(); ++c) {
      double magnitude = 0;
      double inherited = 0;
      for (size_t i = c * positions; i < (c + 1) * positions; ++i) {
        magnitude += std::abs(x[i]) / count;
        inherited += e[i] / count;
      }
      set_bound(c, inherited, (stage_factor + std::sqrt(count) / 4) * roundoff_ * magnitude);
    }
  }

  double roundoff_;
  double underflow_;  // the most that one operation loses among denormals
  Accuracy accuracy_;
  double dithering_;
  Executor& executor_;
  Shape sizes_;
  Values values_;
  Values bounds_;
};

}  // namespace

const char* const tolerance_rule =
    "roundings of 2^-24 (f64: 2^-53) carried through the block, then one to the output's type. Operands of "
    "tf32 are rounded first, to nearest even (tf32_away: ties away from zero). Rows of a GPU that need more "
    "get it, no others: 2^-17 "
    "(gemm_pingpong with gelu 2^-15) of a sigmoid or of gelu's distribution function, 2^-11 or 2^-18 of "
    "values "
    "held as f16 or in 20 bits before a norm";

Expected expected_output(const Problem& problem, std::vector<double> input,
                         std::vector<std::vector<double>> parameters, const Accuracy& accuracy,
                         Executor& executor) {
  if (problem.block.conv() != nullptr) round_operands(problem, accuracy, input, parameters[0]);
  return BoundedForward(problem, std::move(input), parameters, accuracy, executor).result();
}

double reference_seconds(const Problem& asked) {
  Problem problem = asked;
  problem.device = Device::cpu(asked.device.threads);
  const Plan reference = plan(problem, {.strategy = "reference", .target = ""});
  for (const Candidate& candidate : reference.candidates()) {
    if (candidate.strategy == "reference") return candidate.seconds;
  }
  return 0;
}

}  // namespace onepass::tool
