// The reference against what can be computed by hand, and against identities that hold for any data.
#include "reference/reference.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>

#include "block/convert.h"
#include "cpu_cases.h"
#include "onepass/executor.h"
#include "onepass/plan.h"
#include "plan/strategy.h"
#include "reference/tensor_access.h"
#include "support/harness.h"
#include "support/random_problem.h"
#include "support/settings.h"

namespace onepass {

extern const Strategy reference_strategy;

namespace {

using testing::base_seed;
using testing::scaled;
using Vector = std::vector<double>;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

Vector run(const std::string& block, const Shape& sizes, const Vector& input,
           const std::vector<Vector>& parameters = {}) {
  return reference::forward(Block::parse(block), sizes, input, parameters);
}

Vector random_values(int64_t count, std::mt19937_64& engine) {
  std::normal_distribution<double> normal;
  Vector values(static_cast<size_t>(count));
  for (double& value : values) value = normal(engine);
  return values;
}

double dot(const Vector& x, const Vector& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

void expect_near(const Vector& actual, const Vector& expected, double tolerance = 1e-12) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
}

// Convolutions on paper: x = 1 2 3 4 and weights of distinct powers of ten show which tap met which element.

TEST(Convolution, SlidesTheKernelWithoutFlippingIt) {
  EXPECT_EQ(run("conv1d(1,1,k=2,bias=false)", {1, 1, 4}, {1, 2, 3, 4}, {{1, 10}}), (Vector{21, 32, 43}));
}

TEST(Convolution, AddsTheBiasOfItsChannel) {
  EXPECT_EQ(run("conv1d(1,2,k=1)", {1, 1, 2}, {1, 2}, {{10, 100}, {5, 7}}), (Vector{15, 25, 107, 207}));
}

TEST(Convolution, StrideSkipsPositions) {
  EXPECT_EQ(run("conv1d(1,1,k=2,s=2,bias=false)", {1, 1, 5}, {1, 2, 3, 4, 5}, {{1, 10}}), (Vector{21, 43}));
  EXPECT_EQ(run("conv1d(1,1,k=1,s=3,bias=false)", {1, 1, 5}, {1, 2, 3, 4, 5}, {{1}}), (Vector{1, 4}));
}

TEST(Convolution, DilationSpreadsTheTaps) {
  EXPECT_EQ(run("conv1d(1,1,k=2,d=2,bias=false)", {1, 1, 4}, {1, 2, 3, 4}, {{1, 10}}), (Vector{31, 42}));
}

TEST(Convolution, PaddingMeetsNothing) {
  EXPECT_EQ(run("conv1d(1,1,k=3,p=1,bias=false)", {1, 1, 3}, {1, 2, 3}, {{1, 10, 100}}),
            (Vector{210, 321, 32}));
  EXPECT_EQ(run("conv1d(1,1,k=3,p=2,bias=false)", {1, 1, 1}, {7}, {{1, 10, 100}}), (Vector{700, 70, 7}));
}

TEST(Convolution, SamePaddingOfAnEvenKernelHasTheOddZeroAfter) {
  EXPECT_EQ(run("conv1d(1,1,k=2,p=same,bias=false)", {1, 1, 3}, {1, 2, 3}, {{1, 10}}), (Vector{21, 32, 3}));
  EXPECT_EQ(run("conv1d(1,1,k=4,p=same,bias=false)", {1, 1, 3}, {1, 2, 3}, {{1, 10, 100, 1000}}),
            (Vector{3210, 321, 32}));
}

TEST(Convolution, PaddingIsSkippedNotMultiplied) {
  const Vector y = run("conv1d(1,1,k=3,p=1,bias=false)", {1, 1, 2}, {1, 2}, {{inf, 1, nan}});
  EXPECT_TRUE(std::isnan(y[0]));
  EXPECT_EQ(y[1], inf);
  EXPECT_EQ(run("conv1d(1,1,k=3,p=1,bias=false)", {1, 1, 1}, {2}, {{inf, 1, nan}}), (Vector{2}));
}

TEST(Convolution, SumsOverInputChannels) {
  // 1*1 + 2*10 + 3*100 + 4*1000 with weight[0, i, k].
  EXPECT_EQ(run("conv1d(2,1,k=2,bias=false)", {1, 2, 2}, {1, 2, 3, 4}, {{1, 10, 100, 1000}}), (Vector{4321}));
}

TEST(Convolution, GroupsSeeOnlyTheirChannels) {
  EXPECT_EQ(run("conv1d(2,4,k=1,groups=2,bias=false)", {1, 2, 1}, {3, 5}, {{1, 10, 100, 1000}}),
            (Vector{3, 30, 500, 5000}));
}

TEST(Convolution, EachDimensionHasItsOwnNumbers) {
  // Rows 1 2 3 / 4 5 6; a kernel of one row and two columns, two apart, stride 1 down.
  EXPECT_EQ(run("conv2d(1,1,k=1x2,d=1x2,s=1x1,bias=false)", {1, 1, 2, 3}, {1, 2, 3, 4, 5, 6}, {{1, 10}}),
            (Vector{31, 64}));
  EXPECT_EQ(run("conv2d(1,1,k=2x1,p=1x0,s=2x1,bias=false)", {1, 1, 2, 3}, {1, 2, 3, 4, 5, 6}, {{1, 10}}),
            (Vector{10, 20, 30, 4, 5, 6}));
}

TEST(Convolution, TakesThreeDimensions) {
  EXPECT_EQ(run("conv3d(1,1,k=2,bias=false)", {1, 1, 2, 2, 2}, {1, 2, 3, 4, 5, 6, 7, 8},
                {{1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7}}),
            (Vector{87654321}));
}

TEST(TransposedConvolution, SpreadsEachElementOverItsTaps) {
  EXPECT_EQ(run("conv_transpose1d(1,1,k=3,bias=false)", {1, 1, 2}, {1, 2}, {{1, 10, 100}}),
            (Vector{1, 12, 120, 200}));
}

TEST(TransposedConvolution, StrideLeavesGapsThatHoldTheBias) {
  EXPECT_EQ(run("conv_transpose1d(1,1,k=1,s=3)", {1, 1, 2}, {1, 2}, {{10}, {7}}), (Vector{17, 7, 7, 27}));
  EXPECT_EQ(run("conv_transpose1d(1,1,k=3,s=2,bias=false)", {1, 1, 2}, {1, 2}, {{1, 10, 100}}),
            (Vector{1, 10, 102, 20, 200}));
}

TEST(TransposedConvolution, PaddingCutsBothEnds) {
  EXPECT_EQ(run("conv_transpose1d(1,1,k=3,s=2,p=1,bias=false)", {1, 1, 2}, {1, 2}, {{1, 10, 100}}),
            (Vector{10, 102, 20}));
}

TEST(TransposedConvolution, OutputPaddingUncoversTheEnd) {
  EXPECT_EQ(run("conv_transpose1d(1,1,k=3,s=2,p=1,op=1,bias=false)", {1, 1, 2}, {1, 2}, {{1, 10, 100}}),
            (Vector{10, 102, 20, 200}));
  EXPECT_EQ(run("conv_transpose1d(1,1,k=1,s=2,op=1)", {1, 1, 2}, {1, 2}, {{10}, {3}}),
            (Vector{13, 3, 23, 3}));
}

TEST(TransposedConvolution, DilationSpreadsTheTaps) {
  EXPECT_EQ(run("conv_transpose1d(1,1,k=2,d=3,bias=false)", {1, 1, 2}, {1, 2}, {{1, 10}}),
            (Vector{1, 2, 0, 10, 20}));
}

TEST(TransposedConvolution, WeightIsInputByOutputChannel) {
  // weight[i, o]: channel 0 gives 1 and 10, channel 1 gives 100 and 1000.
  EXPECT_EQ(run("conv_transpose1d(2,2,k=1,bias=false)", {1, 2, 1}, {3, 5}, {{1, 10, 100, 1000}}),
            (Vector{503, 5030}));
  EXPECT_EQ(run("conv_transpose1d(2,4,k=1,groups=2,bias=false)", {1, 2, 1}, {3, 5}, {{1, 10, 100, 1000}}),
            (Vector{3, 30, 500, 5000}));
}

TEST(TransposedConvolution, InsertedZerosAreNotMultiplied) {
  EXPECT_EQ(run("conv_transpose1d(1,1,k=2,s=2,bias=false)", {1, 1, 2}, {1, inf}, {{1, 2}}),
            (Vector{1, 2, inf, inf}));
}

// Identities, for the convolutions of random problems.

struct Geometry {
  Conv conv;
  Shape input;
  Shape output;
};

// Convolutions without bias, and the shapes on both sides.
std::vector<Geometry> random_geometries(int64_t count) {
  std::vector<Geometry> geometries;
  for (uint64_t seed = base_seed(); static_cast<int64_t>(geometries.size()) < count; ++seed) {
    const Problem problem = testing::random_problem(seed);
    if (problem.block.conv() == nullptr) continue;
    Conv conv = *problem.block.conv();
    conv.bias = false;
    const Shape input = problem.input.sizes;
    geometries.push_back({conv, input, Block({conv}).conv_output_shape(input)});
  }
  return geometries;
}

Vector convolve(const Conv& conv, const Shape& input_sizes, const Shape& output_sizes, const Vector& input,
                const Vector& weight) {
  Vector output(static_cast<size_t>(element_count(output_sizes)));
  SerialExecutor executor;
  reference::convolve(conv, reference::Sizes(input_sizes), reference::Sizes(output_sizes), input, weight, {},
                      output, executor);
  return output;
}

TEST(Identity, TransposedConvolutionIsTheAdjoint) {
  std::mt19937_64 engine(base_seed());
  for (const Geometry& geometry : random_geometries(scaled(150))) {
    SCOPED_TRACE(Block({geometry.conv}).text() + " @ " + to_string(geometry.input));
    Conv adjoint = geometry.conv;
    adjoint.transposed = !adjoint.transposed;
    std::swap(adjoint.in_channels, adjoint.out_channels);
    const Vector x = random_values(element_count(geometry.input), engine);
    const Vector y = random_values(element_count(geometry.output), engine);
    const Vector weight = random_values(reference::weight_elements(geometry.conv), engine);
    const double forward = dot(convolve(geometry.conv, geometry.input, geometry.output, x, weight), y);
    const double backward = dot(x, convolve(adjoint, geometry.output, geometry.input, y, weight));
    EXPECT_NEAR(forward, backward, 1e-10 * std::sqrt(1 + dot(x, x) * dot(y, y)));
  }
}

TEST(Identity, ConvolutionIsLinear) {
  std::mt19937_64 engine(base_seed() + 1);
  for (const Geometry& geometry : random_geometries(scaled(60))) {
    SCOPED_TRACE(Block({geometry.conv}).text() + " @ " + to_string(geometry.input));
    const Vector x = random_values(element_count(geometry.input), engine);
    const Vector y = random_values(element_count(geometry.input), engine);
    const Vector weight = random_values(reference::weight_elements(geometry.conv), engine);
    Vector combined = x;
    for (size_t i = 0; i < x.size(); ++i) combined[i] += 3 * y[i];
    Vector expected = convolve(geometry.conv, geometry.input, geometry.output, x, weight);
    const Vector of_y = convolve(geometry.conv, geometry.input, geometry.output, y, weight);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += 3 * of_y[i];
    expect_near(convolve(geometry.conv, geometry.input, geometry.output, combined, weight), expected, 1e-10);
  }
}

TEST(Identity, OnesCountTheMultiplyAdds) {
  for (const Geometry& geometry : random_geometries(scaled(150))) {
    const Problem problem(Block({geometry.conv}), geometry.input);
    const Vector ones(static_cast<size_t>(element_count(geometry.input)), 1);
    const Vector weight(static_cast<size_t>(reference::weight_elements(geometry.conv)), 1);
    double count = 0;
    for (const double y : convolve(geometry.conv, geometry.input, geometry.output, ones, weight)) count += y;
    EXPECT_EQ(count, static_cast<double>(problem.conv_multiply_adds())) << problem.text();
  }
}

// The channels [first, first + count) of a dense NCHW tensor.
Vector channels_of(const Vector& x, const Shape& sizes, int64_t first, int64_t count) {
  const auto plane = reference::Sizes(sizes).positions();
  Vector part;
  for (int64_t n = 0; n < sizes[0]; ++n) {
    const auto begin = x.begin() + (n * sizes[1] + first) * plane;
    part.insert(part.end(), begin, begin + count * plane);
  }
  return part;
}

TEST(Identity, GroupedConvolutionIsSeparateOnes) {
  std::mt19937_64 engine(base_seed() + 2);
  for (const Geometry& geometry : random_geometries(scaled(150))) {
    const Conv& conv = geometry.conv;
    if (conv.groups == 1) continue;
    SCOPED_TRACE(Block({conv}).text() + " @ " + to_string(geometry.input));
    const Vector x = random_values(element_count(geometry.input), engine);
    const Vector weight = random_values(reference::weight_elements(conv), engine);
    const Vector whole = convolve(conv, geometry.input, geometry.output, x, weight);
    Conv part = conv;
    part.in_channels /= conv.groups;
    part.out_channels /= conv.groups;
    part.groups = 1;
    Shape part_input = geometry.input;
    Shape part_output = geometry.output;
    part_input[1] = part.in_channels;
    part_output[1] = part.out_channels;
    for (int64_t g = 0; g < conv.groups; ++g) {
      const auto weights = static_cast<ptrdiff_t>(weight.size()) / conv.groups;
      const Vector part_weight(weight.begin() + g * weights, weight.begin() + (g + 1) * weights);
      const Vector part_x = channels_of(x, geometry.input, g * part.in_channels, part.in_channels);
      expect_near(convolve(part, part_input, part_output, part_x, part_weight),
                  channels_of(whole, geometry.output, g * part.out_channels, part.out_channels));
    }
  }
}

TEST(Identity, StrideTakesEverySecondOutput) {
  std::mt19937_64 engine(base_seed() + 3);
  const Vector x = random_values(2 * 3 * 9 * 11, engine);
  const Vector weight = random_values(4 * 3 * 3 * 3, engine);
  const Vector dense = run("conv2d(3,4,p=1,bias=false)", {2, 3, 9, 11}, x, {weight});
  Vector expected;
  for (size_t plane = 0; plane < 8; ++plane)
    for (size_t row = 0; row < 9; row += 2)
      for (size_t column = 0; column < 11; column += 2)
        expected.push_back(dense[(plane * 9 + row) * 11 + column]);
  expect_near(run("conv2d(3,4,s=2,p=1,bias=false)", {2, 3, 9, 11}, x, {weight}), expected);
}

// Norms.

TEST(Norm, OnPaper) {
  // Slab 1 3: mean 2, variance 1. Slab 2 2 5 5: mean 3.5, variance 2.25.
  expect_near(run("group_norm(1,eps=0,affine=false)", {1, 1, 2}, {1, 3}), {-1, 1});
  expect_near(run("group_norm(1,eps=1.75)", {1, 2, 2}, {2, 2, 5, 5}, {{2, 4}, {0, 10}}),
              {-1.5, -1.5, 13, 13});
  expect_near(run("group_norm(2,eps=0,affine=false)", {1, 2, 2}, {1, 3, 2, 6}), {-1, 1, -1, 1});
  expect_near(run("instance_norm(eps=0)", {2, 1, 2}, {1, 3, 2, 6}), {-1, 1, -1, 1});
}

TEST(Norm, SlabHasMeanZeroAndVarianceShrunkByEps) {
  std::mt19937_64 engine(base_seed() + 4);
  constexpr double eps = 0.25;
  const Vector x = random_values(3 * 6 * 5 * 7, engine);
  const Vector y = run("group_norm(2,eps=0.25,affine=false)", {3, 6, 5, 7}, x);
  constexpr size_t slab = 3 * 5 * 7;
  const auto moments = [](auto begin) {
    double mean = 0;
    double variance = 0;
    for (size_t i = 0; i < slab; ++i) mean += begin[static_cast<ptrdiff_t>(i)] / slab;
    for (size_t i = 0; i < slab; ++i) variance += std::pow(begin[static_cast<ptrdiff_t>(i)] - mean, 2) / slab;
    return std::array{mean, variance};
  };
  for (size_t first = 0; first < x.size(); first += slab) {
    const double variance = moments(x.begin() + static_cast<ptrdiff_t>(first))[1];
    const auto [mean, normalised] = moments(y.begin() + static_cast<ptrdiff_t>(first));
    EXPECT_NEAR(mean, 0, 1e-14);
    EXPECT_NEAR(normalised, variance / (variance + eps), 1e-13);
  }
}

TEST(Norm, SlabOfOneElementGivesBeta) {
  EXPECT_EQ(run("group_norm(2)", {2, 2, 1}, {7, -3, 1e9, 0.1}, {{4, 5}, {1, 2}}), (Vector{1, 2, 1, 2}));
}

TEST(Norm, ConstantSlabGivesBeta) {
  expect_near(run("group_norm(1)", {1, 2, 3}, Vector(6, 0.1), {{4, 5}, {1, 2}}), {1, 1, 1, 2, 2, 2});
}

TEST(Norm, LargeMeanLosesNothing) {
  expect_near(run("group_norm(1,eps=0,affine=false)", {1, 1, 2}, {1e6 + 1, 1e6 + 3}), {-1, 1}, 1e-9);
}

TEST(Norm, NonFiniteSpoilsItsSlabAndNoOther) {
  for (const double spoiler : {inf, -inf, nan}) {
    const Vector y = run("group_norm(2,eps=0,affine=false)", {1, 2, 2}, {1, spoiler, 2, 6});
    EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
    EXPECT_EQ(y[2], -1);
    EXPECT_EQ(y[3], 1);
  }
}

TEST(MeanOverSpace, AveragesEachChannel) {
  EXPECT_EQ(run("mean", {2, 2, 2, 1}, {1, 2, 3, 5, -1, 1, 0, 8}), (Vector{1.5, 4, 0, 4}));
  EXPECT_EQ(run("mul(2) | mean", {1, 1, 4}, {1, 2, 3, 4}), (Vector{5}));
}

TEST(Forward, EmptyBatchGivesAnEmptyResult) {
  EXPECT_TRUE(
      run("conv1d(1,2,k=1) | group_norm(2)", {0, 1, 3}, {}, {{1, 1}, {0, 0}, {1, 1}, {0, 0}}).empty());
}

TEST(Forward, StagesTakeTheirParametersInOrder) {
  // 1 2 -> *10 +1 = 11 21 -> prelu no change -> norm -1 1 -> *3+5 = 2 8 -> +100 +200.
  expect_near(run("conv1d(1,1,k=1) | prelu | group_norm(1,eps=0) | residual_add", {1, 1, 2}, {1, 2},
                  {{10}, {1}, {0.5}, {3}, {5}, {100, 200}}),
              {102, 208});
}

// Pointwise operations, against constants known to 15 digits.

struct PointwiseCase {
  std::string stage;
  double x;
  double expected;
};

void expect_pointwise(const std::vector<PointwiseCase>& cases) {
  for (const auto& [stage, x, expected] : cases) {
    SCOPED_TRACE(stage + " of " + std::to_string(x));
    const double actual = run(stage, {1, 1, 1}, {x})[0];
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual)) << actual;
    } else if (std::isinf(expected)) {
      EXPECT_EQ(actual, expected);
    } else {
      EXPECT_NEAR(actual, expected, 1e-14 * std::max(1.0, std::abs(expected)));
    }
  }
}

TEST(PointwiseOps, PiecewiseLinear) {
  expect_pointwise({
      {"relu", -2, 0},
      {"relu", 0, 0},
      {"relu", 3, 3},
      {"relu6", -1, 0},
      {"relu6", 5.5, 5.5},
      {"relu6", 7, 6},
      {"leaky_relu", -2, -0.02},
      {"leaky_relu(0.5)", -2, -1},
      {"leaky_relu(0.5)", 2, 2},
      {"hardsigmoid", -3, 0},
      {"hardsigmoid", -4, 0},
      {"hardsigmoid", 0, 0.5},
      {"hardsigmoid", 1.5, 0.75},
      {"hardsigmoid", 3, 1},
      {"hardsigmoid", 9, 1},
      {"hardswish", -3, 0},
      {"hardswish", -1, -1.0 / 3},
      {"hardswish", 1, 2.0 / 3},
      {"hardswish", 3, 3},
      {"hardswish", 5, 5},
      {"hardswish", -7, 0},
      {"clamp(-1,2)", -3, -1},
      {"clamp(-1,2)", 0.5, 0.5},
      {"clamp(-1,2)", 3, 2},
      {"clamp(2,-1)", 0, -1},
      {"clamp(0,inf)", -3, 0},
      {"clamp(0,inf)", 1e30, 1e30},
      {"clamp(-inf,6)", 7, 6},
      {"clamp(-inf,6)", -1e30, -1e30},
      {"hardtanh", -3, -1},
      {"hardtanh", 0.5, 0.5},
      {"hardtanh(-1,2)", 3, 2},
      {"mul(-2)", 3, -6},
      {"add(-2)", 3, 1},
  });
}

TEST(PointwiseOps, SmoothOnesHaveTheirKnownValues) {
  constexpr double e = std::numbers::e;
  expect_pointwise({
      {"sigmoid", 0, 0.5},
      {"sigmoid", 1, 0.731058578630005},
      {"sigmoid", -1, 0.268941421369995},
      {"sigmoid", std::log(3.0), 0.75},
      {"swish", 0, 0},
      {"swish", 1, 0.731058578630005},
      {"swish", -1, -0.268941421369995},
      {"tanh", 0.5, 0.46211715726001},
      {"tanh", -0.5, -0.46211715726001},
      {"tanh", std::log(2.0), 0.6},
      {"elu", 2, 2},
      {"elu", -1, 1 / e - 1},
      {"elu(2)", -1, 2 / e - 2},
      // Phi(1) = 0.841344746068543, the normal distribution's table.
      {"gelu", 0, 0},
      {"gelu", 1, 0.841344746068543},
      {"gelu", -1, -0.158655253931457},
      {"gelu", 2, 1.95449973610364},
      // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
      {"gelu_tanh", 1, 0.841191990608276},
      {"gelu_tanh", -1, -0.158808009391724},
      {"softplus", 0, std::numbers::ln2},
      {"softplus", 1, 1.31326168751822},
      {"softplus", -30, 9.35762296884e-14},
      {"softplus", 25, 25},
      // tanh(log(1 + e^x)) is 3/5 at 0's log 2, and x = log(e - 1) makes the softplus 1.
      {"mish", 0, 0},
      {"mish", std::log(e - 1), std::log(e - 1) * std::tanh(1.0)},
      {"mish", 25, 25},
      {"mish", -1, -0.303401461374108},
  });
}

TEST(PointwiseOps, NanComesOutOfEach) {
  for (int i = 0; i < op_count; ++i) {
    const Pointwise pointwise{static_cast<Op>(i), 0.5, 2, Per::tensor};
    EXPECT_TRUE(std::isnan(reference::pointwise_value(pointwise, nan, 1))) << name(pointwise.op);
  }
}

TEST(PointwiseOps, InfinitiesGoWherePytorchsGo) {
  expect_pointwise({
      {"relu", inf, inf},        {"relu", -inf, 0},          {"relu6", inf, 6},
      {"relu6", -inf, 0},        {"leaky_relu", inf, inf},   {"leaky_relu", -inf, -inf},
      {"elu", inf, inf},         {"elu", -inf, -1},          {"gelu", inf, inf},
      {"gelu", -inf, nan},       {"gelu_tanh", inf, inf},    {"gelu_tanh", -inf, nan},
      {"swish", inf, inf},       {"swish", -inf, nan},       {"hardswish", inf, inf},
      {"hardswish", -inf, nan},  {"hardsigmoid", inf, 1},    {"hardsigmoid", -inf, 0},
      {"sigmoid", inf, 1},       {"sigmoid", -inf, 0},       {"tanh", inf, 1},
      {"tanh", -inf, -1},        {"mish", inf, inf},         {"mish", -inf, nan},
      {"softplus", inf, inf},    {"softplus", -inf, 0},      {"clamp(-1,2)", inf, 2},
      {"clamp(-1,2)", -inf, -1}, {"mul(0)", inf, nan},       {"mul(-1)", inf, -inf},
      {"add(1)", -inf, -inf},    {"clamp(0,inf)", inf, inf}, {"clamp(-inf,6)", -inf, -inf},
      {"hardtanh", inf, 1},      {"hardtanh", -inf, -1},
  });
}

TEST(PointwiseOps, LargeArgumentsDoNotOverflow) {
  expect_pointwise({
      {"sigmoid", -1e4, 0},
      {"sigmoid", 1e4, 1},
      {"swish", 1e4, 1e4},
      {"swish", -1e4, 0},
      {"mish", 1e4, 1e4},
      {"mish", -1e4, 0},
      {"softplus", 1e4, 1e4},
      {"softplus", -1e4, 0},
      {"gelu", 1e4, 1e4},
      {"gelu", -1e4, 0},
      {"gelu_tanh", 1e150, 1e150},
      {"gelu_tanh", -1e150, 0},
      {"elu", -1e4, -1},
      {"tanh", 1e4, 1},
  });
}

TEST(PointwiseOps, ArgumentsReachTheElementsTheyBelongTo) {
  const Vector ones(8, 1);
  const Vector minus(8, -1);
  const Shape sizes{2, 2, 2};
  EXPECT_EQ(run("prelu", sizes, minus, {{3}}), Vector(8, -3));
  EXPECT_EQ(run("prelu(per=channel)", sizes, minus, {{3, 5}}), (Vector{-3, -3, -5, -5, -3, -3, -5, -5}));
  EXPECT_EQ(run("prelu(per=channel)", sizes, ones, {{3, 5}}), ones);
  EXPECT_EQ(run("channel_mul", sizes, ones, {{3, 5}}), (Vector{3, 3, 5, 5, 3, 3, 5, 5}));
  EXPECT_EQ(run("channel_mul(per=sample)", sizes, ones, {{3, 5, 7, 9}}), (Vector{3, 3, 5, 5, 7, 7, 9, 9}));
  EXPECT_EQ(run("channel_add", sizes, ones, {{3, 5}}), (Vector{4, 4, 6, 6, 4, 4, 6, 6}));
  EXPECT_EQ(run("channel_add(per=sample)", sizes, ones, {{3, 5, 7, 9}}), (Vector{4, 4, 6, 6, 8, 8, 10, 10}));
  EXPECT_EQ(run("residual_add", sizes, ones, {{1, 2, 3, 4, 5, 6, 7, 8}}), (Vector{2, 3, 4, 5, 6, 7, 8, 9}));
}

// Element types.

struct HalfFormat {
  const char* name;
  float (*value)(uint16_t);
  uint16_t (*bits)(double);
  int mantissa_bits;
  int exponent_bias;
};
constexpr HalfFormat half_formats[] = {{"f16", f16_value, f16_bits, 10, 15},
                                       {"bf16", bf16_value, bf16_bits, 7, 127}};

// The value of a bit pattern by the definition of the format.
double defined_value(const HalfFormat& format, unsigned bits) {
  const double sign = bits >> 15 != 0 ? -1 : 1;
  const int exponent = static_cast<int>((bits & 0x7fff) >> format.mantissa_bits);
  const double fraction = (bits & ((1u << format.mantissa_bits) - 1)) / std::ldexp(1, format.mantissa_bits);
  if (exponent == 2 * format.exponent_bias + 1) return fraction == 0 ? sign * inf : nan;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.exponent_bias);
  return sign * std::ldexp(1 + fraction, exponent - format.exponent_bias);
}

TEST(ElementTypes, EveryPatternHasItsValueAndComesBack) {
  for (const HalfFormat& format : half_formats) {
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
      const auto pattern = static_cast<uint16_t>(bits);
      const double value = format.value(pattern);
      const double expected = defined_value(format, bits);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << format.name << ' ' << bits;
        ASSERT_TRUE(std::isnan(format.value(format.bits(value)))) << format.name << ' ' << bits;
        ASSERT_EQ(std::signbit(format.value(format.bits(value))), bits >> 15 != 0)
            << format.name << ' ' << bits;
      } else {
        ASSERT_EQ(std::bit_cast<uint64_t>(value), std::bit_cast<uint64_t>(expected))
            << format.name << ' ' << bits;
        ASSERT_EQ(format.bits(value), pattern) << format.name;
      }
    }
  }
}

TEST(ElementTypes, HalfwayRoundsToEvenAndTheRestToTheNearest) {
  for (const HalfFormat& format : half_formats) {
    const unsigned infinity = (2u * static_cast<unsigned>(format.exponent_bias) + 1) << format.mantissa_bits;
    for (unsigned bits = 0; bits + 1 < infinity; ++bits) {
      const double lower = defined_value(format, bits);
      const double upper = defined_value(format, bits + 1);
      const double middle = (lower + upper) / 2;  // exact in double
      const unsigned even = bits % 2 == 0 ? bits : bits + 1;
      for (const unsigned sign : {0u, 0x8000u}) {
        const double factor = sign == 0 ? 1 : -1;
        ASSERT_EQ(format.bits(factor * middle), sign | even) << format.name << ' ' << bits;
        ASSERT_EQ(format.bits(factor * std::nextafter(middle, 0)), sign | bits) << format.name << ' ' << bits;
        ASSERT_EQ(format.bits(factor * std::nextafter(middle, inf)), sign | (bits + 1))
            << format.name << ' ' << bits;
      }
    }
  }
}

TEST(ElementTypes, OverflowGoesToInfinity) {
  EXPECT_EQ(f16_bits(65504), 0x7bff);
  EXPECT_EQ(f16_bits(65519.99), 0x7bff);
  EXPECT_EQ(f16_bits(65520), 0x7c00);
  EXPECT_EQ(f16_bits(-65520), 0xfc00);
  EXPECT_EQ(f16_bits(1e300), 0x7c00);
  EXPECT_EQ(bf16_bits(0x1.fep127), 0x7f7f);
  EXPECT_EQ(bf16_bits(0x1.ffp127), 0x7f80);
  EXPECT_EQ(bf16_bits(-1e300), 0xff80);
  EXPECT_EQ(f16_bits(inf), 0x7c00);
  EXPECT_EQ(bf16_bits(-inf), 0xff80);
}

TEST(ElementTypes, DenormalsAndZeros) {
  EXPECT_EQ(f16_bits(0x1p-24), 0x0001);
  EXPECT_EQ(f16_bits(0x1p-25), 0x0000);
  EXPECT_EQ(f16_bits(0x1.8p-25), 0x0001);
  EXPECT_EQ(f16_bits(0x1.ffcp-15), 0x0400);  // halfway between the largest denormal and the least normal
  EXPECT_EQ(f16_bits(-0.0), 0x8000);
  EXPECT_EQ(f16_bits(-1e-300), 0x8000);
  EXPECT_EQ(bf16_bits(0x1p-133), 0x0001);
  EXPECT_EQ(bf16_bits(0x1p-134), 0x0000);
  EXPECT_EQ(bf16_bits(5e-324), 0x0000);
  EXPECT_EQ(bf16_bits(0.0), 0x0000);
}

TEST(ElementTypes, DoublesAreRoundedOnce) {
  // Through float first, 1 + 2^-11 + 2^-40 would round to a tie and then down.
  EXPECT_EQ(f16_bits(1 + 0x1p-11 + 0x1p-40), 0x3c01);
  EXPECT_EQ(bf16_bits(1 + 0x1p-8 + 0x1p-40), 0x3f81);
}

// Tensors in memory.

TEST(TensorAccess, StoresAndLoadsAnyStridesAndLeavesGaps) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    TensorSpec spec = TensorSpec::dense(dtype, {2, 3, 4}, Layout::nhwc);
    spec.sizes = {2, 2, 3};  // a slice: one channel and one column left out
    const Vector values{1, 2, 3, 4, 5, 6, 7, 8, -1, -2, 0.5, 0.25};
    std::vector<unsigned char> memory(static_cast<size_t>(spec.byte_span()), 0xff);
    store_tensor(spec, values, memory.data());
    EXPECT_EQ(load_tensor(spec, memory.data()), values);
    const auto element = [&](int64_t index) {
      return load_element(dtype, memory.data() + index * byte_size(dtype));
    };
    EXPECT_EQ(element(1), 4);             // n=0 c=1 x=0
    EXPECT_TRUE(std::isnan(element(2)));  // n=0 c=2, not in the slice
    EXPECT_EQ(element(3), 2);             // n=0 c=0 x=1
    EXPECT_TRUE(std::isnan(element(9)));  // n=0 c=0 x=3
    EXPECT_EQ(element(12), 7);            // n=1 c=0 x=0
  }
}

TEST(TensorAccess, StrideZeroRepeats) {
  const float memory[] = {1, 2};
  EXPECT_EQ(load_tensor(TensorSpec{DType::f32, {2, 1, 2}, {0, 0, 1}}, memory), (Vector{1, 2, 1, 2}));
}

// The reference as a strategy.

testing::Outcome run_strategy(const Problem& problem, testing::Distribution distribution, uint64_t seed,
                              Executor& executor) {
  const auto kernel = reference_strategy.build(problem, {});
  const testing::RunFunction run = [&](const Arguments& arguments, void* workspace, Executor& tasks) {
    kernel->run(arguments, workspace, tasks);
  };
  return run_and_compare(problem, random_operands(problem, distribution, seed), kernel->workspace_bytes(),
                         run, executor);
}

TEST(ReferenceStrategy, TakesEveryCase) {
  SerialExecutor serial;
  const std::vector<std::string> cases = testing::cpu_cases();
  EXPECT_GE(cases.size(), 230u);
  for (const std::string& text : cases) {
    const Problem problem = Problem::parse(text);
    EXPECT_LE(problem.conv_multiply_adds(), 7'000'000) << text;
    EXPECT_LE(element_count(problem.output.sizes), 60'000) << text;
    EXPECT_EQ(reference_strategy.refusal(problem), "");
    EXPECT_GT(reference_strategy.seconds(problem, {}), element_count(problem.input.sizes) > 0 ? 0 : -1)
        << text;
    const testing::Outcome outcome =
        run_strategy(problem, testing::Distribution::normal, base_seed(), serial);
    EXPECT_TRUE(outcome.passed()) << text << ": " << outcome.text();
    EXPECT_EQ(outcome.comparison.unchecked, 0) << text;
  }
}

TEST(ReferenceStrategy, TakesRandomProblemsWithAnyThreadCount) {
  SerialExecutor serial;
  ThreadExecutor threads(3);
  for (int64_t i = 0; i < scaled(200); ++i) {
    const uint64_t seed = base_seed() + static_cast<uint64_t>(i);
    const Problem problem = testing::random_problem(seed);
    const auto distribution = testing::distributions[i % std::ssize(testing::distributions)];
    SCOPED_TRACE(problem.text() + ", " + std::string(name(distribution)) + ", seed " + std::to_string(seed));
    const testing::Outcome one = run_strategy(problem, distribution, seed, serial);
    const testing::Outcome three = run_strategy(problem, distribution, seed, threads);
    EXPECT_TRUE(one.passed()) << one.text();
    ASSERT_EQ(one.output.size(), three.output.size());
    for (size_t k = 0; k < one.output.size(); ++k)
      ASSERT_EQ(std::bit_cast<uint64_t>(one.output[k]), std::bit_cast<uint64_t>(three.output[k])) << k;
  }
}

}  // namespace
}  // namespace onepass
