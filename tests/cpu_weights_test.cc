// Weights of a convolution that lie channels last, by every row of the CPU, forward and backward.
#include <gtest/gtest.h>

#include "onepass/backward.h"
#include "onepass/error.h"
#include "onepass/executor.h"
#include "onepass/onepass.h"
#include "support/harness.h"

namespace onepass::testing {
namespace {

constexpr int thread_count = 3;

// Weights of a convolution in channels last, by every row: read where they lie, or copied.
TEST(CpuWeights, AgreeWithTheReferenceInChannelsLast) {
  const char* const blocks[] = {
      "conv2d(24,20,k=3,p=1) | relu | group_norm(4) @ 3x24x5x6 nhwc",
      "conv3d(6,40,k=2,s=2) | swish @ 1x6x4x5x6",
      "conv_transpose2d(20,33,k=3,s=2) | relu @ 2x20x4x5 nhwc",
      "conv_transpose2d(20,33,k=3,s=2) | relu @ 40x20x4x5 bf16",
      "conv_transpose2d(8,12,k=2,s=2,groups=2) | relu @ 2x8x19x23 nhwc",
      "conv2d(12,12,k=3,groups=4) | relu @ 3x12x7x6 nhwc",
      "conv2d(40,9,k=1) | gelu @ 5x40x6x9",
  };
  for (const char* const text : blocks) {
    Problem problem = Problem::parse(text, Device::cpu(thread_count));
    TensorSpec& weights = problem.parameters[0];
    weights = TensorSpec::dense(weights.dtype, weights.sizes, Layout::nhwc);
    problem.validate();
    ThreadExecutor executor(thread_count);
    for (const Candidate& row : candidates(problem)) {
      if (!row.reason.empty()) continue;
      const Operands operands = random_operands(problem, Distribution::normal, 5);
      const Outcome outcome = run_and_compare(plan(problem, {row.strategy, ""}), operands, executor);
      EXPECT_TRUE(outcome.passed()) << row.strategy << ": " << text << ": " << outcome.text();
    }
  }
}

// The order of a gradient does not follow the weights: it is contiguous.
TEST(CpuWeights, HaveContiguousGradients) {
  Problem problem = Problem::parse("conv2d(6,8,k=3) @ 2x6x7x7 nhwc");
  TensorSpec& weights = problem.parameters[0];
  weights = TensorSpec::dense(weights.dtype, weights.sizes, Layout::nhwc);
  const BackwardProblem backward(problem);
  EXPECT_NO_THROW(backward.validate());
  EXPECT_EQ(backward.parameter_gradients[0].strides, TensorSpec::dense(weights.dtype, weights.sizes).strides);
}

TEST(CpuWeights, AreContiguousOnAGpu) {
  Problem problem = Problem::parse("conv2d(6,8,k=3) @ 2x6x7x7 nhwc");
  TensorSpec& weights = problem.parameters[0];
  weights = TensorSpec::dense(weights.dtype, weights.sizes, Layout::nhwc);
  problem.device = Device::cuda();
  EXPECT_THROW(problem.validate(), Error);
}

}  // namespace
}  // namespace onepass::testing
