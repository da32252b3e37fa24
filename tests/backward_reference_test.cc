// The reference's gradients against finite differences of its forward, against identities, and at the
// corners.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "onepass/onepass.h"
#include "reference/backward.h"
#include "support/random_problem.h"
#include "support/settings.h"

namespace onepass {
namespace {

using testing::base_seed;
using testing::scaled;
using Vector = std::vector<double>;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

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

// A block with random operands, and the loss sum(dy y) whose gradients backward() gives.
struct Example {
  Block block;
  Shape sizes;
  Vector input;
  std::vector<Vector> parameters;
  Vector output_gradient;

  Example(Block a_block, Shape input_sizes, uint64_t seed)
      : block(std::move(a_block)), sizes(std::move(input_sizes)) {
    std::mt19937_64 engine(seed);
    input = random_values(element_count(sizes), engine);
    for (const Parameter& parameter : block.parameters(sizes))
      parameters.push_back(random_values(element_count(parameter.sizes), engine));
    output_gradient = random_values(element_count(block.output_shape(sizes)), engine);
  }

  double loss() const { return dot(reference::forward(block, sizes, input, parameters), output_gradient); }
  reference::Gradients gradients() const {
    return reference::backward(block, sizes, input, parameters, output_gradient);
  }
};

struct Differences {
  int64_t checked = 0;
  int64_t corners = 0;  // elements that a corner of the loss is too near to
};

// Central differences with a step of 1e-5: the error is 1e-10 of the third derivative and 1e-11 of the loss.
// A second difference of more than 1e-3 steps shows a corner between the points.
void check_against_differences(Example& example, Vector& values, const Vector& gradient,
                               Differences& differences) {
  constexpr double step = 1e-5;
  ASSERT_EQ(values.size(), gradient.size());
  const double here = example.loss();
  double scale = 1;
  for (const double g : gradient) scale = std::max(scale, std::abs(g));
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i];
    values[i] = value + step;
    const double above = example.loss();
    values[i] = value - step;
    const double below = example.loss();
    values[i] = value;
    if (std::abs(above - 2 * here + below) > 1e-3 * step * scale) {
      ++differences.corners;
      continue;
    }
    ++differences.checked;
    EXPECT_NEAR(gradient[i], (above - below) / (2 * step), 2e-6 * scale) << "element " << i;
  }
}

Differences check_example(Example example) {
  SCOPED_TRACE(example.block.text() + " @ " + to_string(example.sizes));
  const reference::Gradients gradients = example.gradients();
  Differences differences;
  check_against_differences(example, example.input, gradients.input, differences);
  for (size_t i = 0; i < example.parameters.size(); ++i)
    check_against_differences(example, example.parameters[i], gradients.parameters[i], differences);
  return differences;
}

TEST(BackwardReference, GradientsAreTheSlopesOfEveryStage) {
  const char* const blocks[] = {
      "relu",
      "relu6",
      "leaky_relu(0.1)",
      "prelu",
      "prelu(per=channel)",
      "elu(0.7)",
      "gelu",
      "gelu_tanh",
      "swish",
      "hardswish",
      "hardsigmoid",
      "sigmoid",
      "tanh",
      "mish",
      "softplus",
      "clamp(-0.5,1)",
      "clamp(0.25,inf)",
      "hardtanh(-0.5,1)",
      "mul(-1.5)",
      "add(2)",
      "channel_mul",
      "channel_mul(per=sample)",
      "channel_add",
      "channel_add(per=sample)",
      "residual_add",
      "mean",
      "group_norm(1)",
      "group_norm(2)",
      "group_norm(4)",
      "group_norm(2,affine=false)",
      "instance_norm",
      "instance_norm(affine=true)",
      "group_norm(2) | mean",
      "swish | group_norm(2) | hardswish | mean",
      "add(30) | mish",
      "add(30) | softplus",
      "mul(4) | hardswish",
      "mul(4) | relu6",
      "mul(4) | gelu_tanh",
      "channel_add(per=sample) | group_norm(2) | prelu(per=channel) | residual_add | tanh",
  };
  uint64_t seed = 1;
  Differences total;
  for (const char* const block : blocks) {
    for (const Shape& sizes : {Shape{2, 4, 5}, Shape{3, 4, 2, 3}, Shape{1, 4, 2, 2, 2}}) {
      const Differences differences = check_example(Example(Block::parse(block), sizes, seed++));
      total.checked += differences.checked;
      total.corners += differences.corners;
    }
  }
  EXPECT_GT(total.checked, 3000);
  EXPECT_LT(total.corners, total.checked / 100);
}

TEST(BackwardReference, GradientsAreTheSlopesOfConvolutions) {
  const std::pair<const char*, Shape> cases[] = {
      {"conv1d(2,3,k=3)", {2, 2, 7}},
      {"conv1d(3,2,k=2,s=2,p=1,d=2)", {2, 3, 8}},
      {"conv2d(2,4,k=3x2,s=2x1,p=1x0,groups=2)", {2, 2, 5, 4}},
      {"conv2d(2,3,k=2,p=same) | relu", {1, 2, 4, 3}},
      {"conv2d(3,3,k=3,p=1,groups=3,bias=false) | group_norm(1)", {1, 3, 4, 4}},
      {"conv3d(2,2,k=2,s=1x2x1,p=1)", {1, 2, 2, 3, 3}},
      {"conv3d(1,4,k=2) | hardswish | group_norm(2) | mean", {2, 1, 3, 3, 3}},
      {"conv_transpose1d(2,3,k=3,s=2,p=1,op=1)", {2, 2, 5}},
      {"conv_transpose2d(2,4,k=3,s=2x1,p=1x0,d=1x2,groups=2)", {1, 2, 3, 3}},
      {"conv_transpose2d(3,2,k=1,s=3) | gelu | group_norm(2)", {2, 3, 2, 2}},
      {"conv_transpose3d(2,4,k=3,s=2,p=1) | swish | group_norm(2) | hardswish", {1, 2, 2, 2, 2}},
  };
  uint64_t seed = 1000;
  for (const auto& [block, sizes] : cases) {
    const Differences differences = check_example(Example(Block::parse(block), sizes, seed++));
    EXPECT_GT(differences.checked, differences.corners * 20);
  }
}

// For a linear map <dy, A x> = <A^T dy, x>, and the same with the weights as the variable.
TEST(BackwardReference, ConvolutionsHaveTheirAdjoint) {
  const auto count = static_cast<uint64_t>(scaled(300));
  int64_t convolutions = 0;
  for (uint64_t seed = base_seed(); seed < base_seed() + count; ++seed) {
    const Problem problem = testing::random_problem(seed);
    if (problem.block.conv() == nullptr) continue;
    ++convolutions;
    SCOPED_TRACE(problem.text());
    Conv conv = *problem.block.conv();
    conv.bias = false;
    const Example example(Block({conv}), problem.input.sizes, seed);
    const double loss = example.loss();
    const reference::Gradients gradients = example.gradients();
    const double scale = 1e-12 * (1 + std::sqrt(dot(example.output_gradient, example.output_gradient) *
                                                dot(example.input, example.input)));
    EXPECT_NEAR(dot(gradients.input, example.input), loss, scale * 100);
    EXPECT_NEAR(dot(gradients.parameters[0], example.parameters[0]), loss, scale * 100);
  }
  EXPECT_GT(convolutions, 0);
}

// A norm's output changes neither with a shift nor, without eps, with the scale of its input: the gradient is
// orthogonal to both.
TEST(BackwardReference, NormGradientIsOrthogonalToShiftAndScale) {
  const Example example(Block::parse("group_norm(1,eps=0)"), {1, 3, 4, 5}, 77);
  const Vector gradient = example.gradients().input;
  EXPECT_NEAR(dot(gradient, Vector(gradient.size(), 1)), 0, 1e-12);
  EXPECT_NEAR(dot(gradient, example.input), 0, 1e-12);
}

struct Corner {
  const char* stage;
  double x;
  double derivative;
  double with_nan;  // gradient where the output's is NaN
};

// As PyTorch 2.11 gives them (autograd of torch.nn.functional, f32, tensors of one element).
TEST(BackwardReference, CornersAndInfinitiesAreThoseOfPyTorch) {
  const Corner corners[] = {
      {"relu", 0, 0, 0},
      {"relu", -1, 0, 0},
      {"relu", nan, 1, nan},
      {"relu", inf, 1, nan},
      {"relu6", 0, 0, 0},
      {"relu6", 6, 0, 0},
      {"relu6", 3, 1, nan},
      {"relu6", nan, 1, nan},
      {"leaky_relu(0.01)", 0, 0.01, nan},
      {"elu", 0, 1, nan},
      {"elu(2)", 0, 2, nan},
      {"elu", nan, 1, nan},
      {"elu", -inf, 0, nan},
      {"gelu", inf, nan, nan},
      {"gelu", -inf, nan, nan},
      {"gelu", 0, 0.5, nan},
      {"gelu_tanh", inf, nan, nan},
      {"gelu_tanh", -1e15, 0, nan},
      {"gelu_tanh", 1e15, 1, nan},
      {"swish", inf, nan, nan},
      {"swish", -inf, nan, nan},
      {"swish", 1e30, 1, nan},
      {"swish", -1e30, 0, nan},
      {"hardswish", -3, 0, 0},
      {"hardswish", 3, 1, nan},
      {"hardswish", inf, 1, nan},
      {"hardswish", -inf, 0, 0},
      {"hardswish", nan, 1, nan},
      {"hardsigmoid", -3, 0, 0},
      {"hardsigmoid", 3, 0, 0},
      {"hardsigmoid", nan, 0, 0},
      {"sigmoid", inf, 0, nan},
      {"sigmoid", -inf, 0, nan},
      {"tanh", inf, 0, nan},
      {"tanh", 0, 1, nan},
      {"mish", inf, nan, nan},
      {"mish", -inf, nan, nan},
      {"mish", -1e30, 0, nan},
      {"mish", 1e30, 1, nan},
      {"mish", 0, 0.6, nan},
      {"softplus", inf, 1, nan},
      {"softplus", -inf, 0, nan},
      {"softplus", 25, 1, nan},
      {"softplus", nan, nan, nan},
      {"clamp(-3,3)", -3, 1, nan},
      {"clamp(-3,3)", 3, 1, nan},
      {"clamp(-3,3)", 3.5, 0, 0},
      {"clamp(-3,3)", nan, 0, 0},
      {"clamp(-3,3)", inf, 0, 0},
      {"clamp(0,inf)", 0, 1, nan},
      {"clamp(0,inf)", -0.5, 0, 0},
      {"clamp(0,inf)", inf, 1, nan},
      {"clamp(0,inf)", nan, 0, 0},
      {"clamp(-inf,6)", 6, 1, nan},
      {"clamp(-inf,6)", 6.5, 0, 0},
      {"clamp(-inf,6)", -inf, 1, nan},
      {"clamp(2,-1)", 2, 0, 0},
      {"clamp(2,-1)", 0, 0, 0},
      {"clamp(1,1)", 1, 1, nan},
      {"hardtanh(-3,3)", -3, 0, 0},
      {"hardtanh(-3,3)", 3, 0, 0},
      {"hardtanh(-3,3)", 2.5, 1, nan},
      {"hardtanh(-3,3)", nan, 1, nan},
      {"hardtanh(-3,3)", inf, 0, 0},
      {"hardtanh(0,inf)", inf, 0, 0},
      {"hardtanh(1,1)", 1, 0, 0},
      {"mul(0)", 1, 0, nan},
  };
  const auto expect_same = [](double actual, double expected, const Corner& corner) {
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual)) << corner.stage << " at " << corner.x << " is " << actual;
    } else {
      EXPECT_NEAR(actual, expected, 1e-12) << corner.stage << " at " << corner.x;
    }
  };
  for (const Corner& corner : corners) {
    const auto gradient = [&](double g) {
      return reference::backward(Block::parse(corner.stage), {1, 1, 1}, Vector{corner.x}, {}, Vector{g})
          .input[0];
    };
    expect_same(gradient(1), corner.derivative, corner);
    expect_same(gradient(nan), corner.with_nan, corner);
  }
}

TEST(BackwardReference, EmptyBatchGivesZeroParameterGradients) {
  const Example example(Block::parse("conv2d(2,4) | prelu | group_norm(2) | mean"), {0, 2, 5, 5}, 5);
  const reference::Gradients gradients = example.gradients();
  for (const Vector& gradient : gradients.parameters)
    for (const double value : gradient) EXPECT_EQ(value, 0);
}

}  // namespace
}  // namespace onepass
