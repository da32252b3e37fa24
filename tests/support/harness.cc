// Runs a plan on hostile memory and random operands, and compares its result with the reference.
#include "support/harness.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>

#include "block/convert.h"
#include "reference/tensor_access.h"
#include "support/guarded_memory.h"
#include "tool/judged_error.h"

namespace onepass::testing {
namespace {

class Values {
 public:
  Values(Distribution distribution, DType dtype, uint64_t seed)
      : distribution_(distribution), dtype_(dtype), engine_(seed), constant_(0.1 + uniform(0, 1)) {}

  double next() { return round_to(dtype_, draw()); }

 private:
  double uniform(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(engine_);
  }
  double normal() { return std::normal_distribution<double>()(engine_); }

  double draw() {
    switch (distribution_) {
      case Distribution::uniform:
        return uniform(0, 1);
      case Distribution::normal:
        return normal();
      case Distribution::offset_100:
        return 100 + normal();
      case Distribution::offset_10000:
        return 10000 + normal();
      case Distribution::constant:
        return constant_;
      case Distribution::denormal:
        return uniform(-1, 1) * least_normal();
      case Distribution::tiny:
        return uniform(-1, 1) * (dtype_ == DType::f16 ? 0x1p-11 : 1e-30);
      case Distribution::huge:
        return uniform(-1, 1) * (dtype_ == DType::f16 ? 60000 : 1e15);
      case Distribution::special:
        return special();
    }
    return 0;
  }

  double least_normal() const {
    if (dtype_ == DType::f64) return 0x1p-1022;
    return dtype_ == DType::f16 ? 0x1p-14 : 0x1p-126;
  }

  double special() {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const double choice = uniform(0, 1);
    if (choice < 0.004) return infinity;
    if (choice < 0.008) return -infinity;
    if (choice < 0.010) return std::numeric_limits<double>::quiet_NaN();
    return normal();
  }

  Distribution distribution_;
  DType dtype_;
  std::mt19937_64 engine_;
  double constant_;
};

// A stride of 0 repeats memory, so that the values repeat with it: they are those read back.
std::vector<double> as_stored(const TensorSpec& spec, const std::vector<double>& values) {
  std::vector<std::byte> memory(static_cast<size_t>(spec.byte_span()));
  store_tensor(spec, values, memory.data());
  return load_tensor(spec, memory.data());
}

double weight_scale(const Conv& conv) {
  const int64_t taps = conv.kernel[0] * conv.kernel[1] * conv.kernel[2];
  return 1 / std::sqrt(static_cast<double>(conv.in_channels / conv.groups * taps));
}

// Where in the output an element is: "n=0 c=3 at 1x4".
std::string position_text(const Shape& sizes, int64_t index) {
  Shape position(sizes.size());
  for (size_t d = sizes.size(); d-- > 0; index /= sizes[d]) position[d] = index % sizes[d];
  std::string text = "n=" + std::to_string(position[0]) + " c=" + std::to_string(position[1]);
  if (position.size() > 2) text += " at " + to_string(Shape(position.begin() + 2, position.end()));
  return text;
}

// Error in units of the tolerance, which is at least half an ulp of the output.
double severity(bool acceptable, double error, double tolerance) {
  if (std::isnan(error)) return acceptable ? 0 : std::numeric_limits<double>::infinity();
  const double ratio = tolerance > 0 ? error / tolerance : (error > 0 ? 1e300 : 0);
  return acceptable ? std::min(ratio, 1.0) : std::max(ratio, 1.0);
}

}  // namespace

std::string_view name(Distribution distribution) {
  constexpr std::string_view names[] = {"uniform",  "normal", "offset_100", "offset_10000", "constant",
                                        "denormal", "tiny",   "huge",       "special"};
  return names[static_cast<size_t>(distribution)];
}

std::vector<double> random_tensor(const TensorSpec& spec, Distribution distribution, double scale,
                                  uint64_t seed) {
  Values source(distribution, spec.dtype, seed);
  std::vector<double> values(static_cast<size_t>(element_count(spec.sizes)));
  for (double& value : values) value = round_to(spec.dtype, source.next() * scale);
  return as_stored(spec, values);
}

Operands random_operands(const Problem& problem, Distribution distribution, uint64_t seed,
                         Tf32Operands kind) {
  Operands operands;
  operands.input = random_tensor(problem.input, distribution, 1, seed);
  const std::vector<Parameter> parameters = problem.block.parameters(problem.input.sizes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const TensorSpec& spec = problem.parameters[i];
    const auto* pointwise = std::get_if<Pointwise>(&problem.block.stages()[parameters[i].stage]);
    const bool is_tensor = pointwise != nullptr && argument_kind(pointwise->op) == ArgumentKind::tensor;
    const bool is_weight = parameters[i].role == Parameter::Role::conv_weight;
    operands.parameters.push_back(random_tensor(spec, is_tensor ? distribution : Distribution::normal,
                                                is_weight ? weight_scale(*problem.block.conv()) : 1,
                                                seed + i + 1));
  }
  if (problem.rounds_to_tf32() && kind == Tf32Operands::rounded) {
    const auto round = problem.precision == Precision::tf32_away ? round_to_tf32_away : round_to_tf32;
    for (double& value : operands.input) value = round(value);
    for (double& value : operands.parameters[0]) value = round(value);
  }
  return operands;
}

Comparison compare(const Problem& problem, const Operands& operands, const std::vector<double>& actual,
                   const Accuracy& accuracy) {
  return compare(problem, expected_output(problem, operands.input, operands.parameters, accuracy), actual);
}

Comparison compare(const Problem& problem, const Expected& expected, const std::vector<double>& actual) {
  Comparison comparison;
  double worst_severity = -1;
  double squares = 0;
  int64_t finite = 0;
  size_t worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(expected.bounds[i])) {
      ++comparison.unchecked;
      continue;
    }
    const DType dtype = problem.output.dtype;
    const bool acceptable = is_acceptable(dtype, actual[i], expected.values[i], expected.bounds[i]);
    const double error = actual[i] == expected.values[i] ? 0 : std::abs(actual[i] - expected.values[i]);
    const double rounding = std::abs(round_to(dtype, expected.values[i]) - expected.values[i]);
    const double tolerance = expected.bounds[i] + (std::isfinite(rounding) ? rounding : 0);
    if (!acceptable) ++comparison.failures;
    if (std::isfinite(error)) {
      comparison.max_abs_error = std::max(comparison.max_abs_error, error);
      squares += error * error;
      ++finite;
    }
    if (severity(acceptable, error, tolerance) > worst_severity) {
      worst_severity = severity(acceptable, error, tolerance);
      worst = i;
      comparison.worst_tolerance = tolerance;
    }
  }
  if (worst_severity >= 0) {
    comparison.worst_position = position_text(problem.output.sizes, static_cast<int64_t>(worst));
    comparison.worst_actual = actual[worst];
    comparison.worst_expected = expected.values[worst];
  }
  if (finite > 0) comparison.rms_error = std::sqrt(squares / static_cast<double>(finite));
  return comparison;
}

std::string Comparison::text() const {
  std::ostringstream text;
  text.precision(9);
  text << "max error " << max_abs_error << ", rms " << rms_error;
  if (failures > 0) text << ", " << failures << " elements outside their tolerance";
  if (unchecked > 0) text << ", " << unchecked << " elements not checked";
  if (!worst_position.empty()) {
    text << "; worst: " << worst_position << " is " << worst_actual << ", should be " << worst_expected
         << " within " << worst_tolerance;
  }
  return text.str();
}

std::string Outcome::text() const {
  return comparison.text() + (damage.empty() ? "" : "; damage: " + damage);
}

ForwardMemory::ForwardMemory(const Problem& problem, const Operands& operands, size_t workspace_bytes,
                             const Place& place, const RunOptions& options)
    : problem_(problem),
      place_(place),
      options_(options),
      workspace_bytes_(workspace_bytes),
      input_(place, placed_input(operands)),
      output_(place, allocate(problem.output, place.elements_beyond(1))),
      statistics_(place, GuardedMemory(statistics_bytes(), sizeof(float))),
      workspace_(place, GuardedMemory(workspace_bytes, 0)) {
  for (size_t i = 0; i < problem.parameters.size(); ++i)
    parameters_.emplace_back(place, placed_parameter(operands, i));
}

size_t ForwardMemory::statistics_bytes() const {
  return static_cast<size_t>(slab_count(problem_)) * 2 * sizeof(float);
}

GuardedMemory ForwardMemory::placed_input(const Operands& operands) const {
  return testing::place(problem_.input, operands.input, place_.elements_beyond(0));
}

GuardedMemory ForwardMemory::placed_parameter(const Operands& operands, size_t index) const {
  return testing::place(problem_.parameters[index], operands.parameters[index],
                        place_.elements_beyond(2 + index));
}

Arguments ForwardMemory::arguments() {
  Arguments arguments{input_.data(), result().data(), {}, nullptr};
  if (options_.statistics) arguments.statistics = static_cast<float*>(statistics_.data());
  for (Buffer& parameter : parameters_) arguments.parameters.push_back(parameter.data());
  return arguments;
}

void ForwardMemory::assign(const Operands& operands) {
  input_.replace(placed_input(operands));
  output_.replace(allocate(problem_.output, place_.elements_beyond(1)));
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].replace(placed_parameter(operands, i));
}

Outcome ForwardMemory::outcome() {
  for (Buffer* buffer : {&input_, &output_, &statistics_, &workspace_}) buffer->fetch();
  for (Buffer& parameter : parameters_) parameter.fetch();
  result().host().allow(problem_.output);
  workspace_.host().allow(0, static_cast<int64_t>(workspace_bytes_));
  if (options_.statistics) statistics_.host().allow(0, static_cast<int64_t>(statistics_bytes()));

  Outcome outcome;
  outcome.damage = damage();
  outcome.output = load_tensor(problem_.output, result().host().data());
  if (options_.statistics) {
    outcome.statistics.resize(statistics_bytes() / sizeof(float));
    std::memcpy(outcome.statistics.data(), statistics_.host().data(), statistics_bytes());
  }
  return outcome;
}

std::string ForwardMemory::damage() {
  std::string text;
  if (!input_.host().is_intact()) text += "the input or memory around it; ";
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (!parameters_[i].host().is_intact())
      text += "parameter " + std::to_string(i) + " or memory around it; ";
  if (!workspace_.host().is_intact()) text += "memory around the workspace; ";
  if (!output_.host().is_intact()) text += "memory around the output or between its elements; ";
  if (!statistics_.host().is_intact()) text += "statistics that were not asked for or memory around them; ";
  return text;
}

Outcome run(const Plan& plan, const Operands& operands, const Place& place, const RunOptions& options) {
  ForwardMemory memory(plan.problem(), operands, plan.workspace_bytes(), place, options);
  place.run(plan, memory.arguments(), memory.workspace());
  place.finish(plan.strategy() + ": " + plan.problem().text());
  return memory.outcome();
}

Outcome run_and_compare(const Problem& problem, const Operands& operands, size_t workspace_bytes,
                        const RunFunction& run, Executor& executor) {
  ForwardMemory memory(problem, operands, workspace_bytes, executor, {});
  run(memory.arguments(), memory.workspace(), executor);
  Outcome outcome = memory.outcome();
  outcome.comparison = compare(problem, operands, outcome.output);
  return outcome;
}

Outcome run_and_compare(const Plan& plan, const Operands& operands, const Place& place) {
  Outcome outcome = run(plan, operands, place);
  outcome.comparison = compare(plan.problem(), operands, outcome.output, plan.accuracy());
  return outcome;
}

Outcome run_and_compare(const Plan& plan, Distribution distribution, uint64_t seed, const Place& place) {
  return run_and_compare(plan, random_operands(plan.problem(), distribution, seed), place);
}

int64_t slab_count(const Problem& problem) {
  const Norm* norm = problem.block.norm();
  const Shape shape = problem.block.conv_output_shape(problem.input.sizes);
  return norm == nullptr ? 0 : shape[0] * norm->group_count(shape[1]);
}

std::vector<float> reference_statistics(const Problem& problem, const Operands& operands) {
  Problem on_cpu = problem;
  on_cpu.device = Device::cpu();
  on_cpu.precision = Precision::f32;
  on_cpu.numerics = Numerics::pytorch;
  SerialExecutor executor;
  return run(plan(on_cpu, {"reference", ""}), operands, executor, {.statistics = true}).statistics;
}

std::string statistics_error(const std::vector<float>& expected, const std::vector<float>& actual,
                             const std::vector<double>& allowed) {
  constexpr double tolerance = 4e-6;
  constexpr double roundings = 8 * 0x1p-24;  // of a mean far from zero: the rule of error_bound.h
  const auto are_nan = [](const std::vector<float>& values, size_t i) {
    return std::isnan(values[i]) && std::isnan(values[i + 1]);
  };
  for (size_t i = 0; i < expected.size(); i += 2) {
    if (are_nan(expected, i) && are_nan(actual, i)) continue;
    const double rstd = expected[i + 1];
    const double mean_error = std::abs(actual[i] - expected[i]) * rstd;
    const double rstd_error = std::abs(actual[i + 1] / rstd - 1);
    double mean_tolerance = tolerance + roundings * std::abs(expected[i]) * rstd;
    double rstd_tolerance = tolerance;
    if (!allowed.empty()) {
      mean_tolerance += allowed[i] * rstd;
      rstd_tolerance += allowed[i + 1];
    }
    if (mean_error <= mean_tolerance && rstd_error <= rstd_tolerance) continue;
    std::ostringstream text;
    text.precision(9);
    text << "slab " << i / 2 << " has mean " << actual[i] << " and rstd " << actual[i + 1] << ", should be "
         << expected[i] << " and " << expected[i + 1];
    return text.str();
  }
  return "";
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

}  // namespace onepass::testing
