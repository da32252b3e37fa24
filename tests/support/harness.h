// Runs a plan on hostile memory and random operands, and compares its result with the reference.
//
// Every buffer lies at an address that is aligned to its elements and to nothing more, between bytes that
// read as NaN: what is read outside a tensor shows in the result, what is written there shows in the bytes.
// So do the gaps between the elements of strided tensors. The output is NaN before the run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "onepass/plan.h"

namespace onepass::testing {

// Of the input and of residual tensors. Weights and vectors are normal, scaled to keep magnitudes.
enum class Distribution : uint8_t {
  uniform,       // 0 to 1
  normal,        // mean 0, standard deviation 1
  offset_100,    // mean 100, standard deviation 1
  offset_10000,  // mean 10000, standard deviation 1
  constant,      // one value for all elements
  denormal,      // below the least normal number of the type
  tiny,          // a few times the least normal number that can still be multiplied
  huge,          // f16: up to 60000; other types: up to 1e15, the square of which an f32 sum can hold
  special,       // normal, with a few Inf, -Inf and NaN
};
inline constexpr Distribution distributions[] = {
    Distribution::uniform,      Distribution::normal,   Distribution::offset_100,
    Distribution::offset_10000, Distribution::constant, Distribution::denormal,
    Distribution::tiny,         Distribution::huge,     Distribution::special,
};
std::string_view name(Distribution distribution);

// Dense NCHW values, each representable in the element type of its tensor.
struct Operands {
  std::vector<double> input;
  std::vector<std::vector<double>> parameters;
};
// Values of one tensor, dense NCHW, times `scale`.
std::vector<double> random_tensor(const TensorSpec& spec, Distribution distribution, double scale,
                                  uint64_t seed);
Operands random_operands(const Problem& problem, Distribution distribution, uint64_t seed);

struct Comparison {
  double max_abs_error = 0;
  double rms_error = 0;
  int64_t failures = 0;   // elements outside their tolerance
  int64_t unchecked = 0;  // elements that no f32 implementation can compute (see error_bound.h)
  // The element with the largest error in units of its tolerance.
  std::string worst_position;  // "n=0 c=3 at 1x4"; empty where no element was checked
  double worst_actual = 0;
  double worst_expected = 0;
  double worst_tolerance = 0;

  std::string text() const;
};

// `actual` is the output as dense NCHW values.
Comparison compare(const Problem& problem, const Operands& operands, const std::vector<double>& actual);

struct Outcome {
  Comparison comparison;
  std::string damage;          // what was written that is not an output element; empty where nothing was
  std::vector<double> output;  // dense NCHW

  bool passed() const { return comparison.failures == 0 && damage.empty(); }
  std::string text() const;
};

using RunFunction = std::function<void(const Arguments& arguments, void* workspace, Executor& executor)>;

Outcome run_and_compare(const Problem& problem, const Operands& operands, size_t workspace_bytes,
                        const RunFunction& run, Executor& executor);
Outcome run_and_compare(const Plan& plan, const Operands& operands, Executor& executor);
Outcome run_and_compare(const Plan& plan, Distribution distribution, uint64_t seed, Executor& executor);

}  // namespace onepass::testing
