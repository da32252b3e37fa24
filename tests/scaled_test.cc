// Convolutions of one tap and one input for each output as the tails that they are.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "block/scaled.h"
#include "cuda/runtime/compile.h"
#include "cuda/source.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "onepass/executor.h"
#include "onepass/onepass.h"
#include "plan/choice.h"
#include "plan/strategy.h"
#include "reference/backward.h"
#include "support/backward_harness.h"
#include "support/harness.h"
#include "support/lists.h"

namespace onepass::testing {
namespace {

const Device gpu = Device::cuda_architecture("sm_90a");

Problem on_gpu(const std::string& text) { return Problem::parse(text, gpu); }

std::string tail_text(const std::string& block) {
  return scaled_tail(on_gpu(block + " @ 2x8x5x6")).block.text();
}

TEST(Scaled, IsAFactorAndAnAddendOfEachChannel) {
  EXPECT_EQ(tail_text("conv2d(8,8,k=1,groups=8)"), "channel_mul | channel_add");
  EXPECT_EQ(tail_text("conv2d(8,8,k=1,groups=8,bias=false)"), "channel_mul");
  EXPECT_EQ(tail_text("conv_transpose2d(8,8,k=1,d=3,groups=8) | relu | group_norm(2) | mean"),
            "channel_mul | channel_add | relu | group_norm(2) | mean");
  const Problem problem = on_gpu("conv3d(1,1,k=1) | residual_add @ 2x1x3x4x5 bf16 nhwc");
  const Problem tail = scaled_tail(problem);
  EXPECT_EQ(tail.block.text(), "channel_mul | channel_add | residual_add");
  EXPECT_EQ(tail.input, problem.input);
  EXPECT_EQ(tail.output, problem.output);
  EXPECT_EQ(tail.parameters.at(2), problem.parameters.at(2));
  EXPECT_NO_THROW(tail.validate());
}

TEST(Scaled, ReadsAWeightWhereItLies) {
  Problem problem = on_gpu("conv2d(8,8,k=1,groups=8) | relu @ 2x8x5x6");
  problem.parameters[0].strides = {3, 7, 7, 7};
  const Problem tail = scaled_tail(problem);
  EXPECT_EQ(tail.parameters[0].sizes, Shape{8});
  EXPECT_EQ(tail.parameters[0].strides, Shape{3});
  EXPECT_EQ(tail.parameters[1], problem.parameters[1]);
}

// The reference's convolution is the judge: the same numbers in the same order give the same results.
TEST(Scaled, IsTheConvolutionOfTheReference) {
  for (const Problem& problem : scaled_problems(gpu)) {
    SCOPED_TRACE(problem.text());
    const Problem tail = scaled_tail(problem);
    const BackwardProblem backward(problem);
    const BackwardOperands operands = random_backward_operands(backward, Distribution::normal, 5);
    const Operands& own = operands.forward;
    const auto close = [](const std::vector<double>& a, const std::vector<double>& b) {
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i)
        ASSERT_NEAR(a[i], b[i], 1e-9 * (1 + std::abs(a[i]))) << "element " << i;
    };
    close(reference::forward(tail.block, tail.input.sizes, own.input, own.parameters),
          reference::forward(problem.block, problem.input.sizes, own.input, own.parameters));
    const auto gradients = [&](const Block& block) {
      return reference::backward(block, problem.input.sizes, own.input, own.parameters,
                                 operands.output_gradient);
    };
    const reference::Gradients found = gradients(tail.block), expected = gradients(problem.block);
    close(found.input, expected.input);
    ASSERT_EQ(found.parameters.size(), expected.parameters.size());
    for (size_t i = 0; i < found.parameters.size(); ++i) close(found.parameters[i], expected.parameters[i]);
  }
}

TEST(Scaled, GradientsKeepTheirOrder) {
  BackwardProblem problem(on_gpu("conv2d(8,8,k=1,groups=8) | prelu(per=channel) | group_norm(2) @ 2x8x5x6"));
  problem.wanted = {false, true, false, true, false, true};
  const BackwardProblem tail = scaled_tail(problem);
  EXPECT_EQ(tail.wanted, problem.wanted);
  ASSERT_EQ(tail.parameter_gradients.size(), problem.parameter_gradients.size());
  EXPECT_EQ(tail.parameter_gradients[0].sizes, Shape{8});
  for (size_t i = 1; i < tail.parameter_gradients.size(); ++i)
    EXPECT_EQ(tail.parameter_gradients[i], problem.parameter_gradients[i]) << i;
  EXPECT_EQ(tail.output_gradient, problem.output_gradient);
  EXPECT_NO_THROW(tail.validate());
}

TEST(Scaled, OtherConvolutionsAreRefusedWithTheReason) {
  const std::pair<std::string, std::string> refused[]{
      {"relu @ 2x8x5x6", "the block has no convolution"},
      {"conv2d(8,8,k=1) | relu @ 2x8x5x6", "a group of the convolution has several channels"},
      {"conv2d(8,8,k=1,groups=4) | relu @ 2x8x5x6", "a group of the convolution has several channels"},
      {"conv2d(8,16,k=1,groups=8) | relu @ 2x8x5x6", "a group of the convolution has several channels"},
      {"conv_transpose2d(8,16,k=1,groups=8) @ 2x8x5x6", "a group of the convolution has several channels"},
      {"conv2d(8,8,k=2,groups=8) @ 2x8x5x6", "a kernel of more than one tap"},
      {"conv3d(8,8,k=1x1x3,groups=8) @ 2x8x5x6x7", "a kernel of more than one tap"},
      {"conv2d(8,8,k=1,s=2,groups=8) @ 2x8x5x6", "the convolution has a stride"},
      {"conv_transpose2d(8,8,k=1,s=1x2,groups=8) @ 2x8x5x6", "the convolution has a stride"},
      {"conv2d(8,8,k=1,p=1,groups=8) @ 2x8x5x6", "the convolution has padding"},
      {"conv_transpose2d(8,8,k=1,p=1,groups=8) @ 2x8x5x6", "the convolution has padding"},
      {"conv_transpose2d(8,8,k=1,d=2,op=1,groups=8) @ 2x8x5x6", "the convolution has padding"},
      {"conv2d(8,8,k=1,groups=8) @ 2x8x5x6 f64", "f64 is not computed on the GPU"},
  };
  for (const auto& [text, reason] : refused) {
    const Problem problem = on_gpu(text);
    EXPECT_EQ(find_row(strategies(Device::Kind::cuda), "scaled").refusal(problem), reason) << text;
    EXPECT_EQ(find_row(backward_strategies(Device::Kind::cuda), "scaled_backward")
                  .refusal(BackwardProblem(problem)),
              reason)
        << text;
  }
  Problem strided = on_gpu("conv2d(8,8,k=1,groups=8) | relu @ 2x8x5x6");
  strided.input.strides = {480, 60, 12, 2};
  EXPECT_EQ(find_row(strategies(Device::Kind::cuda), "scaled").refusal(strided),
            "the tensors are not all dense with channels before, or all with channels after, space");
}

int64_t count(const std::string& text, const std::string& words) {
  int64_t found = 0;
  for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) ++found;
  return found;
}

// The product's operands alone: not those of a channel_mul behind it, nor of one that is no convolution.
TEST(Scaled, RoundsAsTheConvolution) {
  const auto text_of = [](const std::string& block, const std::string& mode) {
    return cuda::tail_source(scaled_tail(on_gpu(block + " @ 2x8x5x6 " + mode)));
  };
  const std::string block = "conv2d(8,8,k=1,groups=8) | group_norm(2) | channel_mul | relu";
  for (const std::string mode : {"f32", "near_f32", "bf16", "f16", "f32 strict"})
    EXPECT_EQ(count(text_of(block, mode), "round_to_tf32"), 0) << mode;
  EXPECT_EQ(count(text_of(block, "tf32"), "round_to_tf32("), 2);
  EXPECT_EQ(count(text_of(block, "tf32 fast"), "round_to_tf32("), 2);
  EXPECT_EQ(count(text_of(block, "tf32_away"), "round_to_tf32_away("), 2);
  EXPECT_EQ(count(text_of("conv2d(8,8,k=1,groups=8) | channel_mul", "tf32"), "round_to_tf32("), 2);
  EXPECT_NE(text_of(block, "tf32").find("::value(round_to_tf32(x0), round_to_tf32(channel[0]),"),
            std::string::npos);
  const BackwardProblem backward(on_gpu(block + " @ 2x8x5x6 tf32"));
  const std::string gradients = cuda::tail_source(scaled_tail(backward));
  EXPECT_NE(gradients.find("::gradient(round_to_tf32(x0), round_to_tf32(channel[0]), 0.00000000f, "
                           "0.00000000f, round_to_tf32(g))"),
            std::string::npos)
      << gradients;
  EXPECT_NE(gradients.find("::argument_gradient(round_to_tf32(x0), "), std::string::npos);
  EXPECT_EQ(count(cuda::tail_source(on_gpu("channel_mul | relu @ 2x8x5x6")), "round_to_tf32"), 0);
}

TEST(Scaled, IsChosenOnEveryArchitecture) {
  for (const char* const text :
       {"conv3d(32,32,k=1,groups=32) | hardswish | group_norm(1) | relu6 @ 8x32x47x48x65 near_f32 nhwc",
        "conv3d(1280,1280,k=1,groups=1280,bias=false) | group_norm(1280) | relu @ 128x1280x8x8x22 nhwc",
        "conv2d(512,512,k=1,groups=512) | hardswish | group_norm(16) | gelu | mean @ 256x512x56x32 tf32",
        "conv2d(256,256,k=1,groups=256) | relu @ 64x256x56x56 bf16"}) {
    for (const std::string architecture : {"sm_80", "sm_90a", "sm_120"}) {
      const Problem problem = Problem::parse(text, Device::cuda_architecture(architecture));
      EXPECT_EQ(choose(consider(strategies(Device::Kind::cuda), problem, {}), "").strategy, "scaled")
          << architecture << ": " << text;
      EXPECT_TRUE(cuda::is_worth_fusing(problem)) << architecture << ": " << text;
      const BackwardProblem backward(problem);
      EXPECT_EQ(choose(consider(backward_strategies(Device::Kind::cuda), backward, {}), "").strategy,
                "scaled_backward")
          << architecture << ": " << text;
      EXPECT_TRUE(cuda::is_worth_training(backward)) << architecture << ": " << text;
    }
  }
}

// The tail's row is that of eight samples, so that a sample has the same bits in every batch.
TEST(Scaled, RunsTheSameTailForEveryBatch) {
  const cuda::WithoutCompiling quickly;
  const auto runs = [](int64_t batch) {
    const std::string text = "conv2d(64,64,k=1,groups=64) | swish | group_norm(8) @ " + std::to_string(batch);
    const std::string explained = plan(on_gpu(text + "x64x28x28"), {"scaled", ""}).explain();
    const size_t begin = explained.find("runs: ");
    return explained.substr(begin, explained.find('\n', begin) - begin);
  };
  for (const int64_t batch : {1, 2, 9, 100, 4000}) EXPECT_EQ(runs(batch), runs(8)) << batch;
}

TEST(Scaled, IsExportedForEveryBatch) {
  const cuda::WithoutCompiling quickly;
  for (const Problem& problem : scaled_problems(gpu)) {
    SCOPED_TRACE(problem.text());
    cuda::ExportedPlan exported;
    EXPECT_NO_THROW(exported =
                        cuda::export_plan(plan(problem, {"scaled", ""}), problem.block.norm() != nullptr));
    EXPECT_FALSE(exported.kernels.empty());
    if (problem.precision == Precision::tf32_away) {  // gradients round ties to even
      EXPECT_THROW(plan_backward(BackwardProblem(problem), {"scaled_backward", ""}), Error);
      continue;
    }
    EXPECT_NO_THROW(exported =
                        cuda::export_plan(plan_backward(BackwardProblem(problem), {"scaled_backward", ""})));
    EXPECT_FALSE(exported.kernels.empty());
  }
}

TEST(Scaled, AgreesWithTheReferenceOnACpu) {
  constexpr int threads = 2;
  ThreadExecutor executor(threads);
  uint64_t seed = 1;
  for (const Problem& listed : scaled_problems(gpu)) {
    Problem problem = listed;
    problem.device = Device::cpu(threads);
    problem.precision = Precision::f32;
    const Operands operands = random_operands(problem, Distribution::normal, seed++);
    for (const std::string& target : cpu_targets()) {
      const Outcome outcome = run_and_compare(plan(problem, {"conv_scaled", target}), operands, executor);
      EXPECT_TRUE(outcome.passed()) << target << ": " << outcome.text();
    }
  }
}

TEST(Scaled, IsChosenOnACpuForContiguousTensors) {
  const Problem problem = Problem::parse("conv2d(64,64,k=1,groups=64) | relu @ 8x64x56x56", Device::cpu(1));
  EXPECT_EQ(plan(problem).strategy(), "conv_scaled");
  const Problem other = Problem::parse("conv2d(64,64,k=1,s=2,groups=64) | relu @ 8x64x56x56", Device::cpu(1));
  const Strategy& row = find_row(strategies(Device::Kind::cpu), "conv_scaled");
  EXPECT_EQ(row.refusal(other), "the convolution has a stride");
}

}  // namespace
}  // namespace onepass::testing
