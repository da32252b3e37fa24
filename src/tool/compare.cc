// Compares a plan's output with the expected result and reports where the two differ most.
#include "tool/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "block/convert.h"
#include "tool/expected.h"
#include "tool/progress.h"
#include "tool/timing.h"

namespace onepass::tool {
namespace {

bool is_acceptable(DType dtype, double actual, double value, double bound) {
  if (std::isnan(value)) return std::isnan(actual);
  return actual >= round_to(dtype, value - bound) && actual <= round_to(dtype, value + bound);
}

bool has_batch(const Block& block, const Parameter& parameter) {
  const auto* pointwise = std::get_if<Pointwise>(&block.stages()[parameter.stage]);
  if (pointwise == nullptr) return false;
  return pointwise->per == Per::sample || argument_kind(pointwise->op) == ArgumentKind::tensor;
}

std::vector<std::vector<double>> sample_parameters(const Problem& problem, const Tensors& tensors,
                                                   int64_t n) {
  const auto named = problem.block.parameters(problem.input.sizes);
  std::vector<std::vector<double>> values;
  for (size_t i = 0; i < named.size(); ++i) {
    const TensorSpec& spec = problem.parameters[i];
    const void* memory = tensors.parameters[i].data();
    values.push_back(has_batch(problem.block, named[i]) ? sample_values(spec, memory, n)
                                                        : all_values(spec, memory));
  }
  return values;
}

// On the CPU, wherever the plan ran.
Problem one_sample(const Problem& problem) {
  Shape sizes = problem.input.sizes;
  sizes[0] = 1;
  Problem single(problem.block, sizes, problem.output.dtype, problem.device);
  single.precision = problem.precision;
  return single;
}

// Doubles of one sample: the values and bounds of expected.h, and what the reference copies.
double reference_bytes(const Problem& single) {
  const auto activation =
      static_cast<double>(element_count(single.block.conv_output_shape(single.input.sizes)));
  return sizeof(double) * (2 * static_cast<double>(element_count(single.input.sizes)) + 8 * activation);
}

Shape index_in(const Shape& sizes, int64_t n, size_t element) {
  Shape index(sizes.size());
  auto rest = static_cast<int64_t>(element);
  for (size_t d = sizes.size() - 1; d > 0; --d) {
    index[d] = rest % sizes[d];
    rest /= sizes[d];
  }
  index[0] = n;
  return index;
}

// Adds samples to a Comparison.
class Accumulator {
 public:
  explicit Accumulator(const TensorSpec& output) : output_(output) {}

  void add_sample(int64_t n, const std::vector<double>& actual, const Expected& expected) {
    for (size_t i = 0; i < actual.size(); ++i) add(n, i, actual[i], expected.values[i], expected.bounds[i]);
  }

  Comparison result() const {
    Comparison comparison = comparison_;
    if (finite_ > 0) comparison.rms_error = std::sqrt(squares_ / static_cast<double>(finite_));
    return comparison;
  }

 private:
  void add(int64_t n, size_t i, double actual, double value, double bound) {
    ++comparison_.elements;
    if (!std::isfinite(bound)) {
      ++comparison_.unchecked;
      return;
    }
    const bool acceptable = is_acceptable(output_.dtype, actual, value, bound);
    if (!acceptable) ++comparison_.failures;
    const bool same = actual == value || (std::isnan(actual) && std::isnan(value));
    const double error = same ? 0 : std::abs(actual - value);
    if (std::isfinite(error)) {
      comparison_.max_abs_error = std::max(comparison_.max_abs_error, error);
      squares_ += error * error;
      ++finite_;
    }
    const double rounding = std::abs(round_to(output_.dtype, value) - value);
    const double tolerance = bound + (std::isfinite(rounding) ? rounding : 0);
    double severity = acceptable && tolerance == 0 ? 0 : error / tolerance;
    if (!acceptable)
      severity = std::isfinite(severity) ? 1e300 + severity : std::numeric_limits<double>::infinity();
    if (severity <= worst_severity_) return;
    worst_severity_ = severity;
    comparison_.worst_index = index_in(output_.sizes, n, i);
    comparison_.worst_actual = actual;
    comparison_.worst_expected = value;
    comparison_.worst_tolerance = tolerance;
  }

  const TensorSpec& output_;
  Comparison comparison_;
  double worst_severity_ = -1;
  double squares_ = 0;
  int64_t finite_ = 0;
};

std::string index_text(const Shape& index) {
  std::string text;
  for (const int64_t i : index) text.append(text.empty() ? "[" : ",").append(std::to_string(i));
  return text + ']';
}

}  // namespace

Comparison compare_samples(const Plan& plan, const Tensors& tensors, int64_t first, int64_t last,
                           Executor& executor) try {
  const Problem& problem = plan.problem();
  Accumulator accumulator(problem.output);
  if (first >= last) return accumulator.result();
  const Problem single = one_sample(problem);
  require_memory(reference_bytes(single));
  const double seconds = reference_seconds(single) * static_cast<double>(last - first);
  for (int64_t n = first; n < last; ++n) {
    if (seconds > 1.5) {
      show_progress("reference in double, about " + significant(seconds, 2) + " s: sample " +
                    std::to_string(n - first + 1) + " of " + std::to_string(last - first));
    }
    const Expected expected =
        expected_output(single, sample_values(problem.input, tensors.input.data(), n),
                        sample_parameters(problem, tensors, n), plan.accuracy(), executor);
    accumulator.add_sample(n, sample_values(problem.output, tensors.output.data(), n), expected);
  }
  clear_progress();
  return accumulator.result();
} catch (const std::bad_alloc&) {
  refuse_memory(reference_bytes(one_sample(plan.problem())));
}

std::string Comparison::text() const {
  if (elements == 0) return "nothing to compare, the output is empty";
  if (failures == 0) {
    std::string text = "largest error " + significant(max_abs_error);
    if (worst_tolerance > 0) {
      text += ", at most " + percent(std::abs(worst_actual - worst_expected) / worst_tolerance) +
              " of what rounding allows";
    }
    return text + unchecked_text();
  }
  return std::to_string(failures) + " of " + std::to_string(elements) + " wrong, the worst at " +
         index_text(worst_index) + ": " + significant(worst_actual, 9) + " instead of " +
         significant(worst_expected, 9) + ", allowed are " + significant(worst_tolerance, 2) +
         unchecked_text();
}

std::string Comparison::unchecked_text() const {
  if (unchecked == 0) return "";
  return ", " + std::to_string(unchecked) + " that rounding decides not checked";
}

Json Comparison::json() const {
  Json worst = nullptr;
  if (!worst_index.empty()) {
    worst = {{"index", worst_index},
             {"actual", worst_actual},
             {"expected", worst_expected},
             {"tolerance", worst_tolerance}};
  }
  return {{"passed", passed()},     {"elements", elements},           {"failures", failures},
          {"unchecked", unchecked}, {"max_abs_error", max_abs_error}, {"rms_error", rms_error},
          {"worst", worst}};
}

}  // namespace onepass::tool
