// What rows of a GPU say that they are off by, and that no other row is allowed it: without a GPU.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "block/convert.h"
#include "cuda/runtime/compile.h"
#include "onepass/onepass.h"
#include "support/harness.h"
#include "support/lists.h"

namespace onepass::testing {
namespace {

const Device gpu = Device::cuda_architecture("sm_90a");

Accuracy accuracy_of(const std::string& row, const std::string& text) {
  const cuda::WithoutCompiling quickly;
  return plan(Problem::parse(text, gpu), {row, ""}).accuracy();
}

using Held = Accuracy::Held;
using Tf32 = Accuracy::Tf32;

// The values of the dearest workloads are held as f16 by two rows and as integers by one.
TEST(AccuracyOfRows, OnlyTwoRowsHoldValuesInFewerBits) {
  const cuda::WithoutCompiling quickly;
  std::set<std::string> holding;
  for (const std::vector<Problem>& problems :
       {gpu_cases(gpu), wide_problems(gpu), pingpong_problems(gpu), small_backward(gpu),
        std::vector{Problem::parse("gelu | group_norm(8) @ 2x64x258x258 bf16", gpu)}}) {
    for (const Problem& problem : problems) {
      for (const std::string& row : accepting_rows(problem)) {
        if (plan(problem, {row, ""}).accuracy().held != Held::as_computed) holding.insert(row);
      }
    }
  }
  EXPECT_EQ(holding, (std::set<std::string>{"gemm_pingpong", "tail_staged"}));
}

TEST(AccuracyOfRows, IsTheRowsOwnAndNotTheProblems) {
  const std::string bf16 = "conv2d(16,48,k=3,p=1) | relu | group_norm(6) | silu @ 150x16x6x24 bf16";
  EXPECT_EQ(accuracy_of("gemm_pingpong", bf16).held, Held::as_f16);
  const std::string f16 = "conv2d(16,48,k=3,p=1) | relu | group_norm(6) ";
  EXPECT_EQ(accuracy_of("gemm_pingpong", f16 + "@ 150x16x6x24 f16").held, Held::normed_in_f16);
  EXPECT_EQ(accuracy_of("gemm_pingpong", f16 + "| silu @ 150x16x6x24 f16").held, Held::as_f16);
  EXPECT_EQ(accuracy_of("gemm_wgmma", bf16).held, Held::as_computed);
  EXPECT_EQ(accuracy_of("gemm_mma", bf16).held, Held::as_computed);
  const std::string tf32 = "conv2d(16,24,k=1) | gelu | instance_norm | relu @ 3x16x12x24 tf32";
  EXPECT_EQ(accuracy_of("gemm_pingpong", tf32), (Accuracy{Held::in_20_bits, Tf32::rounded, 0x1p-17}));
  EXPECT_EQ(accuracy_of("gemm_wgmma", tf32), Accuracy{});
  const std::string tail = "gelu | group_norm(8) @ 2x64x258x258 bf16";
  EXPECT_EQ(accuracy_of("tail_staged", tail).held, Held::as_f16);
  EXPECT_EQ(accuracy_of("tail_streamed", tail), (Accuracy{.sigmoid = 0x1p-17}));
  // Nothing costly before the norm: it is computed again, not held.
  EXPECT_EQ(accuracy_of("tail_staged", "relu | group_norm(8) @ 2x64x258x258 bf16").held, Held::as_computed);
  const std::string thin = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 11x3x5x6x7 tf32";
  EXPECT_EQ(accuracy_of("thin_samples", thin).tf32, Tf32::rounded);
  const std::string many = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 11x3x16x32x32 ";
  const std::string s27 = "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 ";
  EXPECT_EQ(accuracy_of("thin_wgmma", many + "near_f32").tf32, Tf32::weights_whole);
  EXPECT_EQ(accuracy_of("thin_wgmma", many + "tf32").tf32, Tf32::rounded);
  EXPECT_EQ(accuracy_of("thin_wgmma", s27 + "tf32 fast").tf32, Tf32::weights_dithered);
  EXPECT_EQ(accuracy_of("thin_wgmma", many + "f32").tf32, Tf32::whole);
  EXPECT_EQ(accuracy_of("thin_cores", thin).tf32, Tf32::rounded);
  EXPECT_EQ(accuracy_of("direct", thin).tf32, Tf32::rounded);
  // Sums that stay in tensor cores, which cut them off.
  const std::string sums = "conv2d(128,24,k=3,p=1) | group_norm(4) @ 1x128x8x9 ";
  for (const std::string row : {"gemm_mma", "gemm_wgmma", "gemm_packed"}) {
    EXPECT_EQ(accuracy_of(row, sums + "bf16").cut_terms, 128 * 9) << row;
    EXPECT_EQ(accuracy_of(row, sums + "tf32").cut_terms, 128 * 9) << row;
    EXPECT_EQ(accuracy_of(row, bf16).cut_terms, 0) << row;  // 144 terms
  }
  EXPECT_EQ(accuracy_of("gemm_mma", sums + "f32").cut_terms, 0);  // operands in two parts
  EXPECT_EQ(accuracy_of("direct", sums + "bf16").cut_terms, 0);
}

// Values that are cut off as long sums are pass where the row says so, and their statistics too.
TEST(AccuracyOfRows, GrantsLongSumsToTheirRow) {
  const Problem problem = Problem::parse("conv3d(8,4,k=7,p=3,bias=false) @ 1x8x4x4x4 f32", gpu);
  const Operands operands = random_operands(problem, Distribution::normal, 1);
  const Expected expected = expected_output(problem, operands.input, operands.parameters);
  const Expected cut =
      expected_output(problem, operands.input, operands.parameters, {.cut_terms = int64_t{8} * 343});
  std::vector<double> off = expected.values;
  for (size_t i = 0; i < off.size(); ++i) off[i] *= 1 - 0x1p-24 * 8 * 343 / 4;
  EXPECT_GT(compare(problem, expected, off).failures, 0);
  EXPECT_EQ(compare(problem, cut, off).failures, 0);
}

// An output that is off by what f16 takes from it passes where the row holds f16, and nowhere else.
TEST(AccuracyOfRows, WidensTheBoundOfItsOwnRow) {
  const Problem problem = Problem::parse("conv2d(16,48,k=3,p=1) | group_norm(6) @ 2x16x6x24 f32", gpu);
  const Operands operands = random_operands(problem, Distribution::normal, 1);
  std::vector<double> off = expected_output(problem, operands.input, operands.parameters).values;
  EXPECT_EQ(compare(problem, operands, off).failures, 0);
  const std::vector<double>& weight = operands.parameters[2];  // of the norm
  for (size_t i = 0; i < off.size(); ++i) off[i] += 0x1p-10 * weight[i / (6 * 24) % 48];
  EXPECT_GT(compare(problem, operands, off).failures, 0);
  EXPECT_EQ(compare(problem, operands, off, {.held = Held::as_f16}).failures, 0);
  EXPECT_GT(compare(problem, operands, off, {.held = Held::in_20_bits}).failures, 0);
}

double cut_to_tf32(double value) {
  const double unit = std::ldexp(1.0, std::ilogb(value == 0 ? 1 : value) - 10);
  return std::trunc(value / unit) * unit;
}

Operands changed(Operands operands, double (*of_input)(double), double (*of_weight)(double)) {
  for (double& value : operands.input) value = of_input(value);
  for (double& value : operands.parameters[0]) value = of_weight(value);
  return operands;
}

// Half of the tests draw operands of tf32 that are not rounded: a kernel that cuts them off, or rounds
// weights that it says are whole, is seen.
TEST(UnroundedOperands, ShowHowARowRounds) {
  const Problem problem =
      Problem::parse("conv2d(16,24,k=3,p=1) | swish | group_norm(4) @ 2x16x7x9 tf32", gpu);
  const Operands given = random_operands(problem, Distribution::normal, 1, Tf32Operands::unrounded);
  const auto as_they_are = [](double value) { return value; };
  // What an implementation would give that multiplies these operands exactly.
  const auto output_of = [&](const Operands& operands) {
    return expected_output(problem, operands.input, operands.parameters, {.tf32 = Tf32::whole}).values;
  };
  const std::vector<double> rounded = output_of(changed(given, round_to_tf32, round_to_tf32));
  const std::vector<double> cut = output_of(changed(given, cut_to_tf32, round_to_tf32));
  const std::vector<double> cut_weights = output_of(changed(given, round_to_tf32, cut_to_tf32));
  const std::vector<double> whole_weights = output_of(changed(given, round_to_tf32, as_they_are));
  const auto failures = [&](const std::vector<double>& actual, Tf32 row) {
    return compare(problem, given, actual, {.tf32 = row}).failures;
  };
  EXPECT_EQ(failures(rounded, Tf32::rounded), 0);
  EXPECT_GT(failures(cut, Tf32::rounded), 100);
  EXPECT_GT(failures(cut_weights, Tf32::rounded), 100);
  EXPECT_GT(failures(whole_weights, Tf32::rounded), 100);
  EXPECT_EQ(failures(whole_weights, Tf32::weights_whole), 0);
  EXPECT_GT(failures(rounded, Tf32::weights_whole), 100);
  EXPECT_EQ(failures(output_of(given), Tf32::whole), 0);
  EXPECT_GT(failures(rounded, Tf32::whole), 100);
  // Rounded operands, which the other half draws, show none of it.
  const Operands before = random_operands(problem, Distribution::normal, 1);
  EXPECT_EQ(before.input, changed(given, round_to_tf32, as_they_are).input);
  EXPECT_EQ(compare(problem, before, output_of(changed(before, cut_to_tf32, cut_to_tf32))).failures, 0);
}

// In tf32_away ties go away from zero: operands that are ties and rounded to even are seen.
TEST(UnroundedOperands, ShowWhichWayTiesGo) {
  for (const bool away : {false, true}) {
    const Problem problem =
        Problem::parse(std::string("conv2d(16,24,k=3,p=1) | swish | group_norm(4) @ 2x16x7x9 ") +
                           (away ? "tf32_away" : "tf32"),
                       gpu);
    const auto to_tie = [](double value) {
      const double x = round_to_tf32(value);
      return x + std::copysign(std::ldexp(1.0, std::ilogb(x == 0 ? 1 : x) - 11), x);
    };
    const Operands given = changed(random_operands(problem, Distribution::normal, 1), to_tie, to_tie);
    const auto failures = [&](double (*round)(double)) {
      const Operands used = changed(given, round, round);
      const Accuracy whole{.tf32 = Tf32::whole};
      return compare(problem, given, expected_output(problem, used.input, used.parameters, whole).values)
          .failures;
    };
    const int64_t to_even = failures(round_to_tf32);
    const int64_t away_from_zero = failures(round_to_tf32_away);
    EXPECT_EQ(away ? away_from_zero : to_even, 0);
    EXPECT_GT(away ? to_even : away_from_zero, 100);
    // Operands drawn rounded are the same either way.
    const Operands before = random_operands(problem, Distribution::normal, 1);
    EXPECT_EQ(before.input, changed(before, round_to_tf32_away, round_to_tf32).input);
  }
}

// As (bits + 0x1000) & ~0x1fff of finite numbers.
TEST(RoundToTf32Away, IsToNearestWithTiesAwayFromZero) {
  const double unit = 0x1p-10;
  for (const double sign : {1.0, -1.0}) {
    EXPECT_EQ(round_to_tf32_away(sign * (1 + 0.5 * unit)), sign * (1 + unit));
    EXPECT_EQ(round_to_tf32(sign * (1 + 0.5 * unit)), sign);
    EXPECT_EQ(round_to_tf32_away(sign * (1 + 1.5 * unit)), sign * (1 + 2 * unit));
    EXPECT_EQ(round_to_tf32_away(sign * (1 + 0.5 * unit - 0x1p-23)), sign);
    EXPECT_EQ(round_to_tf32_away(sign * (2 - 0.5 * unit)), sign * 2);
    EXPECT_EQ(round_to_tf32_away(sign * 0x1p-137), sign * 0x1p-136);  // half of the least
    EXPECT_EQ(round_to_tf32_away(sign * 0x1p-138), 0);
  }
  EXPECT_TRUE(std::isinf(round_to_tf32_away(std::numeric_limits<float>::max())));
  EXPECT_TRUE(std::isinf(round_to_tf32_away(std::numeric_limits<double>::infinity())));
  EXPECT_TRUE(std::isnan(round_to_tf32_away(std::numeric_limits<double>::quiet_NaN())));
  for (uint32_t bits = 0; bits < 0x7f800000; bits += 0x2ffd) {
    const double rounded = round_to_tf32_away(std::bit_cast<float>(bits));
    EXPECT_EQ(rounded, std::bit_cast<float>((bits + 0x1000) & ~0x1fffu)) << bits;
  }
}

// Means whose weights are dithered: right on average, so that weights off by a tenth of a unit pass.
// Weights of 6 bits do not.
TEST(UnroundedOperands, GrantDitheredWeightsTheirAverage) {
  const Problem problem =
      Problem::parse("conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 2x3x16x20x20 tf32", gpu);
  const Operands given = random_operands(problem, Distribution::uniform, 1, Tf32Operands::unrounded);
  const auto output_of = [&](double (*of_weight)(double)) {
    const Operands used = changed(given, round_to_tf32, of_weight);
    return expected_output(problem, used.input, used.parameters, {.tf32 = Tf32::whole}).values;
  };
  const auto failures = [&](const std::vector<double>& actual) {
    return compare(problem, given, actual, {.tf32 = Tf32::weights_dithered}).failures;
  };
  EXPECT_EQ(failures(output_of([](double w) { return w; })), 0);
  EXPECT_EQ(failures(output_of([](double w) { return w + 0.1 * (cut_to_tf32(w) - w); })), 0);
  EXPECT_GT(failures(output_of([](double w) { return w - 16 * (w - cut_to_tf32(w)); })), 0);
}

}  // namespace
}  // namespace onepass::testing
