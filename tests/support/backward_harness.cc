// Runs a backward plan on hostile memory and random operands, and compares its gradients with the reference.
#include "support/backward_harness.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "reference/tensor_access.h"
#include "support/cases.h"
#include "support/guarded_memory.h"

namespace onepass::testing {
namespace {

// Returns the damage.
template <class PlanType, class ArgumentsType>
std::string run_guarded(const PlanType& plan, const ArgumentsType& arguments, const Place& place,
                        const std::string& what) {
  Buffer workspace(place, GuardedMemory(plan.workspace_bytes(), 0));
  place.run(plan, arguments, workspace.data());
  place.finish(what);
  workspace.fetch();
  workspace.host().allow(0, static_cast<int64_t>(plan.workspace_bytes()));
  return workspace.host().is_intact() ? "" : "memory around the workspace of " + plan.strategy() + "; ";
}

void compare_gradient(const std::string& name, DType dtype, const std::vector<double>& actual,
                      const Expected& expected, GradientComparison& comparison) {
  std::ostringstream first;
  first.precision(9);
  int64_t failures = actual.size() == expected.values.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(actual.size(), expected.values.size()); ++i) {
    if (!std::isfinite(expected.bounds[i])) {
      ++comparison.unchecked;
      continue;
    }
    ++comparison.checked;
    if (is_acceptable(dtype, actual[i], expected.values[i], expected.bounds[i])) continue;
    if (failures++ == 0) {
      first << "element " << i << " is " << actual[i] << ", should be " << expected.values[i] << " within "
            << expected.bounds[i];
    }
  }
  if (failures == 0) return;
  comparison.errors += "gradient of " + name + ": " + std::to_string(failures) + " of " +
                       std::to_string(actual.size()) + " elements are wrong; " + first.str() + '\n';
}

}  // namespace

BackwardOperands random_backward_operands(const BackwardProblem& problem, Distribution distribution,
                                          uint64_t seed) {
  const bool special = distribution == Distribution::special;
  return {random_operands(problem.forward, distribution, seed),
          random_tensor(problem.output_gradient, special ? Distribution::special : Distribution::normal, 1,
                        seed + 1000)};
}

bool same_bits(const GradientValues& a, const GradientValues& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

BackwardMemory::BackwardMemory(const BackwardProblem& problem, const BackwardOperands& operands,
                               const Place& place)
    : problem_(problem),
      input_(place, testing::place(problem.forward.input, operands.forward.input, place.elements_beyond(0))),
      output_(place, allocate(problem.forward.output, place.elements_beyond(1))),
      output_gradient_(
          place, testing::place(problem.output_gradient, operands.output_gradient, place.elements_beyond(2))),
      input_gradient_(place, allocate(problem.input_gradient, place.elements_beyond(3))),
      statistics_(place, GuardedMemory(static_cast<size_t>(slab_count(problem.forward)) * 2 * sizeof(float),
                                       sizeof(float))) {
  for (size_t i = 0; i < problem.forward.parameters.size(); ++i) {
    parameters_.emplace_back(place,
                             testing::place(problem.forward.parameters[i], operands.forward.parameters[i],
                                            place.elements_beyond(4 + 2 * i)));
    gradients_.emplace_back(place,
                            allocate(problem.parameter_gradients[i], place.elements_beyond(5 + 2 * i)));
  }
}

Arguments BackwardMemory::forward_arguments() {
  Arguments arguments{input_.data(), output_.data(), {}, static_cast<float*>(statistics_.data())};
  for (Buffer& parameter : parameters_) arguments.parameters.push_back(parameter.data());
  return arguments;
}

BackwardArguments BackwardMemory::backward_arguments() {
  statistics_.fetch();
  statistics_.host().remember();
  BackwardArguments arguments;
  arguments.input = input_.data();
  arguments.output_gradient = output_gradient_.data();
  arguments.statistics = static_cast<const float*>(statistics_.data());
  arguments.output = output_.data();
  arguments.input_gradient = problem_.wants_input() ? input_gradient_.data() : nullptr;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    arguments.parameters.push_back(parameters_[i].data());
    arguments.parameter_gradients.push_back(problem_.wants_parameter(i) ? gradients_[i].data() : nullptr);
  }
  return arguments;
}

BackwardOutcome BackwardMemory::outcome() {
  BackwardOutcome outcome;
  for (Buffer* buffer : {&input_, &output_gradient_, &statistics_}) {
    buffer->fetch();
    if (!buffer->host().is_intact()) outcome.damage += "an input or memory around it; ";
  }
  for (Buffer& parameter : parameters_) {
    parameter.fetch();
    if (!parameter.host().is_intact()) outcome.damage += "a parameter or memory around it; ";
  }
  take(input_gradient_, problem_.input_gradient, problem_.wants_input(), outcome);
  for (size_t i = 0; i < gradients_.size(); ++i)
    take(gradients_[i], problem_.parameter_gradients[i], problem_.wants_parameter(i), outcome);
  return outcome;
}

void BackwardMemory::take(Buffer& buffer, const TensorSpec& spec, bool wanted, BackwardOutcome& outcome) {
  buffer.fetch();
  if (wanted) buffer.host().allow(spec);
  if (!buffer.host().is_intact())
    outcome.damage += "memory around gradient " + std::to_string(outcome.gradients.size()) + "; ";
  outcome.gradients.push_back(wanted ? load_tensor(spec, buffer.host().data()) : std::vector<double>());
}

BackwardOutcome run(const BackwardPlan& backward, const BackwardOperands& operands, const Place& place,
                    const PlanOptions& forward_options) {
  const BackwardProblem& problem = backward.problem();
  const bool has_statistics = problem.forward.block.norm() != nullptr;
  BackwardMemory memory(problem, operands, place);
  std::string damage;
  if (has_statistics) {
    const Plan forward = plan(problem.forward, forward_options);
    damage = run_guarded(forward, memory.forward_arguments(), place,
                         forward.strategy() + ": " + problem.forward.text());
  }
  BackwardArguments arguments = memory.backward_arguments();
  if (!has_statistics) arguments.output = nullptr;
  damage += run_guarded(backward, arguments, place, backward.strategy() + ": " + problem.text());
  BackwardOutcome outcome = memory.outcome();
  outcome.damage += damage;
  return outcome;
}

GradientComparison& GradientComparison::operator+=(const GradientComparison& other) {
  checked += other.checked;
  unchecked += other.unchecked;
  errors += other.errors;
  return *this;
}

GradientComparison compare(const BackwardProblem& problem, const BackwardOperands& operands,
                           const BackwardOutcome& outcome) {
  return compare(problem,
                 expected_gradients(problem, operands.forward.input, operands.forward.parameters,
                                    operands.output_gradient),
                 outcome);
}

GradientComparison compare(const BackwardProblem& problem, const ExpectedGradients& expected,
                           const BackwardOutcome& outcome) {
  GradientComparison comparison;
  if (!outcome.damage.empty()) comparison.errors = "damage: " + outcome.damage + '\n';
  if (problem.wants_input()) {
    compare_gradient("the input", problem.input_gradient.dtype, outcome.gradients[0], expected.input,
                     comparison);
  }
  const std::vector<Parameter> parameters = problem.forward.block.parameters(problem.forward.input.sizes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!problem.wants_parameter(i)) continue;
    compare_gradient(parameters[i].name, problem.parameter_gradients[i].dtype, outcome.gradients[i + 1],
                     expected.parameters[i], comparison);
  }
  return comparison;
}

std::vector<Problem> tails_of_the_list(const Device& device) {
  std::vector<Problem> tails;
  for (const std::string& text : read_cases()) {
    Problem problem = Problem::parse(text, device);
    const bool f64 = problem.input.dtype == DType::f64;
    if (problem.block.conv() == nullptr && !f64) tails.push_back(std::move(problem));
  }
  return tails;
}

std::vector<Problem> tails_of_convolutions(const Device& device) {
  std::vector<Problem> tails;
  for (const std::string& text : read_cases()) {
    const Problem whole = Problem::parse(text, device);
    const std::vector<Stage>& stages = whole.block.stages();
    if (whole.block.conv() == nullptr || stages.size() < 2 || whole.input.dtype == DType::f64) continue;
    const Layout layout = whole.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
    tails.emplace_back(Block(std::vector<Stage>(stages.begin() + 1, stages.end())),
                       whole.block.conv_output_shape(whole.input.sizes), whole.input.dtype, device, layout);
  }
  return tails;
}

}  // namespace onepass::testing
