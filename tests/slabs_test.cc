// Tails of small slabs on the CPU: rows whose panels hold whole slabs, in both layouts and all types.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "onepass/executor.h"
#include "onepass/onepass.h"
#include "support/backward_harness.h"
#include "support/harness.h"

namespace onepass::testing {
namespace {

constexpr int thread_count = 3;
constexpr const char* forward_row = "tail_slabs";
constexpr const char* backward_row = "tail_backward_slabs";

// Rows of 1 to 40 elements, slabs of 1 to 4096. Widths of slabs that are and are no multiple of a vector,
// several panels a sample with a shorter last one, more samples than one chain of sums has.
constexpr const char* small_slabs[] = {
    "sigmoid | group_norm(24) | hardswish @ 5x384x3x2",
    "softplus | group_norm(40) | tanh @ 37x240x6",
    "relu6 | group_norm(32) | mean @ 4x128x25",
    "gelu | group_norm(17) | swish @ 19x272x2x2",
    "group_norm(64) | relu @ 3x128x3x4x3",
    "elu | group_norm(300) | sigmoid | mean @ 3x300x7",
    "group_norm(5) | mean @ 6x1020x4",
    "swish | group_norm(1) | mish @ 20x4096x1x1",
    "tanh | group_norm(7) | gelu | mean @ 33x91x1",
    "instance_norm | softplus @ 2x129x2x2",
    "instance_norm(affine=true) | elu | mean @ 2x700x3x3",
    "group_norm(3,affine=false) | gelu @ 3x1200x2",
    "leaky_relu | tanh @ 3x3000x5",
    "swish | mean @ 3x900x13",
    "prelu(per=channel) | group_norm(100) | channel_mul(per=sample) | residual_add @ 18x500x3",
    "residual_add | group_norm(10) | prelu @ 17x130x6x6",
    "channel_add(per=sample) | group_norm(2) | channel_mul | swish | mean @ 3x514x3x3",
    // Channels of many pixels that fill no vectors, slabs that L1 does not hold, many rows of channels last.
    "relu | group_norm(4) | hardswish @ 2x16x19x13",
    "group_norm(2) @ 1x4x4999",
    "hardswish | group_norm(1) | mean @ 1x3x4001",
    "group_norm(2) | mean @ 2x6x33x9",
    "prelu(per=channel) | group_norm(3) | channel_add | tanh @ 2x12x67",
    "group_norm(66,affine=false) | leaky_relu @ 2x66x23x11",
    "relu | group_norm(8) | residual_add | relu6 @ 1x128x17x23",
    // Fewer channels than a vector has lanes: rows of channels last are folded, with pixels left over.
    "prelu(per=channel) | group_norm(1) | channel_mul | residual_add | tanh @ 3x2x31x17",
    "residual_add | group_norm(5) | prelu(per=channel) | channel_add(per=sample) @ 2x5x397",
    "swish | group_norm(7) | channel_mul | mean @ 2x7x11x31",
    "instance_norm(affine=true) | softplus @ 4x8x13x17",
    "channel_add | group_norm(13) | gelu @ 2x13x265",
};

std::vector<std::string> problems() {
  std::vector<std::string> all;
  for (const char* const text : small_slabs) {
    for (const char* const type : {" f32", " bf16", " f16"}) {
      for (const char* const layout : {" nchw", " nhwc"}) all.push_back(std::string(text) + type + layout);
    }
  }
  return all;
}

TEST(SmallSlabs, AgreeWithTheReference) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1;
  for (const std::string& text : problems()) {
    const Problem problem = Problem::parse(text, Device::cpu(thread_count));
    for (const std::string& target : cpu_targets()) {
      for (const Distribution distribution : distributions) {
        if (problem.input.dtype != DType::f32 && distribution != Distribution::normal) continue;
        const Plan forward = plan(problem, {forward_row, target});
        const Outcome outcome = run_and_compare(forward, distribution, seed++, executor);
        EXPECT_TRUE(outcome.passed()) << target << ": " << text << "\n" << outcome.text();
      }
    }
  }
}

TEST(SmallSlabs, HaveTheGradientsOfTheReference) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1;
  GradientComparison total;
  for (const std::string& text : problems()) {
    const BackwardProblem problem(Problem::parse(text, Device::cpu(thread_count)));
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, seed++);
    for (const std::string& target : cpu_targets()) {
      const BackwardPlan backward = plan_backward(problem, {backward_row, target});
      const GradientComparison comparison = compare(problem, operands, run(backward, operands, executor));
      EXPECT_EQ(comparison.errors, "") << target << ": " << text;
      total += comparison;
    }
  }
  EXPECT_GT(total.checked, total.unchecked);
}

// Tensors of the other layout, with gaps, and a gradient that is one value: panels are gathered.
TEST(SmallSlabs, TakeTensorsOfAnyStrides) {
  ThreadExecutor executor(thread_count);
  for (const char* const layout : {" nchw", " nhwc"}) {
    const char* const other = layout[2] == 'c' ? " nhwc" : " nchw";
    const std::string text = "swish | group_norm(20) | residual_add | tanh @ 3x200x3x2";
    const Problem turned = Problem::parse(text + other, Device::cpu(thread_count));
    Problem problem = Problem::parse(text + layout, Device::cpu(thread_count));
    problem.output = turned.output;
    problem.parameters.back() = turned.parameters.back();
    BackwardProblem backward(problem);
    backward.output_gradient.strides.assign(4, 0);
    backward.input_gradient = turned.input;
    const Outcome outcome =
        run_and_compare(plan(problem, {forward_row, ""}), Distribution::normal, 3, executor);
    EXPECT_TRUE(outcome.passed()) << problem.text() << "\n" << outcome.text();
    const BackwardOperands operands = random_backward_operands(backward, Distribution::normal, 3);
    const BackwardOutcome gradients = run(plan_backward(backward, {backward_row, ""}), operands, executor);
    EXPECT_EQ(compare(backward, operands, gradients).errors, "") << backward.text();
  }
}

TEST(SmallSlabs, GiveTheSameBitsForAnyThreadCount) {
  for (const char* const text : small_slabs) {
    for (const char* const layout : {" nchw", " nhwc"}) {
      std::vector<double> first;
      GradientValues first_gradients;
      for (const int threads : {1, 2, 7}) {
        ThreadExecutor executor(threads);
        const BackwardProblem problem(Problem::parse(std::string(text) + layout, Device::cpu(threads)));
        const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 5);
        const Outcome outcome = run(plan(problem.forward, {forward_row, ""}), operands.forward, executor);
        const GradientValues gradients =
            run(plan_backward(problem, {backward_row, ""}), operands, executor).gradients;
        if (threads == 1) first = outcome.output;
        if (threads == 1) first_gradients = gradients;
        EXPECT_TRUE(same_bits(first, outcome.output)) << threads << " threads: " << text << layout;
        EXPECT_TRUE(same_bits(first_gradients, gradients)) << threads << " threads: " << text << layout;
      }
    }
  }
}

// Samples alone have the bits they have in a batch.
TEST(SmallSlabs, KeepASampleFromItsNeighbours) {
  SerialExecutor executor;
  const Shape shapes[] = {{5, 420, 3, 3}, {5, 60, 31, 17}};  // the second is cut by the batch
  for (int i = 0; i < 4; ++i) {
    const Layout layout = i % 2 == 0 ? Layout::nchw : Layout::nhwc;
    const Block block = Block::parse("gelu | group_norm(60) | swish");
    Shape shape = shapes[i / 2];
    const Problem all(block, shape, DType::f32, Device::cpu(), layout);
    shape[0] = 1;
    const Problem one(block, shape, DType::f32, Device::cpu(), layout);
    const Operands operands = random_operands(all, Distribution::normal, 7);
    const std::vector<double> together = run(plan(all, {forward_row, ""}), operands, executor).output;
    for (size_t n = 0; n < 5; ++n) {
      Operands sample = operands;
      const auto size = static_cast<std::ptrdiff_t>(operands.input.size() / 5);
      const auto at = static_cast<std::ptrdiff_t>(n) * size;
      sample.input.assign(operands.input.begin() + at, operands.input.begin() + at + size);
      const std::vector<double> alone = run(plan(one, {forward_row, ""}), sample, executor).output;
      EXPECT_TRUE(same_bits(alone, {together.begin() + at, together.begin() + at + size})) << "sample " << n;
    }
  }
}

std::string refusal_of(const std::string& text) {
  const Plan any = plan(Problem::parse(text));
  for (const Candidate& candidate : any.candidates()) {
    if (candidate.strategy == forward_row) return candidate.reason;
  }
  return "no such row";
}

TEST(SmallSlabs, AreLeftToOtherRowsWhereTheyAreNotSmall) {
  EXPECT_EQ(plan(Problem::parse("relu | group_norm(32) | relu @ 16x128x5x5")).strategy(), forward_row);
  EXPECT_EQ(plan(Problem::parse("relu | group_norm(32) | relu @ 16x128x5x5 nhwc")).strategy(), forward_row);
  // Nothing waits for a norm: the input is streamed in its order.
  EXPECT_EQ(plan(Problem::parse("relu | tanh @ 16x128x5x5 nhwc")).strategy(), "tail");
  EXPECT_EQ(refusal_of("group_norm(1) | relu @ 1x10x9999"), "slabs of more than 98304 elements");
  EXPECT_EQ(refusal_of("group_norm(2) | relu @ 1x8x9999"),
            "a sample has few slabs of more than 32768 elements");
  EXPECT_EQ(refusal_of("relu | mean @ 1x8x12289"), "slabs of more than 12288 elements");
  EXPECT_EQ(refusal_of("group_norm(32) | relu @ 1x32x43x60 nhwc"), "panels of more than 65536 elements");
  EXPECT_EQ(refusal_of("conv2d(3,4) @ 1x3x9x9"), "the block has a convolution");
}

}  // namespace
}  // namespace onepass::testing
