// Wide convolutions with all that follows them, on a GPU, as implicit matrix products, in every mode, against
// the reference.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <iostream>
#include <limits>

#include "block/convert.h"
#include "gpu/pool.h"
#include "onepass/onepass.h"
#include "plan/strategy.h"
#include "support/random_problem.h"

namespace onepass::testing {
namespace {

using Gemm = GpuTest;

const Device gpu = Device::cuda();

constexpr const char* modes[] = {"f32", "tf32", "f16", "bf16"};

std::vector<std::string> portable_rows(const Problem& problem) { return rows_named("gemm_mma", problem); }

// One of the rows that take the problem, by turns, also where problems are the same block in each mode: a row
// has several kernels.
std::vector<std::string> gemm_row(const Problem& problem, int64_t index) {
  return rows_in_turn(wide_rows(problem), index + index / std::ssize(modes), 1, turn());
}

TEST_F(Gemm, AgreesWithTheReferenceInEveryMode) {
  const std::vector<Problem> problems = wide_problems(gpu);
  EXPECT_GE(problems.size(), 55u);  // with those below it is over a hundred
  const std::vector<std::string> rows = one_row_each(problems, wide_rows, turn());
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const std::string& row = rows[static_cast<size_t>(index)];
    if (row.empty()) return "no row takes " + problem.text();
    const Check check{.distributions = {Distribution::uniform, Distribution::normal},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 700 + static_cast<uint64_t>(index),
                      .options = {.statistics = true}};
    return forward_errors(problem, std::span(&row, 1), check, stream);
  });
}

TEST_F(Gemm, RoundsOperandsToTf32) {
  const std::vector<Problem> problems = wide_problems(gpu);
  const std::vector<std::string> rows = one_row_each(problems, wide_rows, turn());
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const auto i = static_cast<size_t>(index);
    std::vector<std::string> tried{rows[i]};
    if (problems[i].precision == Precision::tf32_away) tried.push_back("gemm_mma");
    return rounding_errors(problems[i], tried, stream);
  });
}

// Each of the blocks in two of the four modes, by turns.
std::vector<Problem> in_two_modes(std::span<const char* const> texts) {
  std::vector<Problem> problems;
  for (size_t i = 0; i < texts.size(); ++i) {
    for (size_t j = i % 2; j < std::size(modes); j += 2)
      problems.push_back(Problem::parse(texts[i] + std::string(modes[j]), gpu));
  }
  return problems;
}

TEST_F(Gemm, AgreesWithTheReferenceOnHardData) {
  std::vector<Problem> problems;
  for (const char* const text : {"conv_transpose2d(32,32,k=3) | gelu | group_norm(4) @ 3x32x8x12 ",
                                 "conv3d(16,48,k=3,p=1) | relu | group_norm(3) | mean @ 2x16x5x9x7 ",
                                 "conv2d(24,32,k=3,p=1) | relu @ 2x24x11x9 "}) {
    for (const char* const mode : modes) problems.push_back(Problem::parse(text + std::string(mode), gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    return forward_errors(problem, gemm_row(problem, index),
                          {.distributions = {std::begin(distributions), std::end(distributions)},
                           .placements = {Placement::vectors},
                           .seed = 800 + static_cast<uint64_t>(index)},
                          stream);
  });
}

TEST_F(Gemm, AgreesWithTheReferenceOnRandomProblems) {
  const uint64_t first = base_seed() + 5'000'000;
  std::atomic<int64_t> refused{0};  // one in a thousand: strides and dilations whose window is too large
  const int64_t tried = try_for(6, [&](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const Problem problem = random_wide_problem(seed, gpu);
    std::vector<std::string> rows = gemm_row(problem, index);
    if (rows.empty() || seed % 4 == 0) rows = portable_rows(problem);
    if (rows.empty()) {
      ++refused;
      return std::string();
    }
    const size_t next = seed % std::size(distributions);
    return forward_errors(problem, rows,
                          {.distributions = {distributions[next], Distribution::normal},
                           .placements = {placements[seed % std::size(placements)]},
                           .seed = seed},
                          stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << ", " << refused
            << " refused\n";
  EXPECT_GT(tried, 4 * refused);
}

// Boxes of all shapes: rows of a product that are neighbours of the window and 8 x 8 positions, several
// samples a box, taps in one window and in windows of their own, strides, dilation, classes, chunks of 16, 32
// and 64 channels that are whole and that are not, chains that read values of channels and tensors, tails.
TEST_F(Gemm, AgreesWithTheReferenceByBoxes) {
  if (cuda::describe_device(0).find("sm_90a") == std::string::npos) GTEST_SKIP() << "it needs wgmma";
  const std::vector<Problem> problems = box_problems(gpu);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const std::vector<std::string> row{"gemm_boxes"};
    const Check check{.distributions = {Distribution::uniform, Distribution::normal,
                                        distributions[static_cast<size_t>(index) % std::size(distributions)]},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 1700 + static_cast<uint64_t>(index)};
    std::string errors = forward_errors(problem, row, check, stream);
    if (errors.empty() && index % 3 == 0) errors = not_finite_errors(problem, row, stream);
    // Of problems without values of each sample besides x.
    if (errors.empty() && index % 4 == 1) errors = other_bits(problem, row, 5, stream);
    return errors;
  });
}

// Convolutions in groups, each a product by itself: channels of a group that fill tiles and that do not, both
// orders, groups of the norm that are one of the convolution's and a part of one, chains that read values of
// channels and tensors, means, strides, classes of transposed ones; by every row.
TEST_F(Gemm, AgreesWithTheReferenceInGroups) {
  const std::vector<Problem> problems = grouped_problems(gpu);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const std::vector<std::string> rows = rows_named("gemm_", problem);
    // Hard data by turns.
    const Check check{.distributions = {Distribution::uniform, Distribution::normal,
                                        distributions[static_cast<size_t>(index) % std::size(distributions)]},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 1200 + static_cast<uint64_t>(index)};
    std::string errors = forward_errors(problem, rows, check, stream);
    if (errors.empty() && index % 3 == 0) errors = not_finite_errors(problem, rows, stream);
    // Of samples that are whole vectors: a tail's vectors follow where its input lies.
    if (errors.empty() && index < 2) errors = other_bits(problem, rows, 5, stream);
    return errors;
  });
}

// Samples that f16 has no room for are done again, and no others change.
TEST_F(Gemm, DoesSamplesAgainThatHalvesCannotHold) {
  std::vector<Problem> problems;
  for (const char* const text : {"conv_transpose2d(32,32,k=3) | gelu | group_norm(4) @ 4x32x9x12 tf32",
                                 "conv2d(24,72,k=3,p=1) | relu @ 4x24x11x9 tf32",
                                 "conv2d(48,60,k=3,p=1,groups=3) | relu | group_norm(6) @ 4x48x11x9 tf32",
                                 "conv2d(16,20,k=3,p=1) | swish | group_norm(2) | mean @ 4x16x11x9 tf32"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    // Powers of two: operands stay what they are rounded to.
    for (const double scale : {0x1p20, 0x1p-20, 0x1p-30}) {
      Operands operands = random_operands(problem, Distribution::normal, 5);
      const size_t size = operands.input.size() / 4;
      // The second sample alone.
      for (size_t i = size; i < 2 * size; ++i)
        operands.input[i] = static_cast<float>(operands.input[i] * scale);
      for (const std::string& row : rows_named("gemm_", problem)) {
        const Plan by_row = plan(problem, {row, ""});
        const Outcome outcome = run(by_row, operands, stream);
        const Comparison comparison = compare(problem, operands, outcome.output, by_row.accuracy());
        if (comparison.failures > 0)
          return row + ", " + std::to_string(std::ilogb(scale)) + " bits up: " + problem.text() + "\n  " +
                 comparison.text();
      }
    }
    return std::string();
  });
}

// A value that is not finite reaches the outputs whose taps meet it, and no others.
TEST_F(Gemm, WhatIsNotFiniteReachesOnlyTheOutputsThatMeetIt) {
  const std::vector<Problem> problems = in_two_modes(std::vector<const char*>{
      "conv_transpose2d(20,24,k=3) | swish @ 2x20x7x6 ", "conv3d(16,16,k=3,p=1) | relu @ 2x16x6x9x7 ",
      "conv2d(24,20,k=3,p=2) | tanh @ 2x24x9x11 ",
      "conv2d(16,32,k=2) | hardswish | group_norm(4) | mean @ 3x16x6x8 "});
  const std::vector<std::string> rows = one_row_each(problems, wide_rows, turn());
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const auto i = static_cast<size_t>(index);
    return not_finite_errors(problems[i], std::span(&rows[i], 1), stream);
  });
}

// Same bits in every run, for every batch and place in it, with statistics asked for and without.
TEST_F(Gemm, GivesTheSameBits) {
  const std::vector<Problem> problems = in_two_modes(
      std::vector<const char*>{"conv_transpose2d(32,64,k=3) | gelu | group_norm(8) @ 5x32x40x42 ",
                               "conv2d(16,130,k=3,p=1) | gelu | group_norm(2) | swish | mean @ 5x16x30x31 ",
                               "conv1d(16,16,k=3) | group_norm(2) | relu @ 2x16x84001 "});
  const std::vector<std::string> rows = one_row_each(problems, wide_rows, turn());
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const auto i = static_cast<size_t>(index);
    return other_bits(problems[i], std::span(&rows[i], 1), 10, stream);
  });
}

// Blocks that have several tiles one after the other: values of 16 bits go to memory while the next tile is
// multiplied, of the second problem some out of registers, or at once where the output is not on 16 bytes.
TEST_F(Gemm, StoresATileWhileTheNextIsMultiplied) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv_transpose2d(16,72,k=3) | relu | group_norm(9) | silu @ 150x16x6x32 bf16",
        "conv_transpose3d(16,72,k=3,bias=false) | gelu | group_norm(9) @ 3x16x30x16x32 f16"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    return forward_errors(problem, rows_named("gemm_wgmma", problem),
                          {.distributions = {Distribution::normal},
                           .placements = {Placement::elements, Placement::vectors},
                           .seed = 900 + static_cast<uint64_t>(index)},
                          stream);
  });
}

// Warpgroups by turns: boxes that fill samples and that do not, values that leave by rows and by columns, one
// to three dimensions, rows of an odd number of outputs and of few, slabs of one channel to sixteen, chunks
// that channels do not fill, chains that read values of channels; many samples a block. Inputs and outputs on
// 16 bytes and on none, and inputs alone: another kernel does all samples again where they are on none.
TEST_F(Gemm, TurnsAgreeWithTheReference) {
  const std::vector<Problem> problems = pingpong_problems(gpu);
  const std::vector<std::string> row{"gemm_pingpong"};
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    // Hard data, whose statistics may be anything, by turns and on small ones alone: the reference takes its
    // time.
    const bool is_small = element_count(problem.output.sizes) < 300'000;
    Check check{.distributions = {Distribution::uniform, Distribution::normal},
                .placements = {Placement::elements, Placement::vectors, Placement::inputs},
                .seed = 950 + static_cast<uint64_t>(index),
                .options = {.statistics = !is_small}};
    if (is_small) check.distributions.clear();
    for (size_t i = 0; is_small && i < 3; ++i)
      check.distributions.push_back(
          distributions[(3 * static_cast<size_t>(index) + i) % std::size(distributions)]);
    // Slabs of one value, which integers of 20 bits hold too.
    if (is_small && problem.input.dtype == DType::f32) check.distributions.push_back(Distribution::constant);
    std::string errors = forward_errors(problem, row, check, stream);
    if (errors.empty()) errors = other_bits(problem, row, 10, stream);
    if (errors.empty() && is_small) errors = not_finite_errors(problem, row, stream);
    return errors;
  });
}

// --- The row for every GPU from sm_80 on ---

using GemmMma = GpuTest;

// A part of the list above, another one in each turn, and transposed convolutions whose outputs meet
// different elements by their stride, some of them none.
TEST_F(GemmMma, AgreesWithTheReferenceInEveryMode) {
  std::vector<Problem> problems = in_turn(wide_problems(gpu), turn());
  for (const char* const text :
       {"conv_transpose2d(32,40,k=4,s=2,p=1) | relu | group_norm(4) @ 2x32x19x20 tf32",
        "conv_transpose2d(16,24,k=5,s=2x3,d=3x1) | swish | group_norm(6) | mean @ 2x16x5x6 f32",
        "conv_transpose3d(16,20,k=2,s=3,p=1,op=1) | silu | residual_add @ 2x16x5x4x3 bf16 nhwc"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const std::vector<std::string> rows = portable_rows(problem);
    if (rows.empty()) return "the row does not take " + problem.text();
    const Check check{.distributions = {Distribution::uniform, Distribution::normal},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 1000 + static_cast<uint64_t>(index),
                      .options = {.statistics = true}};
    return forward_errors(problem, rows, check, stream);
  });
}

// Vectors and rows that are filled with zeros, taps in pairs.
TEST_F(GemmMma, AgreesWithTheReferenceOnFewChannels) {
  const std::vector<Problem> problems = in_turn(few_problems(gpu), turn());
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const std::vector<std::string> rows = portable_rows(problem);
    if (rows.empty()) return "the row does not take " + problem.text();
    const Check check{.distributions = {Distribution::uniform, Distribution::normal,
                                        distributions[static_cast<size_t>(index) % std::size(distributions)]},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 1300 + static_cast<uint64_t>(index)};
    std::string errors = forward_errors(problem, rows, check, stream);
    if (errors.empty()) errors = not_finite_errors(problem, rows, stream);
    if (errors.empty()) errors = rounding_errors(problem, rows, stream);
    if (errors.empty() && index % 2 == 0) errors = other_bits(problem, rows, 5, stream);
    return errors;
  });
}

TEST_F(GemmMma, AgreesWithTheReferenceOnRandomFewChannels) {
  const uint64_t first = base_seed() + 9'000'000;
  std::atomic<int64_t> refused{0};  // where zeros would be most of the product
  const int64_t tried = try_for(3, [&](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const Problem problem = random_few_problem(seed, gpu);
    const std::vector<std::string> rows = portable_rows(problem);
    if (rows.empty()) {
      ++refused;
      return std::string();
    }
    return forward_errors(problem, rows,
                          {.distributions = {distributions[seed % std::size(distributions)]},
                           .placements = {placements[seed % std::size(placements)]},
                           .seed = seed},
                          stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << ", " << refused
            << " refused\n";
  EXPECT_GT(tried, 2 * refused);
}

// Statistics of sums of thousands of terms, in each mode.
TEST_F(GemmMma, DeclaresWhatLongSumsLose) {
  std::vector<Problem> problems;
  for (const char* const mode : modes) {
    problems.push_back(
        Problem::parse(std::string("conv3d(8,24,k=7,p=3) | group_norm(4) | relu @ 1x8x8x9x8 ") + mode, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const Check check{.distributions = {Distribution::uniform, Distribution::normal},
                      .placements = {Placement::vectors},
                      .seed = 1400 + static_cast<uint64_t>(index),
                      .options = {.statistics = true}};
    return forward_errors(problem, portable_rows(problem), check, stream);
  });
}

// Hard data, values that are not finite, the same bits: on few kernels.
TEST_F(GemmMma, AgreesWithTheReferenceOnHardData) {
  std::vector<Problem> problems;
  for (const char* const mode : modes)
    problems.push_back(Problem::parse(std::string("conv2d(24,32,k=3,p=1) | relu @ 2x24x11x9 ") + mode, gpu));
  for (const char* const mode : {"f32", "bf16"}) {
    problems.push_back(Problem::parse(
        std::string("conv_transpose2d(32,32,k=3) | gelu | group_norm(4) @ 3x32x9x11 ") + mode, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const std::vector<std::string> rows = portable_rows(problem);
    std::string errors =
        forward_errors(problem, rows,
                       {.distributions = {std::begin(distributions), std::end(distributions)},
                        .placements = {Placement::vectors},
                        .seed = 1100 + static_cast<uint64_t>(index)},
                       stream);
    if (errors.empty()) errors = not_finite_errors(problem, rows, stream);
    if (errors.empty()) errors = other_bits(problem, rows, 5, stream);
    return errors;
  });
}

// --- Gradients of a convolution alone ---

std::string gradient_errors(const BackwardProblem& problem, const Check& check, const GpuStream& stream) {
  return backward_errors("gemm_backward", problem, check, stream);
}

using GemmBackward = GpuTest;

TEST_F(GemmBackward, AgreesWithTheReferenceInEveryMode) {
  const std::vector<Problem> problems = wide_gradients(gpu);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return gradient_errors(
        BackwardProblem(problems[static_cast<size_t>(index)]),
        {.placements = {Placement::elements, Placement::vectors}, .seed = 900 + static_cast<uint64_t>(index)},
        stream);
  });
}

TEST_F(GemmBackward, AgreesWithTheReferenceOnHardData) {
  std::vector<Problem> problems;
  for (const char* const mode : {"tf32", "bf16"})
    problems.push_back(Problem::parse(std::string("conv2d(24,40,k=3,p=1) @ 2x24x11x9 ") + mode, gpu));
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return gradient_errors(
        BackwardProblem(problems[static_cast<size_t>(index)]),
        {.distributions = {Distribution::uniform, Distribution::offset_100, Distribution::constant,
                           Distribution::denormal, Distribution::tiny, Distribution::huge},
         .placements = {Placement::vectors},
         .seed = 950 + static_cast<uint64_t>(index)},
        stream);
  });
}

TEST_F(GemmBackward, GivesWhatIsAskedFor) {
  std::vector<BackwardProblem> subsets;
  BackwardProblem problem(Problem::parse("conv2d(24,40,k=3,p=1) @ 2x24x11x9 tf32", gpu));
  for (const std::vector<bool>& wanted : few_and_many(problem.wanted.size())) {
    problem.wanted = wanted;
    subsets.push_back(problem);
  }
  try_all(std::ssize(subsets), [&](int64_t index, const GpuStream& stream) {
    return gradient_errors(subsets[static_cast<size_t>(index)],
                           {.placements = {Placement::elements}, .seed = 4}, stream);
  });
}

// Gradients of any size, and one that is larger by far than what a look at a part of them showed.
TEST_F(GemmBackward, ScalesWhatHalvesCannotHold) {
  const BackwardProblem problem(Problem::parse("conv2d(32,32,k=3,p=1) @ 5x32x41x43 tf32", gpu));
  try_all(3, [&](int64_t index, const GpuStream& stream) {
    BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 21);
    const double scale = index == 0 ? 0x1p-60 : index == 1 ? 0x1p40 : 0;
    for (double& value : operands.output_gradient) value *= scale;
    if (index == 2) operands.output_gradient[operands.output_gradient.size() * 2 / 3 + 7] = 0x1p50;
    const GradientComparison comparison =
        compare(problem, operands, run(plan_backward(problem, {"gemm_backward", ""}), operands, stream));
    return comparison.errors.empty() ? "" : "scale " + std::to_string(index) + ": " + comparison.errors;
  });
}

TEST_F(GemmBackward, GivesTheSameBits) {
  const char* const texts[] = {"conv_transpose2d(64,64,k=3) @ 9x64x97x101 tf32",
                               "conv3d(64,128,k=3,p=1) @ 4x64x13x14x15 bf16"};
  try_all(std::ssize(texts), [&](int64_t index, const GpuStream& stream) {
    const BackwardProblem problem(Problem::parse(texts[index], gpu));
    const BackwardPlan plan = plan_backward(problem, {"gemm_backward", ""});
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 12);
    const GradientValues once = run(plan, operands, stream).gradients;
    for (int i = 0; i < 10; ++i) {
      if (!same_bits(once, run(plan, operands, stream).gradients))
        return "other bits in run " + std::to_string(i) + ": " + problem.text();
    }
    return std::string();
  });
}

}  // namespace
}  // namespace onepass::testing
