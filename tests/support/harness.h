// Runs a plan on hostile memory and random operands, and compares its result with the reference.
//
// Every buffer lies at an address that is aligned to its elements and to nothing more, between bytes that
// read as NaN: what is read outside a tensor shows in the result, what is written there shows in the bytes.
// So do the gaps between the elements of strided tensors. The output is NaN before the run. A plan for a GPU
// gets a copy of all that memory on the GPU, which is copied back and looked at in the same way.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "onepass/plan.h"
#include "support/error_bound.h"
#include "support/place.h"

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
// Where the problem's convolution multiplies tf32, x and the weights are drawn as such, or as f32 that the
// row rounds. The judge rounds as the row says it does (tool/judged_error.h).
enum class Tf32Operands : uint8_t { rounded, unrounded };
Operands random_operands(const Problem& problem, Distribution distribution, uint64_t seed,
                         Tf32Operands operands = Tf32Operands::rounded);

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
Comparison compare(const Problem& problem, const Operands& operands, const std::vector<double>& actual,
                   const Accuracy& accuracy = {});
// The same where what is expected is known already.
Comparison compare(const Problem& problem, const Expected& expected, const std::vector<double>& actual);

struct Outcome {
  Comparison comparison;
  std::string damage;             // what was written that is not an output element; empty where nothing was
  std::vector<double> output;     // dense NCHW
  std::vector<float> statistics;  // where asked for

  bool passed() const { return comparison.failures == 0 && damage.empty(); }
  std::string text() const;
};

struct RunOptions {
  bool in_place = false;    // the output is written where the input lies
  bool statistics = false;  // those of each slab are asked for
};

// The memory of one forward call, between guards.
class ForwardMemory {
 public:
  ForwardMemory(const Problem& problem, const Operands& operands, size_t workspace_bytes, const Place& place,
                const RunOptions& options = {});

  Arguments arguments();
  void* workspace() { return workspace_.data(); }
  // Other operands at the same addresses, the output NaN again.
  void assign(const Operands& operands);
  // Of a call that has finished.
  Outcome outcome();

 private:
  size_t statistics_bytes() const;
  GuardedMemory placed_input(const Operands& operands) const;
  GuardedMemory placed_parameter(const Operands& operands, size_t index) const;
  Buffer& result() { return options_.in_place ? input_ : output_; }
  std::string damage();

  const Problem& problem_;
  Place place_;
  RunOptions options_;
  size_t workspace_bytes_;
  Buffer input_;
  Buffer output_;
  Buffer statistics_;
  Buffer workspace_;
  std::vector<Buffer> parameters_;
};

// Nothing is compared.
Outcome run(const Plan& plan, const Operands& operands, const Place& place, const RunOptions& options = {});

using RunFunction = std::function<void(const Arguments& arguments, void* workspace, Executor& executor)>;

Outcome run_and_compare(const Problem& problem, const Operands& operands, size_t workspace_bytes,
                        const RunFunction& run, Executor& executor);
Outcome run_and_compare(const Plan& plan, const Operands& operands, const Place& place);
Outcome run_and_compare(const Plan& plan, Distribution distribution, uint64_t seed, const Place& place);

// How many slabs have statistics; 0 without a norm.
int64_t slab_count(const Problem& problem);
// The statistics of the problem's slabs, by the reference on the CPU.
std::vector<float> reference_statistics(const Problem& problem, const Operands& operands);
// The first slab whose mean or deviation is further from `expected` than 4e-6 deviations, and what is allowed
// besides (Expected::allowed), in words; empty where there is none.
std::string statistics_error(const std::vector<float>& expected, const std::vector<float>& actual,
                             const std::vector<double>& allowed = {});

// NaN is the same as NaN.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace onepass::testing
