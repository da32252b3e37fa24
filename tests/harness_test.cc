// The harness must pass an honest f32 implementation on any data and see the faults that implementations
// have.
#include "support/harness.h"
#include "cpu_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "block/convert.h"
#include "onepass/executor.h"
#include "reference/reference.h"
#include "reference/tensor_access.h"
#include "support/random_problem.h"
#include "support/settings.h"

namespace onepass::testing {
namespace {

using reference::Sizes;
using Floats = std::vector<float>;

// What can be wrong with an implementation.
enum class Fault : uint8_t {
  none,
  no_conv_bias,
  last_tap_missing,
  operands_in_tf32,        // 10 mantissa bits
  variance_of_raw_values,  // E[x^2] - E[x]^2
  variance_unbiased,
  eps_outside_root,
  eps_missing,
  bias_of_next_channel,  // of the norm
  stage_missing,         // the last pointwise stage
  result_truncated,      // to the output's type, instead of rounded
};

namespace f32 {

constexpr float K(double number) { return static_cast<float>(number); }
float minimum(float x, float limit) { return x > limit ? limit : x; }
float maximum(float x, float limit) { return x < limit ? limit : x; }
float where_positive(float t, float yes, float no) { return t > 0 ? yes : no; }
using std::exp;
using std::expm1;
using std::log1p;
using std::tanh;
float sigmoid(float x) { return 1 / (1 + exp(-x)); }
float ramp(float x) { return minimum(maximum(x + 3, 0), 6) * (1.0f / 6.0f); }
float normal_cdf(float x) { return 0.5f * (1 + std::erf(x * 0.70710678118654752440f)); }

float pointwise_value(const Pointwise& pointwise, float x, [[maybe_unused]] float p) {
  const float a = K(pointwise.a);
  const float b = K(pointwise.b);
  switch (pointwise.op) {
#define ONEPASS_POINTWISE(name, constants, a_default, b_default, argument, value, ...) \
  case Op::name:                                                                       \
    return value;
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
  }
  return x;
}

}  // namespace f32

// A block in plain f32, stage after stage, with statistics in two passes over shifted values.
class HonestForward {
 public:
  HonestForward(const Problem& problem, Fault fault)
      : block_(problem.block),
        fault_(fault),
        input_sizes_(problem.input.sizes),
        sizes_(problem.block.conv_output_shape(problem.input.sizes)) {}

  Floats run(Floats input, std::vector<Floats> parameters) {
    parameters_ = std::move(parameters);
    values_ = std::move(input);
    const Stage* skipped = fault_ == Fault::stage_missing ? last_pointwise() : nullptr;
    for (const Stage& stage : block_.stages())
      if (&stage != skipped) std::visit([this](const auto& typed) { apply(typed); }, stage);
    return values_;
  }

 private:
  const Floats& next_parameter() { return parameters_[used_parameters_++]; }

  const Stage* last_pointwise() const {
    const Stage* last = nullptr;
    for (const Stage& stage : block_.stages())
      if (std::holds_alternative<Pointwise>(stage)) last = &stage;
    return last;
  }

  float operand(float value) const {
    if (fault_ != Fault::operands_in_tf32 || !std::isfinite(value)) return value;
    return std::bit_cast<float>((std::bit_cast<uint32_t>(value) + 0xfffu) & ~0x1fffu);
  }

  // A sum as vector code has it: four chains of at most 64 terms.
  class ChunkedSum {
   public:
    void add(float x, float y) {
      float& chain = chains_[static_cast<size_t>(terms_ % 4)];
      chain = std::fma(x, y, chain);
      if (++terms_ % 256 == 0) flush();
    }
    float value() {
      flush();
      return total_;
    }

   private:
    void flush() {
      total_ += (chains_[0] + chains_[1]) + (chains_[2] + chains_[3]);
      chains_ = {};
    }
    float total_ = 0;
    std::array<float, 4> chains_{};
    int terms_ = 0;
  };

  // The term of an output position and a tap: the input element that they meet, where there is one.
  bool meet(const Conv& conv, const Extents& q, const Extents& k, int64_t* position) const {
    int64_t flat = 0;
    for (size_t d = 0; d < q.size(); ++d) {
      int64_t p = q[d] * conv.stride[d] + k[d] * conv.dilation[d] - conv.padding_before[d];
      if (conv.transposed) {
        const int64_t scaled_p = q[d] + conv.padding_before[d] - k[d] * conv.dilation[d];
        if (scaled_p < 0 || scaled_p % conv.stride[d] != 0) return false;
        p = scaled_p / conv.stride[d];
      }
      if (p < 0 || p >= input_sizes_.space[d]) return false;
      flat = flat * input_sizes_.space[d] + p;
    }
    *position = flat;
    return true;
  }

  static Extents unflatten(int64_t index, const Extents& box) {
    return {index / (box[1] * box[2]), index / box[2] % box[1], index % box[2]};
  }

  void apply(const Conv& conv) {
    const Floats weight = next_parameter();
    const Floats bias = conv.bias ? next_parameter() : Floats(static_cast<size_t>(conv.out_channels), 0);
    Floats output(static_cast<size_t>(sizes_.elements()));
    for (size_t i = 0; i < output.size(); ++i)
      output[i] = conv_element(conv, weight, bias, static_cast<int64_t>(i));
    values_ = std::move(output);
  }

  float conv_element(const Conv& conv, const Floats& weight, const Floats& bias, int64_t element) const {
    const int64_t inputs = conv.in_channels / conv.groups;
    const int64_t outputs = conv.out_channels / conv.groups;
    const int64_t taps = conv.kernel[0] * conv.kernel[1] * conv.kernel[2];
    const int64_t used_taps = fault_ == Fault::last_tap_missing ? taps - 1 : taps;
    const int64_t plane = element / sizes_.positions();
    const int64_t o = plane % sizes_.channels;
    const Extents q = unflatten(element % sizes_.positions(), sizes_.space);
    ChunkedSum sum;
    for (int64_t i = 0; i < inputs; ++i) {
      const int64_t channel = o / outputs * inputs + i;
      const int64_t x = (plane / sizes_.channels * conv.in_channels + channel) * input_sizes_.positions();
      const int64_t w = conv.transposed ? channel * outputs + o % outputs : o * inputs + i;
      for (int64_t tap = 0; tap < used_taps; ++tap) {
        int64_t position = 0;
        if (!meet(conv, q, unflatten(tap, conv.kernel), &position)) continue;
        sum.add(operand(values_[static_cast<size_t>(x + position)]),
                operand(weight[static_cast<size_t>(w * taps + tap)]));
      }
    }
    return fault_ == Fault::no_conv_bias ? sum.value() : sum.value() + bias[static_cast<size_t>(o)];
  }

  void apply(const Pointwise& pointwise) {
    const bool has_argument = argument_kind(pointwise.op) != ArgumentKind::none;
    const Floats argument = has_argument ? next_parameter() : Floats{};
    for (size_t i = 0; i < values_.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      const int64_t plane = index / sizes_.positions();
      const auto which = static_cast<size_t>(reference::argument_index(
          pointwise, sizes_, plane / sizes_.channels, plane % sizes_.channels, index % sizes_.positions()));
      values_[i] = f32::pointwise_value(pointwise, values_[i], has_argument ? argument[which] : 0);
    }
  }

  // The mean of the differences from `shift`, added to it.
  static float mean_of(const Floats& values, float shift) {
    ChunkedSum sum;
    for (const float value : values) sum.add(value - shift, 1);
    return shift + sum.value() / static_cast<float>(values.size());
  }

  float variance_of(const Floats& slab, float mean) const {
    const float shift = fault_ == Fault::variance_of_raw_values ? 0 : mean;
    ChunkedSum squares;
    for (const float value : slab) squares.add(value - shift, value - shift);
    auto count = static_cast<float>(slab.size());
    if (fault_ == Fault::variance_of_raw_values) return squares.value() / count - mean * mean;
    if (fault_ == Fault::variance_unbiased) count -= 1;
    return squares.value() / count;
  }

  float deviation(float variance, double eps) const {
    const auto added = static_cast<float>(eps);
    if (fault_ == Fault::eps_missing) return std::sqrt(variance);
    return fault_ == Fault::eps_outside_root ? std::sqrt(variance) + added : std::sqrt(variance + added);
  }

  void apply(const Norm& norm) {
    const auto channels = static_cast<size_t>(sizes_.channels);
    const Floats weight = norm.affine ? next_parameter() : Floats(channels, 1);
    const Floats bias = norm.affine ? next_parameter() : Floats(channels, 0);
    const auto positions = static_cast<size_t>(sizes_.positions());
    const size_t slab_elements =
        channels / static_cast<size_t>(norm.group_count(sizes_.channels)) * positions;
    for (size_t first = 0; first < values_.size(); first += slab_elements) {
      const auto begin = values_.begin() + static_cast<ptrdiff_t>(first);
      const Floats slab(begin, begin + static_cast<ptrdiff_t>(slab_elements));
      const float mean = mean_of(slab, slab.front());
      const float rstd = 1 / deviation(variance_of(slab, mean), norm.eps);
      for (size_t i = first; i < first + slab_elements; ++i) {
        const size_t c = i / positions % channels;
        const size_t bias_channel = fault_ == Fault::bias_of_next_channel ? (c + 1) % channels : c;
        values_[i] = (values_[i] - mean) * rstd * weight[c] + bias[bias_channel];
      }
    }
  }

  void apply(const Mean&) {
    const auto positions = static_cast<ptrdiff_t>(sizes_.positions());
    Floats means;
    for (auto plane = values_.begin(); plane != values_.end(); plane += positions)
      means.push_back(mean_of(Floats(plane, plane + positions), 0));
    values_ = std::move(means);
  }

  const Block& block_;
  Fault fault_;
  Sizes input_sizes_;
  Sizes sizes_;  // after the convolution
  std::vector<Floats> parameters_;
  size_t used_parameters_ = 0;
  Floats values_;
};

double truncate_to(DType dtype, double value) {
  const double rounded = round_to(dtype, value);
  if (std::abs(rounded) <= std::abs(value) || dtype == DType::f32) return rounded;
  return dtype == DType::f16 ? f16_value(static_cast<uint16_t>(f16_bits(rounded) - 1))
                             : bf16_value(static_cast<uint16_t>(bf16_bits(rounded) - 1));
}

RunFunction implementation(const Problem& problem, Fault fault = Fault::none) {
  return [&problem, fault](const Arguments& arguments, void*, Executor&) {
    const auto floats = [](const TensorSpec& spec, const void* memory) {
      const std::vector<double> values = load_tensor(spec, memory);
      Floats narrowed;
      for (const double value : values) narrowed.push_back(static_cast<float>(value));
      return narrowed;
    };
    std::vector<Floats> parameters;
    for (size_t i = 0; i < problem.parameters.size(); ++i)
      parameters.push_back(floats(problem.parameters[i], arguments.parameters[i]));
    HonestForward forward(problem, fault);
    const Floats output = forward.run(floats(problem.input, arguments.input), std::move(parameters));
    std::vector<double> values(output.begin(), output.end());
    if (fault == Fault::result_truncated)
      for (double& value : values) value = truncate_to(problem.output.dtype, value);
    store_tensor(problem.output, values, arguments.output);
  };
}

Outcome run_with(const std::string& text, Distribution distribution, Fault fault) {
  const Problem problem = Problem::parse(text);
  SerialExecutor executor;
  return run_and_compare(problem, random_operands(problem, distribution, base_seed()), 0,
                         implementation(problem, fault), executor);
}

// All cases, or some of them where fewer tests are asked for: cpu_test takes the harness through all of them.
std::vector<std::string> some_cases() {
  const std::vector<std::string> all = cpu_cases();
  const int64_t count = std::min(scaled(std::ssize(all)), std::ssize(all));
  std::vector<std::string> some;
  for (int64_t i = 0; i < count; ++i) some.push_back(all[static_cast<size_t>(i * std::ssize(all) / count)]);
  return some;
}

TEST(ErrorBound, HonestF32PassesEveryCaseOnAnyData) {
  constexpr size_t distributions_per_case = 3;
  SerialExecutor executor;
  size_t next = base_seed() % std::size(distributions);
  for (const std::string& text : some_cases()) {
    const Problem problem = Problem::parse(text);
    if (problem.output.dtype == DType::f64) continue;
    for (size_t i = 0; i < distributions_per_case; ++i, ++next) {
      const Distribution distribution = distributions[next % std::size(distributions)];
      const Operands operands = random_operands(problem, distribution, base_seed() + next);
      const Outcome outcome = run_and_compare(problem, operands, 0, implementation(problem), executor);
      EXPECT_TRUE(outcome.passed()) << text << ", " << name(distribution) << ": " << outcome.text();
    }
  }
}

TEST(ErrorBound, HonestF32PassesRandomProblems) {
  SerialExecutor executor;
  for (int64_t i = 0; i < scaled(400); ++i) {
    const uint64_t seed = base_seed() + static_cast<uint64_t>(i);
    const Problem problem = random_problem(seed);
    const auto distribution = distributions[i % std::ssize(distributions)];
    const Outcome outcome = run_and_compare(problem, random_operands(problem, distribution, seed), 0,
                                            implementation(problem), executor);
    EXPECT_TRUE(outcome.passed()) << problem.text() << ", " << name(distribution) << ", seed " << seed << ": "
                                  << outcome.text();
  }
}

TEST(ErrorBound, OrdinaryDataIsAlwaysChecked) {
  SerialExecutor executor;
  for (const std::string& text : some_cases()) {
    const Problem problem = Problem::parse(text);
    for (const auto distribution : {Distribution::uniform, Distribution::normal, Distribution::offset_100}) {
      const Operands operands = random_operands(problem, distribution, base_seed());
      const std::vector<double> zeros(static_cast<size_t>(element_count(problem.output.sizes)), 0);
      EXPECT_EQ(compare(problem, operands, zeros).unchecked, 0) << text << ", " << name(distribution);
    }
  }
}

TEST(ErrorBound, SeesFaultsOfTheConvolution) {
  const std::string text = "conv2d(16,8,p=1) | swish | group_norm(4) | relu @ 1x16x6x7";
  for (const Fault fault : {Fault::last_tap_missing, Fault::operands_in_tf32, Fault::no_conv_bias}) {
    for (const auto distribution : {Distribution::uniform, Distribution::normal})
      EXPECT_FALSE(run_with(text, distribution, fault).passed()) << static_cast<int>(fault);
  }
}

TEST(ErrorBound, SeesOneMissingTermInSeventeenHundred) {
  const std::string text = "conv3d(64,2,k=3) | relu | group_norm(2) @ 1x64x3x4x5";
  EXPECT_TRUE(run_with(text, Distribution::normal, Fault::none).passed());
  EXPECT_FALSE(run_with(text, Distribution::normal, Fault::last_tap_missing).passed());
  EXPECT_FALSE(run_with(text, Distribution::normal, Fault::operands_in_tf32).passed());
}

TEST(ErrorBound, SeesFaultsOfTheNorm) {
  EXPECT_FALSE(
      run_with("group_norm(2) @ 2x4x63", Distribution::offset_100, Fault::variance_of_raw_values).passed());
  EXPECT_FALSE(run_with("group_norm(2) @ 2x4x63", Distribution::normal, Fault::variance_unbiased).passed());
  EXPECT_FALSE(
      run_with("group_norm(2,eps=1e-3) @ 2x4x63", Distribution::normal, Fault::eps_missing).passed());
  EXPECT_FALSE(run_with("group_norm(2) @ 2x4x63", Distribution::normal, Fault::eps_missing).passed());
  EXPECT_FALSE(
      run_with("group_norm(2,eps=1e-3) @ 2x4x63", Distribution::normal, Fault::eps_outside_root).passed());
  EXPECT_FALSE(
      run_with("group_norm(2) @ 2x4x63", Distribution::normal, Fault::bias_of_next_channel).passed());
}

TEST(ErrorBound, SeesAMissingStage) {
  for (const std::string stage :
       {"relu", "relu6", "swish", "hardswish", "gelu", "mish", "softplus", "tanh", "elu"})
    EXPECT_FALSE(
        run_with("group_norm(2) | " + stage + " @ 2x4x63", Distribution::normal, Fault::stage_missing)
            .passed())
        << stage;
  EXPECT_FALSE(run_with("gelu_tanh @ 1x2x9", Distribution::normal, Fault::stage_missing).passed());
}

TEST(ErrorBound, SeesTruncationInsteadOfRounding) {
  for (const std::string dtype : {"f16", "bf16"}) {
    const std::string text = "conv2d(3,8) | group_norm(4) @ 2x3x9x9 " + dtype;
    EXPECT_TRUE(run_with(text, Distribution::normal, Fault::none).passed());
    EXPECT_FALSE(run_with(text, Distribution::normal, Fault::result_truncated).passed());
  }
}

// Memory: each of these runs is right but for one byte.

std::string damage_of(const std::string& text,
                      const std::function<void(const Problem&, const Arguments&, void*)>& harm) {
  Problem problem = Problem::parse(text);
  problem.output.strides = TensorSpec::dense(problem.output.dtype, {2, 3, 5, 5}).strides;  // rows of 4 in 5
  problem.validate();
  SerialExecutor executor;
  const RunFunction honest = implementation(problem);
  const RunFunction run = [&](const Arguments& arguments, void* workspace, Executor& tasks) {
    honest(arguments, workspace, tasks);
    harm(problem, arguments, workspace);
  };
  const Outcome outcome = run_and_compare(
      problem, random_operands(problem, Distribution::normal, base_seed()), 32, run, executor);
  EXPECT_EQ(outcome.comparison.failures, 0) << outcome.text();
  return outcome.damage;
}

void set_byte(const void* memory, int64_t offset) {
  const_cast<unsigned char*>(static_cast<const unsigned char*>(memory))[offset] = 0x17;
}

TEST(Harness, SeesWhatIsWrittenOutsideTheOutput) {
  const std::string text = "channel_add | relu @ 2x3x5x4";
  using Args = const Arguments&;
  EXPECT_EQ(damage_of(text, [](const Problem&, Args, void* w) { set_byte(w, 0), set_byte(w, 31); }), "");
  EXPECT_NE(damage_of(text, [](const Problem&, Args, void* w) { set_byte(w, 32); }), "");
  EXPECT_NE(damage_of(text, [](const Problem&, Args, void* w) { set_byte(w, -1); }), "");
  EXPECT_NE(damage_of(text, [](const Problem&, Args a, void*) { set_byte(a.output, -1); }), "");
  EXPECT_NE(damage_of(text, [](const Problem&, Args a, void*) { set_byte(a.output, 4 * 4); }), "");
  EXPECT_NE(
      damage_of(text, [](const Problem& p, Args a, void*) { set_byte(a.output, p.output.byte_span()); }), "");
  EXPECT_NE(damage_of(text, [](const Problem&, Args a, void*) { set_byte(a.input, 0); }), "");
  EXPECT_NE(damage_of(text, [](const Problem&, Args a, void*) { set_byte(a.parameters[0], 1); }), "");
}

TEST(Harness, SeesAnElementThatWasNotWritten) {
  const Problem problem = Problem::parse("mul(1) @ 1x1x4");
  SerialExecutor executor;
  const RunFunction run = [](const Arguments& arguments, void*, Executor&) {
    std::memcpy(arguments.output, arguments.input, 3 * sizeof(float));
  };
  const Outcome outcome =
      run_and_compare(problem, random_operands(problem, Distribution::normal, base_seed()), 0, run, executor);
  EXPECT_EQ(outcome.comparison.failures, 1);
  EXPECT_EQ(outcome.comparison.worst_position, "n=0 c=0 at 3");
}

TEST(Harness, BuffersAreAlignedToTheirElementsOnly) {
  for (const std::string dtype : {"f32", "f16", "bf16", "f64"}) {
    const Problem problem = Problem::parse("channel_add @ 1x2x4 " + dtype);
    SerialExecutor executor;
    const RunFunction run = [&](const Arguments& arguments, void* workspace, Executor&) {
      const auto bytes = static_cast<uintptr_t>(byte_size(problem.input.dtype));
      for (const void* address :
           {arguments.input, static_cast<const void*>(arguments.output), arguments.parameters[0]})
        EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % 16, bytes) << dtype;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace) % 64, 0u);
    };
    run_and_compare(problem, random_operands(problem, Distribution::normal, 1), 100, run, executor);
  }
}

TEST(Harness, PlacementsDecideWhereTensorsLie) {
  const Problem problem = Problem::parse("channel_add | residual_add @ 2x3x5 bf16");
  const Operands operands = random_operands(problem, Distribution::normal, 1);
  SerialExecutor executor;
  for (const Placement placement : placements) {
    ForwardMemory memory(problem, operands, 0, Place(executor, placement));
    const Arguments arguments = memory.arguments();
    std::vector<uintptr_t> elements;
    for (const void* address : {arguments.input, static_cast<const void*>(arguments.output),
                                arguments.parameters[0], arguments.parameters[1]})
      elements.push_back(reinterpret_cast<uintptr_t>(address) % 64 / 2);
    const std::map<Placement, std::vector<uintptr_t>> expected{{Placement::elements, {1, 1, 1, 1}},
                                                               {Placement::vectors, {0, 0, 0, 0}},
                                                               {Placement::mixed, {1, 6, 3, 0}},
                                                               {Placement::inputs, {0, 1, 0, 0}}};
    EXPECT_EQ(elements, expected.at(placement)) << name(placement);
  }
}

TEST(Harness, SeesWrongStatistics) {
  const Problem problem = Problem::parse("group_norm(2) @ 2x4x9");
  const Operands operands = random_operands(problem, Distribution::offset_100, 1);
  const std::vector<float> right = reference_statistics(problem, operands);
  ASSERT_EQ(right.size(), 8u);
  EXPECT_EQ(statistics_error(right, right), "");
  for (size_t i = 0; i < right.size(); ++i) {
    std::vector<float> wrong = right;
    wrong[i] *= 1.0001f;
    EXPECT_NE(statistics_error(right, wrong), "") << i;
    wrong[i] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_NE(statistics_error(right, wrong), "") << i;
  }
}

// What comes with the expected output is what the reference writes, and changes no bound.
TEST(Harness, ExpectsTheStatisticsOfTheReference) {
  for (const char* const text : {"conv2d(3,8,k=3,p=1) | swish | group_norm(2) | relu @ 3x3x7x5 bf16",
                                 "group_norm(4) | mean @ 2x8x31"}) {
    const Problem problem = Problem::parse(text, Device::cuda());
    const Operands operands = random_operands(problem, Distribution::offset_100, 3);
    const Expected with = expected_with_statistics(problem, operands.input, operands.parameters);
    const Expected without = expected_output(problem, operands.input, operands.parameters);
    const std::vector<float> statistics(with.statistics.begin(), with.statistics.end());
    EXPECT_EQ(statistics.size(), 2 * static_cast<size_t>(slab_count(problem)));
    EXPECT_EQ(statistics_error(reference_statistics(problem, operands), statistics), "") << text;
    EXPECT_EQ(with.values, without.values) << text;
    EXPECT_EQ(with.bounds, without.bounds) << text;
    EXPECT_TRUE(without.statistics.empty());
  }
}

// Sigmoids of kernels that round to 16 bits may be off by 2^-17: so may a mean of them, and no more.
TEST(Harness, GrantsStatisticsTheErrorOfSigmoids) {
  const Problem problem = Problem::parse("gelu | group_norm(2) @ 2x4x9 bf16", Device::cuda());
  const Accuracy coarse{.sigmoid = 0x1p-17};
  const Operands operands = random_operands(problem, Distribution::uniform, 1);
  EXPECT_TRUE(expected_with_statistics(problem, operands.input, operands.parameters).allowed.empty());
  EXPECT_TRUE(expected_output(problem, operands.input, operands.parameters, coarse).allowed.empty());
  const std::vector<float> right = reference_statistics(problem, operands);
  const std::vector<double> allowed =
      expected_with_statistics(problem, operands.input, operands.parameters, coarse).allowed;
  ASSERT_EQ(allowed.size(), right.size());
  for (size_t i = 0; i < right.size(); i += 2) {
    // Values of a uniform distribution are below 1.
    EXPECT_GT(allowed[i], 0x1p-17 * 0.1);
    EXPECT_LT(allowed[i], 0x1p-17);
    const double room = allowed[i] + 4e-6 / right[i + 1];
    for (const auto& [part, is_allowed] : {std::pair{0.9, true}, std::pair{1.5, false}}) {
      std::vector<float> moved = right;
      moved[i] += static_cast<float>(part * room);
      EXPECT_EQ(statistics_error(right, moved, allowed).empty(), is_allowed) << i;
    }
  }
}

TEST(Operands, AreRepresentableAndHaveTheirDistribution) {
  for (const std::string dtype : {"f32", "f16", "bf16"}) {
    const Problem problem = Problem::parse("relu @ 2x8x500 " + dtype);
    const auto input = [&](Distribution distribution) {
      const std::vector<double> values = random_operands(problem, distribution, base_seed()).input;
      for (const double value : values)
        EXPECT_TRUE(std::isnan(value) || value == round_to(problem.input.dtype, value)) << name(distribution);
      return values;
    };
    const auto [least, most] = [&] {
      const auto values = input(Distribution::uniform);
      return std::array{*std::min_element(values.begin(), values.end()),
                        *std::max_element(values.begin(), values.end())};
    }();
    EXPECT_TRUE(least >= 0 && least < 0.01 && most <= 1 && most > 0.99);
    const auto constant = input(Distribution::constant);
    EXPECT_EQ(std::set<double>(constant.begin(), constant.end()).size(), 1u);
    const double least_normal = dtype == "f16" ? 0x1p-14 : 0x1p-126;
    for (const double value : input(Distribution::denormal)) EXPECT_LE(std::abs(value), least_normal);
    const auto special = input(Distribution::special);
    EXPECT_TRUE(std::any_of(special.begin(), special.end(), [](double x) { return std::isnan(x); }));
    EXPECT_TRUE(std::any_of(special.begin(), special.end(), [](double x) { return std::isinf(x); }));
  }
}

TEST(RandomProblem, SpansTheLanguage) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const Problem problem = random_problem(seed);
    EXPECT_EQ(problem.text(), random_problem(seed).text());
    seen.insert(std::string(name(problem.input.dtype)));
    for (const Stage& stage : problem.block.stages()) {
      const std::string text = Block::text(stage);
      seen.insert(text.substr(0, text.find('(')));
    }
    for (const int64_t stride : problem.input.strides)
      if (stride == 0) seen.insert("expanded input");
    if (problem.output.strides != TensorSpec::dense(DType::f32, problem.output.sizes).strides)
      seen.insert("strided output");
    if (problem.input.sizes[0] == 0) seen.insert("empty batch");
  }
  for (const std::string feature : {"f32", "f16", "bf16", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
                                    "conv_transpose2d", "conv_transpose3d", "group_norm", "instance_norm",
                                    "mean", "expanded input", "strided output", "empty batch"})
    EXPECT_TRUE(seen.contains(feature)) << feature;
  for (int i = 0; i < op_count; ++i) EXPECT_TRUE(seen.contains(std::string(name(static_cast<Op>(i)))));
}

TEST(RandomProblem, LargeTailsAreLargeAndSpanTheLayouts) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Problem problem = random_large_tail(seed);
    problem.validate();
    EXPECT_EQ(problem.block.conv(), nullptr);
    EXPECT_GE(element_count(problem.input.sizes), 50'000);
    EXPECT_LE(element_count(problem.input.sizes), 4'000'000) << problem.text();
    seen.insert(std::string(name(problem.input.dtype)) + (problem.input.strides[1] == 1 ? " nhwc" : ""));
  }
  EXPECT_EQ(seen.size(), 6u);
}

}  // namespace
}  // namespace onepass::testing
