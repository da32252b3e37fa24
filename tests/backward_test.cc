// Backward plans against the reference: the tails of the list of cases, random tails, hard data, hostile
// memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <limits>

#include "block/convert.h"
#include "cpu_cases.h"
#include "onepass/executor.h"
#include "onepass/onepass.h"
#include "reference/backward.h"
#include "reference/tensor_access.h"
#include "support/backward_harness.h"
#include "support/guarded_memory.h"
#include "support/random_problem.h"
#include "support/settings.h"

namespace onepass::testing {
namespace {

constexpr int thread_count = 3;

BackwardProblem tail(std::string_view text) {
  return BackwardProblem(Problem::parse(text, Device::cpu(thread_count)));
}

// The list has problems that a GPU alone parses; their tails are a CPU's too.
Device some_gpu() { return Device::cuda_architecture("sm_90a"); }
std::vector<Problem> on_cpu(std::vector<Problem> problems) {
  for (Problem& problem : problems) problem.device = Device::cpu(thread_count);
  return problems;
}

// The rows that take the problem, but the reference.
std::vector<std::string> rows_of(const BackwardProblem& problem) {
  std::vector<std::string> rows;
  for (const Candidate& candidate : candidates(problem)) {
    if (candidate.reason.empty() && candidate.strategy != "reference_backward")
      rows.push_back(candidate.strategy);
  }
  return rows;
}

// On every target, by every row.
GradientComparison check(const BackwardProblem& problem, Distribution distribution, uint64_t seed,
                         Executor& executor) {
  GradientComparison total;
  const BackwardOperands operands = random_backward_operands(problem, distribution, seed);
  const std::vector<std::string> rows = rows_of(problem);
  EXPECT_FALSE(rows.empty()) << problem.text();
  for (const std::string& target : cpu_targets()) {
    for (const std::string& row : rows) {
      SCOPED_TRACE(target + " " + row + " " + std::string(name(distribution)) + " seed " +
                   std::to_string(seed) + ": " + problem.text());
      const BackwardPlan backward = plan_backward(problem, {row, target});
      const GradientComparison comparison = compare(problem, operands, run(backward, operands, executor));
      EXPECT_EQ(comparison.errors, "");
      total += comparison;
    }
  }
  return total;
}

TEST(TailBackward, AgreesWithTheReferenceOnEveryTailOfTheList) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1;
  int64_t tails = 0;
  for (const Problem& problem : on_cpu(tails_of_the_list(some_gpu()))) {
    ++tails;
    for (const Distribution distribution :
         {Distribution::uniform, Distribution::normal, Distribution::offset_100})
      check(BackwardProblem(problem), distribution, seed++, executor);
  }
  EXPECT_GT(tails, 50);
}

TEST(TailBackward, AgreesWithTheReferenceOnTheTailsOfConvolutions) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1000;
  const std::vector<Problem> tails = on_cpu(tails_of_convolutions(some_gpu()));
  for (const Problem& problem : tails)
    check(BackwardProblem(problem), Distribution::normal, seed++, executor);
  EXPECT_GT(tails.size(), 50u);
}

TEST(TailBackward, AgreesWithTheReferenceOnRandomTails) {
  ThreadExecutor executor(thread_count);
  const uint64_t first = base_seed();
  const int64_t count = scaled(3000);
  GradientComparison total;
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed) {
    const BackwardProblem problem = random_tail_backward(seed, Device::cpu(thread_count));
    total += check(problem, distributions[seed % std::size(distributions)], seed, executor);
    if (HasFailure()) break;
  }
  std::cout << total.checked << " elements checked, " << total.unchecked << " not\n";
  EXPECT_GT(total.checked, total.unchecked);
}

// More than one panel, block, task and wave, in both orientations.
TEST(TailBackward, AgreesWithTheReferenceOnLargeTails) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 5000;
  for (const char* const text : large_tails) check(tail(text), Distribution::normal, seed++, executor);
}

// Fewer channels than a vector has lanes: rows of channels last are folded.
TEST(TailBackward, AgreesWithTheReferenceOnFewChannels) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 7000;
  for (const char* const text : {
           "prelu(per=channel) | group_norm(1) | channel_mul | residual_add | tanh @ 2x2x231x117 nhwc",
           "residual_add | group_norm(5) | prelu(per=channel) | channel_add(per=sample) @ 3x5x29x397 nhwc",
           "swish | group_norm(7) | channel_mul | mean @ 1x7x111x131 bf16 nhwc",
           "channel_add | group_norm(4) | gelu @ 2x12x165x49 nhwc",
       }) {
    check(tail(text), Distribution::normal, seed++, executor);
  }
}

TEST(TailBackward, AgreesWithTheReferenceOnHardData) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 3000;
  for (const char* const text : hard_tails) {
    for (const Distribution distribution : distributions) check(tail(text), distribution, seed++, executor);
  }
}

// Every operation at its corners and beyond, with gradients that are and are not finite.
TEST(TailBackward, HasTheCornersOfTheReference) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> corners = corner_values();
  SerialExecutor executor;
  const Shape sizes{1, 1, static_cast<int64_t>(corners.size())};
  for (const Pointwise& pointwise : corner_stages()) {
    const BackwardProblem problem(Problem(Block({pointwise}), sizes));
    SCOPED_TRACE(problem.text());
    BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 1);
    operands.forward.input = corners;
    for (const double gradient : {1.0, -2.5, 0.0, infinity, nan}) {
      operands.output_gradient.assign(corners.size(), gradient);
      const BackwardOutcome outcome = run(plan_backward(problem), operands, executor);
      EXPECT_EQ(compare(problem, operands, outcome).errors, "");
    }
  }
}

// An f32 element that is 0.1 rounded is at a limit of 0.1, which as a double is below it.
TEST(TailBackward, LimitsAreRoundedAsElementsAre) {
  SerialExecutor executor;
  for (const char* const strategy : {"reference_backward", "tail_backward", "tail_backward_slabs"}) {
    for (const char* const text : {"clamp(-1,0.1) @ 1x1x2", "hardtanh(-1,0.7) @ 1x1x2"}) {
      const BackwardProblem problem(Problem::parse(text));
      BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 1);
      const bool is_clamp = text[0] == 'c';
      const float limit = is_clamp ? 0.1f : 0.7f;  // 0.7f is below 0.7
      operands.forward.input = {limit, std::nextafter(limit, 0.0f)};
      operands.output_gradient = {2, 2};
      const BackwardOutcome outcome = run(plan_backward(problem, {strategy, ""}), operands, executor);
      EXPECT_EQ(outcome.gradients[0], (std::vector<double>{is_clamp ? 2.0 : 0.0, 2.0})) << strategy << text;
    }
  }
}

// With a mean of 10,000 standard deviations the gradients are as good as the statistics allow, not lost.
TEST(TailBackward, LargeMeansKeepTheirGradients) {
  ThreadExecutor executor(thread_count);
  GradientComparison total;
  for (const char* const text : {"group_norm(2) | swish @ 2x4x30x31", "group_norm(4) @ 2x8x50x51 nhwc"}) {
    total += check(tail(text), Distribution::offset_10000, 9, executor);
  }
  EXPECT_GT(total.checked, 0);
  EXPECT_EQ(total.unchecked, 0);
}

TEST(TailBackward, ComputesAnySubsetOfTheGradients) {
  ThreadExecutor executor(thread_count);
  for (const char* const text :
       {"prelu(per=channel) | group_norm(2) | channel_mul(per=sample) | residual_add @ 3x6x5x7",
        "residual_add | group_norm(3) | swish | prelu @ 3x6x5x7 bf16 nhwc",
        "residual_add | group_norm(3) | swish | prelu(per=channel) @ 3x3x9x11 nhwc",
        "channel_add | tanh | residual_add | prelu @ 2x6x11", "group_norm(2) | prelu | mean @ 2x6x11"}) {
    BackwardProblem problem = tail(text);
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 4);
    for (const char* const row : {"tail_backward", "tail_backward_slabs"}) {
      problem.wanted.assign(problem.wanted.size(), true);
      const GradientValues all = run(plan_backward(problem, {row, ""}), operands, executor).gradients;
      for (unsigned subset = 0; subset < 1u << problem.wanted.size(); ++subset) {
        for (size_t i = 0; i < problem.wanted.size(); ++i) problem.wanted[i] = (subset >> i & 1u) != 0;
        SCOPED_TRACE(row + (" " + problem.text()));
        const BackwardOutcome outcome = run(plan_backward(problem, {row, ""}), operands, executor);
        EXPECT_EQ(compare(problem, operands, outcome).errors, "");
        for (size_t i = 1; i < problem.wanted.size(); ++i) {
          EXPECT_TRUE(!problem.wanted[i] || outcome.gradients[i] == all[i]) << "other bits when alone";
        }
      }
    }
  }
}

std::string refusal_of(const BackwardProblem& problem, const std::string& strategy) {
  const BackwardPlan any = plan_backward(problem);
  for (const Candidate& candidate : any.candidates()) {
    if (candidate.strategy == strategy) return candidate.reason;
  }
  return "unknown";
}

TEST(ConvBackward, AgreesWithTheReferenceOnTheConvolutionsOfTheList) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1;
  int64_t convolutions = 0;
  for (const std::string& text : cpu_cases()) {
    const Problem whole = Problem::parse(text, Device::cpu(thread_count));
    if (whole.block.conv() == nullptr || whole.input.dtype == DType::f64) continue;
    const Layout layout = whole.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
    const BackwardProblem problem(
        Problem(Block({*whole.block.conv()}), whole.input.sizes, whole.input.dtype, whole.device, layout));
    if (!refusal_of(problem, "conv_backward").empty()) continue;
    ++convolutions;
    for (const Distribution distribution : {Distribution::normal, Distribution::offset_100})
      check(problem, distribution, seed++, executor);
  }
  EXPECT_GT(convolutions, 150);
}

TEST(ConvBackward, AgreesWithTheReferenceOnRandomConvolutions) {
  ThreadExecutor executor(thread_count);
  const uint64_t first = base_seed();
  int64_t refused = 0;
  const int64_t count = scaled(2000);
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count) && !HasFailure(); ++seed) {
    BackwardProblem problem = random_conv_backward(seed, Device::cpu(thread_count));
    // Uneven padding and the like: the input's gradient is no convolution, the others are as ever.
    if (!refusal_of(problem, "conv_backward").empty()) {
      ++refused;
      problem.wanted[0] = false;
    }
    const Distribution distribution = seed % 2 == 0 ? Distribution::normal : Distribution::uniform;
    check(problem, distribution, seed, executor);
  }
  EXPECT_LT(refused, count / 4);
}

// More than one segment, window, part and block of positions; slots that are used again; phases and gaps.
TEST(ConvBackward, AgreesWithTheReferenceOnLargerConvolutions) {
  ThreadExecutor executor(thread_count);
  const char* const texts[] = {
      "conv2d(3,16,k=3,p=1) @ 2x3x70x67",
      "conv2d(40,24,k=1) @ 2x40x31x33",
      "conv2d(150,140,k=1,s=2) @ 1x150x9x11",
      "conv2d(20,33,k=3,p=1) @ 1x20x19x23 nhwc",
      "conv2d(2,70,k=5,s=2,p=2,d=2) @ 2x2x40x41",
      "conv3d(3,16,k=4) @ 3x3x9x17x18",
      "conv3d(2,5,k=3x2x1,s=3x1x2,p=1,d=2x1x1) @ 2x2x17x12x13",
      "conv3d(4,4,k=2,d=3x2x1) @ 1x4x13x11x40",
      "conv_transpose2d(17,18,k=3) @ 1x17x20x21",
      "conv_transpose3d(3,16,k=3,s=2,p=1) @ 2x3x5x9x10",
      "conv1d(3,4,k=7,p=3) @ 2x3x3000",
      "conv1d(1,1,k=3,s=5) @ 1x1x4001",
      "conv_transpose1d(5,6,k=4,s=2,p=1,op=1) @ 3x5x700 bf16",
      "conv2d(24,24,k=3,p=1,groups=24) @ 2x24x30x29",
      "conv2d(12,24,k=3,p=1,groups=4,bias=false) @ 2x12x30x29 f16",
      "conv2d(3,8,k=3,p=1) @ 0x3x9x9",
  };
  uint64_t seed = 6000;
  for (const char* const text : texts) check(tail(text), Distribution::normal, seed++, executor);
}

// Segments that begin inside a group, several blocks and parts, columns beyond one chain, stages of 16 bits.
constexpr const char* grouped_convolutions[] = {
    "conv2d(70,70,k=3,p=1,groups=70) @ 2x70x30x29 nhwc",
    "conv2d(37,37,k=5,p=2,s=2,groups=37) @ 3x37x23x10 nhwc",
    "conv2d(20,20,k=7,p=3,groups=20) @ 2x20x13x9 bf16 nhwc",
    "conv2d(12,24,k=3,p=1,groups=4,bias=false) @ 2x12x30x29 nhwc",
    "conv2d(24,36,k=2,d=2,groups=12) @ 2x24x9x11 f16 nhwc",
    "conv2d(36,24,k=3,groups=12) @ 2x36x9x11 nhwc",
    "conv2d(40,40,k=1,groups=40) @ 2x40x17x15 nhwc",
    "conv1d(33,33,k=4,groups=33) @ 3x33x2900 nhwc",
    "conv1d(5,10,k=3,s=5,p=2,groups=5) @ 2x5x41 nhwc",
    "conv3d(20,20,k=3,p=1,groups=20) @ 2x20x5x16x14 nhwc",
    "conv3d(6,6,k=2x3x1,s=3x1x2,p=1x1x0,groups=6) @ 2x6x7x12x13 nhwc",
    "conv_transpose2d(33,33,k=3,p=1,groups=33) @ 2x33x7x9 nhwc",
    "conv_transpose2d(12,24,k=4,s=2,p=1,groups=6) @ 2x12x7x9 nhwc",
    "conv_transpose2d(24,12,k=3,s=2,groups=6) @ 2x24x7x9 nhwc",
};

TEST(ConvBackward, AgreesWithTheReferenceOnGroupsOfFewChannels) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 7000;
  for (const char* const text : grouped_convolutions) {
    const BackwardProblem problem = tail(text);
    EXPECT_EQ(refusal_of(problem, "conv_backward_groups"), "") << text;
    check(problem, Distribution::normal, seed++, executor);
  }
}

TEST(ConvBackward, ComputesAnySubsetOfTheGradients) {
  ThreadExecutor executor(thread_count);
  BackwardProblem problem = tail("conv_transpose2d(5,6,k=3,s=2,p=1) @ 2x5x9x8");
  const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 4);
  const GradientValues all = run(plan_backward(problem), operands, executor).gradients;
  for (unsigned subset = 0; subset < 8; ++subset) {
    for (size_t i = 0; i < 3; ++i) problem.wanted[i] = (subset >> i & 1u) != 0;
    const BackwardOutcome outcome = run(plan_backward(problem, {"conv_backward", ""}), operands, executor);
    EXPECT_EQ(outcome.damage, "");
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(!problem.wanted[i] || outcome.gradients[i] == all[i]) << "other bits when alone";
  }
}

// An infinite input is met by the taps that reach it and by no other.
TEST(ConvBackward, InfinitiesStayWithTheirTaps) {
  SerialExecutor executor;
  const BackwardProblem problem(Problem::parse("conv2d(1,4,k=3) @ 1x1x9x11"));
  BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 1);
  operands.forward.input[0] = std::numeric_limits<double>::infinity();  // only the first tap meets the corner
  const GradientValues gradients =
      run(plan_backward(problem, {"conv_backward", ""}), operands, executor).gradients;
  for (size_t i = 0; i < gradients[1].size(); ++i)
    EXPECT_EQ(std::isfinite(gradients[1][i]), i % 9 != 0) << "weight " << i;
}

TEST(ConvBackward, SaysWhatItRefuses) {
  EXPECT_EQ(plan_backward(tail("conv2d(3,4) @ 2x3x9x9")).strategy(), "conv_backward");
  const std::string explained = plan_backward(tail("conv2d(3,4) @ 2x3x9x9")).explain();
  EXPECT_NE(explained.find("input gradient: conv_transpose2d(4,3,"), std::string::npos) << explained;
  EXPECT_NE(explained.find("weight gradient: segments"), std::string::npos) << explained;
  EXPECT_EQ(refusal_of(tail("conv2d(3,4) | relu @ 2x3x9x9"), "conv_backward"),
            "the block is more than a convolution");
  EXPECT_EQ(refusal_of(tail("conv2d(3,4) @ 2x3x9x9 f64"), "conv_backward"),
            "f64 is computed by the reference alone");
  EXPECT_NE(refusal_of(tail("conv2d(3,4,k=2,p=same) @ 2x3x9x9"), "conv_backward").find("uneven"),
            std::string::npos);
}

void check_bits(const std::function<BackwardProblem(Device)>& make_problem, uint64_t seed) {
  for (const std::string& row : rows_of(make_problem(Device::cpu(1)))) {
    GradientValues first;
    for (const int threads : {1, 2, 3, 7}) {
      const BackwardProblem problem = make_problem(Device::cpu(threads));
      ThreadExecutor executor(threads);
      const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, seed);
      GradientValues gradients = run(plan_backward(problem, {row, ""}), operands, executor).gradients;
      if (threads == 1) first = gradients;
      EXPECT_TRUE(same_bits(first, gradients)) << row << ", " << threads << " threads: " << problem.text();
    }
  }
}

TEST(ConvBackward, GivesTheSameBitsForAnyThreadCount) {
  for (uint64_t seed = 900; seed < 900 + static_cast<uint64_t>(scaled(50)); ++seed)
    check_bits([&](Device device) { return random_conv_backward(seed, device); }, seed);
  for (const char* const text : {"conv2d(16,40,k=3,p=1) @ 4x16x45x47", "conv3d(3,16,k=4) @ 3x3x9x17x18"})
    check_bits([&](Device device) { return BackwardProblem(Problem::parse(text, device)); }, 3);
  for (const char* const text : grouped_convolutions)
    check_bits([&](Device device) { return BackwardProblem(Problem::parse(text, device)); }, 4);
}

// The gradients with the input's written over the input.
GradientValues run_over_input(const BackwardPlan& backward, const BackwardOperands& operands,
                              Executor& executor) {
  const BackwardProblem& problem = backward.problem();
  BackwardMemory memory(problem, operands, executor);
  const Plan forward = plan(problem.forward);
  GuardedMemory workspace(std::max(forward.workspace_bytes(), backward.workspace_bytes()), 0);
  forward.run(memory.forward_arguments(), workspace.data(), executor);
  BackwardArguments arguments = memory.backward_arguments();
  arguments.input_gradient = const_cast<void*>(arguments.input);
  backward.run(arguments, workspace.data(), executor);
  GradientValues gradients = memory.outcome().gradients;
  gradients[0] = load_tensor(problem.input_gradient, arguments.input_gradient);
  return gradients;
}

TEST(TailBackward, GivesTheSameBitsOverItsInput) {
  ThreadExecutor executor(thread_count);
  int64_t overwritten = 0;
  const auto check_over_input = [&](const BackwardProblem& problem, uint64_t seed) {
    for (const std::string& row : rows_of(problem)) {
      const BackwardPlan backward = plan_backward(problem, {row, ""});
      if (!problem.wants_input() || !backward.may_overwrite_input()) continue;
      ++overwritten;
      const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, seed);
      EXPECT_TRUE(same_bits(run(backward, operands, executor).gradients,
                            run_over_input(backward, operands, executor)))
          << row << " seed " << seed << ": " << problem.text();
    }
  };
  const uint64_t first = base_seed();
  const int64_t count = scaled(600);
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed)
    check_over_input(random_tail_backward(seed, Device::cpu(thread_count)), seed);
  EXPECT_GT(overwritten, count / 20);
  for (const char* const text : large_tails) check_over_input(tail(text), 1);
}

TEST(TailBackward, GivesTheSameBitsForAnyThreadCount) {
  for (uint64_t seed = 700; seed < 700 + static_cast<uint64_t>(scaled(100)); ++seed)
    check_bits([&](Device device) { return random_tail_backward(seed, device); }, seed);
  for (const char* const text : {"prelu | group_norm(4) | channel_mul | swish @ 4x16x91x93",
                                 "prelu | group_norm(4) | channel_mul | swish @ 4x16x91x93 nhwc"})
    check_bits([&](Device device) { return BackwardProblem(Problem::parse(text, device)); }, 3);
}

// The reference as a strategy: convolutions, f64 and strided memory.
TEST(ReferenceBackward, RunsEveryBlock) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1;
  for (const char* const text :
       {"conv2d(3,8,k=3,p=1) | relu | group_norm(2) @ 2x3x5x6",
        "conv_transpose2d(4,6,k=3,s=2,groups=2) @ 2x4x3x4 f64",
        "conv3d(2,4,k=2) | prelu | group_norm(2) | residual_add | mean @ 2x2x3x3x3 bf16 nhwc",
        "swish | group_norm(2) | prelu @ 2x4x9 f64"}) {
    BackwardProblem problem = tail(text);
    problem.wanted.back() = seed % 2 == 0;
    SCOPED_TRACE(problem.text());
    const BackwardPlan backward = plan_backward(problem);
    EXPECT_EQ(backward.strategy(), "reference_backward");
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, seed++);
    const BackwardOutcome outcome = run(backward, operands, executor);
    EXPECT_EQ(outcome.damage, "");
    const reference::Gradients expected =
        reference::backward(problem.forward.block, problem.forward.input.sizes, operands.forward.input,
                            operands.forward.parameters, operands.output_gradient);
    const auto expect_rounded = [](const TensorSpec& spec, const std::vector<double>& actual,
                                   const std::vector<double>& values) {
      ASSERT_EQ(actual.size(), values.size());
      for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(actual[i], round_to(spec.dtype, values[i]));
    };
    expect_rounded(problem.input_gradient, outcome.gradients[0], expected.input);
    for (size_t i = 0; i < expected.parameters.size(); ++i) {
      if (!problem.wants_parameter(i)) continue;
      expect_rounded(problem.parameter_gradients[i], outcome.gradients[i + 1], expected.parameters[i]);
    }
  }
}

TEST(BackwardPlan, ChoosesTheTailAndSaysWhatItSaves) {
  const BackwardPlan norm = plan_backward(tail("swish | group_norm(1) | gelu @ 2x4x150x150"));
  EXPECT_EQ(norm.strategy(), "tail_backward");
  EXPECT_TRUE(norm.reads_statistics());
  EXPECT_NE(norm.explain().find("waits in the input's gradient"), std::string::npos) << norm.explain();
  const BackwardPlan pointwise = plan_backward(tail("swish @ 2x16x9x9"));
  EXPECT_FALSE(pointwise.reads_statistics());
  EXPECT_NE(pointwise.explain().find("saved by forward: nothing"), std::string::npos) << pointwise.explain();
  EXPECT_EQ(plan_backward(tail("conv2d(3,4) | relu @ 2x3x9x9")).strategy(), "reference_backward");
}

template <class F>
void expect_error(F&& f, const std::string& part) {
  try {
    f();
    ADD_FAILURE() << "no error with " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(BackwardPlan, RefusesWhatDoesNotFit) {
  const BackwardProblem good(Problem::parse("group_norm(2) | relu @ 2x4x5x5"));
  BackwardProblem problem = good;
  problem.output_gradient.sizes[2] = 6;
  expect_error([&] { plan_backward(problem); }, "output_gradient: the sizes are 2x4x6x5, must be 2x4x5x5");
  problem = good;
  problem.input_gradient.strides[3] = 0;
  expect_error([&] { plan_backward(problem); }, "overlap");
  problem.wanted[0] = false;
  EXPECT_NO_THROW(plan_backward(problem));
  problem = good;
  problem.wanted.pop_back();
  expect_error([&] { plan_backward(problem); }, "entries of wanted");
  expect_error(
      [&] {
        plan_backward(good, {"tail", ""});
      },
      "must be one of conv_backward, conv_backward_groups, tail_backward_slabs, tail_backward, "
      "reference_backward");
  expect_error(
      [&] {
        plan_backward(tail("conv2d(3,4) @ 1x3x9x9"), {"tail_backward", ""});
      },
      "the block has a convolution");

  SerialExecutor executor;
  const BackwardOperands operands = random_backward_operands(good, Distribution::normal, 1);
  BackwardMemory memory(good, operands, executor);
  const BackwardPlan backward = plan_backward(good);
  GuardedMemory workspace(backward.workspace_bytes(), 0);
  const auto run_with = [&](auto&& change) {
    BackwardArguments arguments = memory.backward_arguments();
    change(arguments);
    backward.run(arguments, workspace.data(), executor);
  };
  expect_error([&] { run_with([](BackwardArguments& a) { a.statistics = nullptr; }); }, "statistics");
  expect_error([&] { run_with([](BackwardArguments& a) { a.input_gradient = nullptr; }); }, "input_gradient");
  expect_error([&] { run_with([](BackwardArguments& a) { a.parameter_gradients[0] = nullptr; }); }, "wanted");
  expect_error([&] { run_with([](BackwardArguments& a) { a.parameter_gradients.pop_back(); }); },
               "gradients");
  expect_error([&] { run_with([](BackwardArguments& a) { a.parameters.pop_back(); }); }, "parameters");

  const BackwardPlan keeps = plan_backward(tail("swish | group_norm(2) @ 2x4x5x5"), {"tail_backward", ""});
  EXPECT_FALSE(keeps.may_overwrite_input());
  expect_error([&] { run_over_input(keeps, operands, executor); }, "reads again");
}

// A gradient with one term missing, or in half precision, is outside the tolerance.
TEST(GradientBound, CatchesWrongGradients) {
  const BackwardProblem problem(Problem::parse("swish | group_norm(2) | prelu | channel_mul @ 2x4x9x9"));
  const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 3);
  const ExpectedGradients expected = expected_gradients(
      problem, operands.forward.input, operands.forward.parameters, operands.output_gradient);
  const auto rejected = [](const Expected& e, auto&& change) {
    int64_t count = 0;
    for (size_t i = 0; i < e.values.size(); ++i)
      count += is_acceptable(DType::f32, change(e.values[i]), e.values[i], e.bounds[i]) ? 0 : 1;
    return count;
  };
  const auto size = static_cast<int64_t>(expected.input.values.size());
  EXPECT_EQ(rejected(expected.input, [](double v) { return v; }), 0);
  EXPECT_EQ(rejected(expected.input, [](double v) { return v + 1e-3; }), size);
  EXPECT_GT(rejected(expected.input, [](double v) { return round_to(DType::f16, v); }), size / 2);
  for (const Expected& e : expected.parameters) {
    EXPECT_EQ(rejected(e, [](double v) { return v * (1 + 1e-3) + 1e-3; }),
              static_cast<int64_t>(e.values.size()));
  }
}

}  // namespace
}  // namespace onepass::testing
