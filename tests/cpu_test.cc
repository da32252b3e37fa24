// Every strategy on every SIMD target against the reference: the list of cases, random problems, hard data.
#include <gtest/gtest.h>

#include <array>
#include <initializer_list>
#include <iostream>
#include <random>
#include <sstream>

#include "cpu/targets.h"  // before Highway

#include <hwy/highway.h>

#include "cpu/supported_targets.h"
#include "cpu_cases.h"
#include "onepass/executor.h"
#include "onepass/onepass.h"
#include "support/harness.h"
#include "support/random_problem.h"
#include "support/settings.h"

namespace onepass::testing {
namespace {

constexpr int thread_count = 3;

// Runs the problem on every target with every strategy that takes it, but the reference.
template <class F>
void for_each_plan(const Problem& problem, F&& f) {
  for (const std::string& target : cpu_targets()) {
    const Plan best = plan(problem, {"", target});
    for (const Candidate& candidate : best.candidates()) {
      if (!candidate.reason.empty() || candidate.strategy == "reference") continue;
      SCOPED_TRACE(target + " " + candidate.strategy + ": " + problem.text());
      f(plan(problem, {candidate.strategy, target}));
    }
  }
}

// So that a report says which targets a machine went through.
void record_targets() {
  std::string names;
  for (const std::string& target : cpu_targets()) names += (names.empty() ? "" : " ") + target;
  ::testing::Test::RecordProperty("targets", names);
}

TEST(SupportedTargets, AreThoseThatHighwayFinds) {
  std::vector<int64_t> expected = hwy::SupportedAndGeneratedTargets();
  std::erase_if(expected, [](int64_t target) { return target == HWY_EMU128 || target == HWY_SCALAR; });
  EXPECT_EQ(cpu::supported_targets(), expected);
}

TEST(CpuStrategies, AgreeWithTheReferenceOnEveryCase) {
  record_targets();
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1;
  for (const std::string& text : cpu_cases()) {
    const Problem problem = Problem::parse(text, Device::cpu(thread_count));
    for (const Distribution distribution : {Distribution::uniform, Distribution::normal}) {
      for_each_plan(problem, [&](const Plan& p) {
        const Outcome outcome = run_and_compare(p, distribution, seed, executor);
        EXPECT_TRUE(outcome.passed()) << name(distribution) << " seed " << seed << "\n" << outcome.text();
      });
      ++seed;
    }
  }
}

TEST(CpuStrategies, AgreeWithTheReferenceOnHardData) {
  ThreadExecutor executor(thread_count);
  uint64_t seed = 1000;
  for (const char* const text : hard_blocks) {
    const Problem problem = Problem::parse(text, Device::cpu(thread_count));
    for (const Distribution distribution : distributions) {
      for_each_plan(problem, [&](const Plan& p) {
        const Outcome outcome = run_and_compare(p, distribution, seed, executor);
        EXPECT_TRUE(outcome.passed()) << name(distribution) << " seed " << seed << "\n" << outcome.text();
      });
      ++seed;
    }
  }
}

TEST(CpuStrategies, AgreeWithTheReferenceOnRandomProblems) {
  record_targets();
  ThreadExecutor executor(thread_count);
  const uint64_t first = base_seed();
  const int64_t count = scaled(3000);
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(count) - 1 << '\n';
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed) {
    const Problem problem = random_problem(seed, Device::cpu(thread_count));
    const Distribution distribution = distributions[seed % std::size(distributions)];
    for_each_plan(problem, [&](const Plan& p) {
      const Outcome outcome = run_and_compare(p, distribution, seed, executor);
      EXPECT_TRUE(outcome.passed()) << name(distribution) << " seed " << seed << "\n" << outcome.text();
    });
    if (HasFailure()) break;
  }
}

TEST(CpuStrategies, GiveTheSameBitsForAnyThreadCount) {
  for (uint64_t seed = 500; seed < 500 + static_cast<uint64_t>(scaled(100)); ++seed) {
    std::vector<double> first;
    for (const int threads : {1, 2, 3, 7}) {
      const Problem problem = random_problem(seed, Device::cpu(threads));
      ThreadExecutor executor(threads);
      const Operands operands = random_operands(problem, Distribution::normal, seed);
      const Outcome outcome = run_and_compare(plan(problem), operands, executor);
      if (threads == 1) first = outcome.output;
      EXPECT_TRUE(same_bits(first, outcome.output)) << threads << " threads: " << problem.text();
    }
  }
}

// Samples whose mean jumps, grows or vanishes between the panels of a block: sums of squares around 0 would
// lose the variance. Four channels of a convolution make a panel of two rows, a block of six.
TEST(CpuStrategies, KeepAVarianceWhoseMeanMovesAlongARow) {
  const Problem problem = Problem::parse("conv2d(1,4,k=1x3,bias=false) | instance_norm @ 4x1x100x1000",
                                         Device::cpu(thread_count));
  ThreadExecutor executor(thread_count);
  Operands operands = random_operands(problem, Distribution::normal, 11);
  const size_t pixels = operands.input.size() / 4;
  for (size_t p = 0; p < pixels; ++p) {
    operands.input[p] += p / 2500 % 2 == 0 ? 0 : 1000;
    operands.input[pixels + p] += static_cast<double>(p) / 50;
    operands.input[2 * pixels + p] += 3000;
    operands.input[3 * pixels + p] = p % 6250 < 2500 ? operands.input[3 * pixels + p] : 77;
  }
  for_each_plan(problem, [&](const Plan& p) {
    const Outcome outcome = run_and_compare(p, operands, executor);
    EXPECT_TRUE(outcome.passed()) << outcome.text();
  });
}

// Sums that are all near 0, near 0 but for a few along a row of a panel, within 12, and beyond: an activation
// has a form for each.
TEST(CpuStrategies, ActivateSumsOfAnyMagnitude) {
  const char* const blocks[] = {
      "conv2d(1,4,k=1,bias=false) | swish | instance_norm @ 6x1x70x61",
      "conv2d(1,4,k=1,bias=false) | swish | instance_norm @ 6x1x70x61 nhwc",
      "conv2d(1,4,k=1) | sigmoid | group_norm(2) | relu @ 6x1x70x61",
      "conv2d(1,4,k=1) | swish | leaky_relu | group_norm(2) @ 6x1x70x61",
      "conv2d(1,3,k=1) | swish @ 6x1x70x61",
      "conv2d(1,3,k=1) | swish | mean @ 6x1x70x61",
  };
  ThreadExecutor executor(thread_count);
  for (const char* const text : blocks) {
    const Problem problem = Problem::parse(text, Device::cpu(thread_count));
    Operands operands = random_operands(problem, Distribution::uniform, 12);
    for (double& weight : operands.parameters[0]) weight = weight < 0 ? -1 : 1;
    const size_t pixels = operands.input.size() / 6;
    for (size_t p = 0; p < pixels; ++p) {
      operands.input[p] *= 0.25;
      operands.input[2 * pixels + p] *= p % 1001 == 500 ? 9 : 1.5;
      operands.input[3 * pixels + p] *= 11;
      operands.input[4 * pixels + p] *= 60;
      operands.input[5 * pixels + p] *= 300;
    }
    for_each_plan(problem, [&](const Plan& p) {
      const Outcome outcome = run_and_compare(p, operands, executor);
      EXPECT_TRUE(outcome.passed()) << outcome.text();
    });
  }
}

// Norms that leave all values above where hardswish is cut off, some below, or turn them over. What goes in
// has a lower end, far from the mean where sums are large and one in a thousand is not.
TEST(CpuStrategies, CutHardswishOffWhereverTheNormPutsIt) {
  const char* const blocks[] = {
      "conv2d(1,4,k=1) | swish | group_norm(2) | hardswish @ 4x1x70x61",
      "conv2d(1,4,k=1) | swish | group_norm(2) | hardswish @ 4x1x70x61 nhwc",
      "conv2d(1,4,k=1) | relu | group_norm(4) | hardswish @ 4x1x70x61",
      "swish | group_norm(2) | hardswish @ 4x4x70x61",
      "clamp(-1,2) | instance_norm(affine=true) | hardswish | mean @ 4x4x70x61",
  };
  ThreadExecutor executor(thread_count);
  for (const char* const text : blocks) {
    const Problem problem = Problem::parse(text, Device::cpu(thread_count));
    Operands operands = random_operands(problem, Distribution::normal, 13);
    const size_t samples = operands.input.size() / 4;
    for (size_t i = 0; i < samples; ++i) {
      if (i % 1000 != 7) operands.input[samples + i] += 20;
      operands.input[2 * samples + i] *= 30;
    }
    std::vector<double>& weight = operands.parameters.end()[-2];
    std::vector<double>& bias = operands.parameters.end()[-1];
    weight = {1, -2, 1, 30};
    bias = {0, 0.5, -2.5, 3};
    for_each_plan(problem, [&](const Plan& p) {
      const Outcome outcome = run_and_compare(p, operands, executor);
      EXPECT_TRUE(outcome.passed()) << outcome.text();
    });
  }
}

// Every row agrees with the reference and gives the same bits on any number of threads; this one is among
// them.
void expect_agreement(std::span<const char* const> blocks, std::string_view strategy, uint64_t seed) {
  for (const char* const text : blocks) {
    std::vector<std::vector<double>> first;  // of each plan, on one thread
    for (const int threads : {1, thread_count}) {
      const Problem problem = Problem::parse(text, Device::cpu(threads));
      ThreadExecutor executor(threads);
      const Operands operands = random_operands(problem, Distribution::normal, seed);
      bool found = false;
      size_t index = 0;
      for_each_plan(problem, [&](const Plan& p) {
        const Outcome outcome = run_and_compare(p, operands, executor);
        EXPECT_TRUE(outcome.passed()) << outcome.text();
        found |= p.strategy() == strategy;
        if (threads == 1) first.push_back(outcome.output);
        EXPECT_TRUE(same_bits(first.at(index++), outcome.output)) << threads << " threads";
      });
      EXPECT_TRUE(found) << text;
    }
    ++seed;
  }
}

// Samples share tasks, sums have several chunks of terms, and windows have borders, strides and dilations.
TEST(CpuStrategies, AgreeWithTheReferenceOnFewPixels) {
  const char* const blocks[] = {
      "conv2d(40,20,k=3,s=2,p=1) | swish | group_norm(5) | relu @ 7x40x5x4",
      "conv2d(40,20,k=3,s=2,p=1) | swish | group_norm(5) | relu @ 7x40x5x4 nhwc",
      "conv2d(130,9,k=3) | gelu | group_norm(3) | mean @ 37x130x4x3 nhwc",
      "conv2d(130,9,k=3,d=2) | gelu | instance_norm @ 3x130x7x6 bf16",
      "conv2d(130,9,k=3) | gelu | group_norm(1) | softplus @ 3x130x4x3 bf16 nhwc",
      "conv1d(300,33,k=5,p=2) | group_norm(33) | mean @ 9x300x7",
      "conv1d(64,300,k=4,p=same) | relu @ 1x64x2 f16",
      "conv3d(17,24,k=2,s=2,p=1) | swish | group_norm(4) | relu @ 5x17x3x2x4",
      "conv3d(17,24,k=2,s=2,p=1) | swish | group_norm(4) | relu @ 5x17x3x2x4 nhwc",
      "conv2d(1100,6,k=1,s=2) | hardswish @ 5x1100x3x4 nhwc",
      "conv2d(24,36,k=3,groups=3,p=1) | group_norm(6) | tanh @ 4x24x2x3",
      "conv2d(24,12,k=1,p=1) | relu @ 4x24x2x3",
      "conv2d(24,12,k=1,s=2) | relu @ 3x24x9x17",
      "conv2d(520,6,k=2,s=2,p=1) | relu | group_norm(3) @ 3x520x5x7 nhwc",
      "conv2d(12,8,k=3,d=2,p=2,groups=4) | swish @ 5x12x6x7 nhwc",
      "conv1d(9,5,k=7,p=3) | tanh @ 5x9x3 nhwc",
      "conv2d(37,5,k=1,s=3,p=1) | swish | group_norm(5) @ 2x37x11x14 bf16",
  };
  expect_agreement(blocks, "conv_term_lanes", 31);
}

// Positions of channels last are multiplied in place: samples together, blocks of one, segments of slabs.
TEST(CpuStrategies, AgreeWithTheReferenceOnPositionsInPlace) {
  const char* const blocks[] = {
      "conv2d(24,12,k=1) | relu @ 5x24x2x3 nhwc",
      "conv2d(1100,7,k=1) | swish | group_norm(7) | relu @ 2x1100x13x29 nhwc",
      "conv2d(12,9,k=1,groups=3) | gelu | group_norm(3) | mean @ 3x12x21x23 nhwc",
      "conv2d(3,68,k=1) | relu | group_norm(68) | tanh | mean @ 1x3x90x97 nhwc",
      "conv1d(6,2,k=1) | group_norm(1) @ 2x6x801 nhwc",
  };
  expect_agreement(blocks, "conv_term_lanes", 71);
}

// Planes in place: blocks whose pixels fill no vector, several chunks of planes, groups, segments of slabs,
// weights of a transposed convolution and of 16 bits.
TEST(CpuStrategies, AgreeWithTheReferenceOnPlanesInPlace) {
  const char* const blocks[] = {
      "conv2d(3,1,k=1) | relu @ 2x3x1x1",
      "conv2d(5,3,k=1) | swish | group_norm(3) | relu @ 3x5x3x7",
      "conv2d(70,9,k=1) | gelu | group_norm(3) | mean @ 2x70x31x37",
      "conv1d(33,50,k=1) | hardswish @ 2x33x1031",
      "conv3d(16,12,k=1,groups=4,bias=false) | group_norm(2) | swish @ 2x16x3x9x11",
      "conv_transpose2d(17,6,k=1) | swish | instance_norm | tanh @ 2x17x19x23",
      "conv_transpose2d(18,12,k=1,groups=3) | relu | mean @ 2x18x19x23",
      "conv2d(3,68,k=1) | relu | group_norm(68) | tanh | mean @ 1x3x90x97",
  };
  expect_agreement(blocks, "conv_planes", 83);
}

// Positions by pointers: one tap and many, borders, classes with and without taps, groups, several samples
// and blocks of one, chunks of taps and of channels, inputs that are turned, weights of 16 bits.
TEST(CpuStrategies, AgreeWithTheReferenceOnPositionsByPointers) {
  const char* const blocks[] = {
      "conv2d(24,12,k=1) | relu @ 5x24x2x3 nhwc",
      "conv2d(24,12,k=1) | relu @ 5x24x2x3",
      "conv2d(500,40,k=1) | swish | group_norm(4) | relu @ 2x500x13x29 nhwc",
      "conv2d(300,40,k=1) | swish | group_norm(4) | relu @ 2x300x13x29",
      "conv2d(130,9,k=3,p=1) | gelu | group_norm(3) | mean @ 7x130x4x3 nhwc",
      "conv2d(130,9,k=3,p=1) | gelu | group_norm(3) | mean @ 7x130x4x3 bf16",
      "conv2d(19,23,k=5,p=2) | gelu @ 2x19x3x31 f16 nhwc",
      "conv3d(17,24,k=2,s=2,p=1) | swish | group_norm(4) | relu @ 5x17x3x2x4",
      "conv3d(17,24,k=2,s=2,p=1) | swish | group_norm(4) | relu @ 5x17x3x2x4 nhwc",
      "conv2d(24,36,k=3,groups=3,p=1) | group_norm(6) | tanh @ 4x24x9x13 nhwc",
      "conv_transpose3d(20,33,k=3,s=2) | relu @ 1x20x4x4x4 nhwc",
      "conv_transpose3d(20,33,k=3,s=2) | relu @ 3x20x4x4x4",
      "conv_transpose2d(20,33,k=2,s=3,p=1,op=2) | relu | group_norm(11) @ 3x20x14x9 nhwc",
      "conv_transpose2d(18,12,k=1,groups=3) | relu | mean @ 2x18x19x23",
      "conv_transpose2d(8,12,k=5,s=2,p=2,groups=2) | relu | mean @ 2x8x19x23 f16 nhwc",
      "conv1d(300,33,k=5,p=2,d=2) | group_norm(33) | mean @ 9x300x17",
      "conv2d(3,300,k=3,s=2,p=1) | relu | instance_norm | tanh @ 2x3x29x31 nhwc",
      "conv2d(6,5,k=7,p=6,d=2) | relu @ 2x6x5x4 nhwc",
  };
  expect_agreement(blocks, "conv_indirect", 91);
}

// Runs of terms in place: borders, dilation, classes with and without taps, groups whose taps lie apart, runs
// that are longer than a chunk, several samples and blocks of one, inputs that are turned, 16 bits.
TEST(CpuStrategies, AgreeWithTheReferenceOnRuns) {
  const char* const blocks[] = {
      "conv2d(24,1,k=1) | relu @ 5x24x2x3 nhwc",
      "conv2d(24,5,k=3,p=1) | relu @ 5x24x2x3",
      "conv2d(48,6,k=4,s=3,p=2) | sigmoid | group_norm(1) | mean @ 3x48x29x17",
      "conv2d(19,3,k=5,p=2) | gelu @ 2x19x3x31 f16 nhwc",
      "conv2d(33,7,k=3,p=1) | gelu | group_norm(7) | tanh @ 2x33x25x23 nhwc",
      "conv2d(33,7,k=3,p=1) | gelu | group_norm(7) | tanh @ 2x33x25x23 bf16",
      "conv3d(5,4,k=3x2x4,s=2x1x3,p=1x0x2) | swish | group_norm(2) | relu @ 2x5x9x8x11 nhwc",
      "conv3d(18,8,k=5,p=2,groups=2) | leaky_relu(0.01) | group_norm(8) | swish @ 2x18x4x5x6 nhwc",
      "conv3d(18,8,k=5,p=2,groups=2) | leaky_relu(0.01) | group_norm(8) | swish @ 2x18x4x5x6",
      "conv2d(6,5,k=7,p=6,d=2) | relu @ 2x6x5x4 nhwc",
      "conv1d(1100,3,k=3,p=1) | relu | group_norm(3) @ 3x1100x19",
      "conv2d(700,9,k=2,p=1) | relu | group_norm(3) @ 2x700x5x4 nhwc",
      "conv_transpose2d(20,3,k=2,s=3,p=1,op=2) | relu | group_norm(3) @ 3x20x14x9 nhwc",
      "conv_transpose3d(20,2,k=3,s=2) | relu @ 3x20x4x4x4",
      "conv_transpose2d(18,12,k=1,groups=3) | relu | mean @ 2x18x19x23",
      "conv_transpose2d(8,12,k=5,s=2,p=2,groups=2) | relu | mean @ 2x8x19x23 f16 nhwc",
      "conv_transpose1d(130,6,k=7,s=2,p=3,op=1) | hardswish | group_norm(2) @ 17x130x18",
      "conv2d(9,64,k=3) | relu | instance_norm | tanh @ 2x9x29x31 nhwc",
  };
  expect_agreement(blocks, "conv_run_lanes", 93);
}

// Strides that are picked from vectors and others, ragged blocks of channels, rows shorter than a vector.
TEST(CpuStrategies, AgreeWithTheReferenceOnStridedRows) {
  const char* const blocks[] = {
      "conv1d(9,5,k=3,s=2,p=1) | relu @ 2x9x77",
      "conv1d(9,5,k=5,s=3,p=2) | swish @ 2x9x78",
      "conv1d(9,5,k=4,s=4) | relu @ 2x9x77",
      "conv1d(9,5,k=5,s=5) | relu @ 2x9x77 bf16",
      "conv2d(3,7,k=3,s=2,p=1) | sigmoid | group_norm(7) @ 2x3x19x21 nhwc",
      "conv2d(2,7,k=3,p=1) | relu @ 2x2x19x21 nhwc",
      "conv2d(6,3,k=2,s=2,p=1) | swish @ 2x6x9x5 nhwc",
      "conv_transpose2d(5,9,k=1,s=3) | relu6 @ 2x5x4x6",
      "conv_transpose2d(5,9,k=2,s=4,op=1) | swish | group_norm(3) @ 2x5x4x6 nhwc",
      "conv_transpose3d(300,3,k=1x2x1,s=2x3x2) | relu @ 1x300x2x3x4",
  };
  expect_agreement(blocks, "conv_channel_lanes", 97);
}

// Channels last with fewer channels than a vector has lanes.
TEST(CpuStrategies, AgreeWithTheReferenceOnTailsOfFewChannels) {
  const char* const blocks[] = {
      "swish | group_norm(2) | tanh @ 3x2x21x24x13 nhwc",
      "relu | group_norm(1) | mean @ 3x3x41x24 nhwc",
      "residual_add | instance_norm | gelu @ 2x2x33x35 bf16 nhwc",
      "gelu | channel_mul @ 3x3x200x17 nhwc",
      "prelu(per=channel) | group_norm(5) | channel_add | residual_add | tanh @ 2x5x117x41 nhwc",
      "sigmoid | group_norm(1) | hardswish @ 1x11x131x37 f16 nhwc",
  };
  expect_agreement(blocks, "tail", 109);
}

// Segments that begin inside a group, vectors of one and of several groups, classes of transposed ones,
// blocks of columns, chains of more than 256 terms, short rows, parts of a row that share vectors.
TEST(CpuStrategies, AgreeWithTheReferenceOnGroupsOfFewChannels) {
  const char* const blocks[] = {
      "conv2d(37,37,k=3,p=1,groups=37) | swish | group_norm(1) | relu @ 3x37x9x11 nhwc",
      "conv2d(70,70,k=3,p=1,groups=70) | gelu | instance_norm | tanh @ 2x70x6x9 nhwc",
      "conv2d(64,64,k=5,p=2,s=2,groups=64) | relu | group_norm(8) | mean @ 3x64x13x10 nhwc",
      "conv2d(12,12,k=3,d=2,p=2,groups=12) | hardswish @ 2x12x9x9 bf16 nhwc",
      "conv2d(12,24,k=2,groups=12) | swish | group_norm(4) @ 2x12x5x7 nhwc",
      "conv2d(24,24,k=3,p=1,groups=12) | swish | group_norm(4) @ 2x24x5x7 nhwc",
      "conv2d(24,36,k=3,p=1,groups=4) | relu @ 2x24x5x7 nhwc",
      "conv2d(24,8,k=3,p=1,groups=4) | relu | group_norm(4) | swish @ 2x24x5x7 f16 nhwc",
      "conv2d(96,80,k=7,p=3,groups=16) | relu @ 1x96x6x7 nhwc",
      "conv2d(40,40,k=1,groups=40) | group_norm(2) @ 2x40x17x15 nhwc",
      "conv2d(9,9,k=4,p=same,groups=9) | relu @ 2x9x8x70 nhwc",
      "conv1d(66,66,k=5,p=2,groups=66) | swish | group_norm(3) | relu @ 2x66x2100 nhwc",
      "conv1d(10,20,k=4,s=3,groups=5) | mean @ 3x10x50 nhwc",
      "conv3d(20,20,k=3,p=1,groups=20) | elu | group_norm(5) | mean @ 2x20x5x6x4 nhwc",
      "conv3d(6,6,k=7,p=3,groups=6) | relu @ 1x6x8x9x7 nhwc",
      "conv_transpose2d(33,33,k=3,p=1,groups=33) | swish @ 2x33x7x9 nhwc",
      "conv_transpose2d(12,24,k=4,s=2,p=1,groups=6) | swish | group_norm(3) | relu @ 2x12x7x9 nhwc",
      "conv_transpose2d(24,12,k=3,s=2,p=1,op=1,groups=6) | relu @ 2x24x7x9 nhwc",
      "conv_transpose2d(8,8,k=2,s=3,op=1,groups=8) | relu @ 2x8x4x5 nhwc",
      "conv_transpose1d(8,16,k=5,s=4,groups=4) | group_norm(2) | mean @ 2x8x6 nhwc",
      "conv2d(20,20,k=3,p=1,groups=20) | swish | group_norm(4) | relu @ 2x20x9x11",
      "conv2d(12,12,k=6,p=1,groups=12) | relu @ 2x12x15x24 nhwc",
      "conv3d(24,24,k=7,groups=24) @ 2x24x8x9x8 nhwc",
      "conv3d(24,24,k=3,s=2,p=1,groups=24) | tanh @ 2x24x4x9x3 nhwc",
      "conv2d(5,5,k=7,s=2,p=3,groups=5) | swish | group_norm(5) | relu @ 2x5x13x30 nhwc",
      "conv3d(3,3,k=4,d=2,p=3,groups=3) | gelu | mean @ 3x3x9x8x11 f16",
      "conv_transpose2d(4,4,k=9,s=2,p=1,op=1,groups=4) | relu @ 2x4x6x13 nhwc",
      "conv1d(2,2,k=41,p=20,groups=2) | swish | group_norm(1) @ 2x2x301",
  };
  expect_agreement(blocks, "conv_group_lanes", 43);
}

TEST(CpuStrategies, PutPartsOfARowSideBySideForFewChannels) {
  const auto explained = [](const char* text) {
    const PlanOptions options{.strategy = "conv_group_lanes", .target = ""};
    return plan(Problem::parse(text, Device::cpu(1)), options).explain();
  };
  const auto parts = [&](const char* text) {
    return explained(text).find("parts of a row") != std::string::npos;
  };
  const std::string whole = explained("conv2d(2,2,k=7,p=3,groups=2) | relu @ 2x2x40x44 nhwc");
  EXPECT_NE(whole.find("of at most 1760 pixels"), std::string::npos) << whole;
  EXPECT_TRUE(parts("conv2d(2,2,k=7,p=3,groups=2) | relu @ 2x2x40x44 nhwc"));
  EXPECT_FALSE(parts("conv2d(2,2,k=3,groups=2) | relu @ 2x2x40x44 nhwc"));
  EXPECT_FALSE(parts("conv2d(32,32,k=7,p=3,groups=32) | relu @ 2x32x40x44 nhwc"));
}

TEST(CpuStrategies, TakeLanesOfGroupsForManyOfThem) {
  const auto chosen = [](const char* text) { return plan(Problem::parse(text, Device::cpu(1))).strategy(); };
  EXPECT_EQ(chosen("conv2d(64,64,k=3,p=1,groups=64) | relu @ 2x64x56x56 nhwc"), "conv_group_lanes");
  EXPECT_EQ(chosen("conv1d(3,3,k=3,p=1,groups=3) | relu @ 2x3x40000"), "conv_pixel_lanes");
}

TEST(CpuStrategies, ReadPlanesInPlaceForFewOutputs) {
  const auto chosen = [](const char* text) { return plan(Problem::parse(text, Device::cpu(1))).strategy(); };
  EXPECT_EQ(chosen("conv1d(512,1,k=1) | relu @ 2x512x4000"), "conv_planes");
  // By pointers or by terms, as the target's rates say: both read channels last in place.
  const std::string last = chosen("conv2d(512,16,k=1) | relu @ 1x512x80x44 nhwc");
  EXPECT_TRUE(last == "conv_indirect" || last == "conv_term_lanes") << last;
  EXPECT_NE(chosen("conv2d(256,256,k=1) | relu @ 1x256x64x64"), "conv_planes");
  // Pixel lanes would take one channel at a time: a line of channels last for each element.
  EXPECT_NE(chosen("conv3d(48,4,k=7,s=3,p=3) @ 1x48x32x24x24 nhwc"), "conv_pixel_lanes");
}

TEST(CpuStrategies, TakeLanesOfRunsForFewOutputs) {
  const auto chosen = [](const char* text) { return plan(Problem::parse(text, Device::cpu(1))).strategy(); };
  EXPECT_EQ(chosen("conv3d(48,4,k=7,s=3,p=3) @ 1x48x32x24x24 nhwc"), "conv_run_lanes");
  EXPECT_EQ(chosen("conv2d(64,3,k=3,p=1) | tanh @ 2x64x64x64 nhwc"), "conv_run_lanes");
  EXPECT_NE(chosen("conv2d(64,65,k=3,p=1) | tanh @ 2x64x64x64 nhwc"), "conv_run_lanes");
}

TEST(CpuStrategies, GatherTheTermsOfFewPixelsAlone) {
  const auto chosen = [](const char* text) { return plan(Problem::parse(text, Device::cpu(1))).strategy(); };
  EXPECT_EQ(chosen("conv2d(256,128,k=3) | relu @ 16x256x3x4"), "conv_term_lanes");
  EXPECT_EQ(chosen("conv2d(64,64,k=3,p=1) | relu @ 1x64x64x64"), "conv_channel_lanes");
}

// Waves of one sample each, the second pass of one beside the first pass of the next.
TEST(CpuStrategies, GiveTheSameBitsWhereWavesOverlap) {
  std::vector<double> first;
  for (const int threads : {1, 3}) {
    const Problem problem = Problem::parse(
        "conv2d(1,2,k=1) | relu | instance_norm | hardswish @ 3x1x525x1000", Device::cpu(threads));
    ThreadExecutor executor(threads);
    const Operands operands = random_operands(problem, Distribution::normal, 14);
    const Outcome outcome = run_and_compare(plan(problem), operands, executor);
    EXPECT_TRUE(outcome.passed()) << outcome.text();
    if (threads == 1) first = outcome.output;
    EXPECT_TRUE(same_bits(first, outcome.output)) << threads << " threads";
  }
}

// The samples of a batch computed together and each alone.
TEST(CpuStrategies, GiveASampleTheSameBitsInAnyBatch) {
  constexpr std::array<const char*, 2> blocks[] = {
      {"conv2d(3,20,k=3,p=1) | swish | group_norm(5) | relu @ 5x3x30x31", ""},
      {"conv_transpose2d(3,20,k=3,s=2) | swish | group_norm(5) | hardswish @ 5x3x30x31 bf16", ""},
      {"conv2d(3,20,k=5) | gelu | group_norm(5) | mean @ 5x3x30x31", ""},
      {"gelu | group_norm(2) | relu @ 5x4x30x31 nhwc", ""},
      {"conv2d(6,6,k=3,groups=6) | instance_norm | tanh | mean @ 5x6x30x31", ""},
      {"conv2d(130,21,k=3,p=1) | swish | group_norm(7) @ 23x130x2x3", "conv_term_lanes"},
      {"conv2d(130,21,k=3) | swish | group_norm(7) | relu @ 23x130x3x4 bf16 nhwc", "conv_term_lanes"},
      {"conv2d(70,70,k=3,p=1,groups=70) | gelu | group_norm(7) | tanh @ 3x70x6x9 nhwc", "conv_group_lanes"},
      {"conv2d(40,9,k=1) | gelu | group_norm(3) @ 5x40x6x9 nhwc", "conv_term_lanes"},
      {"conv2d(40,9,k=1) | gelu | group_norm(3) @ 5x40x6x9", "conv_planes"},
      {"conv2d(40,9,k=3,p=1) | gelu | group_norm(3) @ 5x40x6x9 nhwc", "conv_indirect"},
      {"conv_transpose2d(40,9,k=3,s=2) | gelu | group_norm(3) @ 9x40x3x4", "conv_indirect"},
      {"conv2d(40,9,k=3,p=1) | gelu | group_norm(3) @ 9x40x6x9 nhwc", "conv_run_lanes"},
      {"conv_transpose2d(40,9,k=3,s=2) | gelu | group_norm(3) @ 9x40x3x4", "conv_run_lanes"},
  };
  for (const auto& [text, strategy] : blocks) {
    const Problem all = Problem::parse(text, Device::cpu(thread_count));
    const Operands operands = random_operands(all, Distribution::normal, 7);
    ThreadExecutor executor(thread_count);
    const std::vector<double> together =
        run_and_compare(plan(all, {strategy, ""}), operands, executor).output;
    Shape sizes = all.input.sizes;
    const auto batch = static_cast<size_t>(sizes[0]);
    sizes[0] = 1;
    const Layout layout = all.input.strides[1] == 1 ? Layout::nhwc : Layout::nchw;
    const Problem one(all.block, sizes, all.input.dtype, all.device, layout);
    for (size_t n = 0; n < batch; ++n) {
      Operands sample = operands;
      const auto in = operands.input.begin();
      const auto size = static_cast<std::ptrdiff_t>(operands.input.size() / batch);
      sample.input.assign(in + static_cast<std::ptrdiff_t>(n) * size,
                          in + static_cast<std::ptrdiff_t>(n + 1) * size);
      const std::vector<double> alone = run_and_compare(plan(one, {strategy, ""}), sample, executor).output;
      const auto out = together.begin() + static_cast<std::ptrdiff_t>(n * alone.size());
      const std::vector<double> part(out, out + static_cast<std::ptrdiff_t>(alone.size()));
      EXPECT_TRUE(same_bits(alone, part)) << "sample " << n << " of " << text;
    }
  }
}

// The statistics that forward writes are those of the reference, from every strategy.
TEST(Statistics, AreWrittenByEveryStrategy) {
  ThreadExecutor executor(thread_count);
  for (const char* const text :
       {"conv2d(3,8,k=3,p=1) | relu | group_norm(2) @ 3x3x9x13",
        "swish | group_norm(4) | hardswish @ 2x8x61x33",
        "conv_transpose2d(3,8,k=3,s=2) | swish | group_norm(4) | hardswish @ 2x3x9x13 bf16",
        "gelu | group_norm(2) | mean @ 2x8x9x13 f16 nhwc",
        "conv2d(3,6,k=1) | instance_norm | mean @ 2x3x11x5 nhwc"}) {
    const Problem problem = Problem::parse(text, Device::cpu(thread_count));
    const Operands operands = random_operands(problem, Distribution::normal, 11);
    const std::vector<float> expected = reference_statistics(problem, operands);
    const Plan best = plan(problem);
    for (const Candidate& candidate : best.candidates()) {
      if (!candidate.reason.empty()) continue;
      const Outcome outcome =
          run(plan(problem, {candidate.strategy, ""}), operands, executor, {.statistics = true});
      EXPECT_EQ(statistics_error(expected, outcome.statistics), "") << candidate.strategy << ": " << text;
      EXPECT_EQ(outcome.damage, "");
    }
  }
}

// The row decides the order of sums: with another one a call would have other bits.
TEST(Cpu, ThreadsDoNotChangeTheRow) {
  constexpr unsigned seed = 7;
  std::mt19937 draw(seed);
  const auto one_of = [&](std::initializer_list<int> values) {
    return values.begin()[draw() % values.size()];
  };
  for (int i = 0; i < 100; ++i) {
    const int inputs = one_of({8, 16, 48, 128, 320});
    std::ostringstream drawn;
    drawn << "conv2d(" << inputs << "," << one_of({8, 16, 64, 128, 512, 1280}) << ",k=" << one_of({1, 2, 3});
    drawn << ",s=" << one_of({1, 2}) << ") | group_norm(4) @ " << one_of({1, 4, 16, 64}) << "x" << inputs;
    drawn << "x" << one_of({3, 5, 8}) << "x" << one_of({3, 6, 10});
    const std::string text = drawn.str();
    const std::string row(plan(Problem::parse(text, Device::cpu(1))).strategy());
    for (const int threads : {2, 3, 8, 64}) {
      EXPECT_EQ(plan(Problem::parse(text, Device::cpu(threads))).strategy(), row)
          << text << ", " << threads << " threads, seed " << seed;
    }
  }
}

}  // namespace
}  // namespace onepass::testing
