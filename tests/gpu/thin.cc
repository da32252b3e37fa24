// Thin convolutions with all that follows them, on a GPU, by every row and in every mode, against the
// reference.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <mutex>

#include "block/convert.h"
#include "gpu/pool.h"
#include "onepass/onepass.h"
#include "support/random_problem.h"

namespace onepass::testing {
namespace {

using Thin = GpuTest;

const Device gpu = Device::cuda();

constexpr const char* modes[] = {"f32", "tf32", "f16", "bf16"};

// One row for each problem: kernels of all rows for every problem take longer to compile than a suite may
// last. The same ones whenever a list is gone through: their kernels are there.
std::vector<std::string> rows_of(const std::vector<Problem>& problems) {
  return one_row_each(problems, thin_rows, turn());
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

TEST_F(Thin, AgreesWithTheReferenceInEveryMode) {
  const std::vector<Problem> problems = thin_forward_problems(gpu);
  const std::vector<std::string> rows = rows_of(problems);
  EXPECT_GE(problems.size(), 60u);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const std::string& row = rows[static_cast<size_t>(index)];
    if (row.empty()) return "no thin row takes " + problem.text();
    const Check check{.distributions = {Distribution::uniform, Distribution::normal},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 100 + static_cast<uint64_t>(index),
                      .options = {.statistics = true}};
    return forward_errors(problem, std::span(&row, 1), check, stream);
  });
}

TEST_F(Thin, AgreesWithTheReferenceOnHardData) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 3x3x6x9x11 ",
        "conv_transpose2d(3,8,k=3,s=2) | swish | group_norm(4) | hardswish @ 2x3x9x7 ",
        "conv2d(4,8,k=3,p=1) | relu @ 2x4x11x9 "}) {
    for (const char* const mode : modes) problems.push_back(Problem::parse(text + std::string(mode), gpu));
  }
  const std::vector<std::string> rows = rows_of(problems);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const auto i = static_cast<size_t>(index);
    return forward_errors(problems[i], std::span(&rows[i], 1),
                          {.distributions = {std::begin(distributions), std::end(distributions)},
                           .placements = {Placement::vectors},
                           .seed = 500 + static_cast<uint64_t>(index)},
                          stream);
  });
}

// A value that is not finite reaches the outputs whose taps meet it, and no others: transposed classes
// multiply only their own taps, and nothing is multiplied by zeros that fill up a tile. Among them rows and
// pieces of rows that end within sectors, which neighbouring tiles compute in different ways.
TEST_F(Thin, WhatIsNotFiniteReachesOnlyTheOutputsThatMeetIt) {
  const std::vector<Problem> problems = in_two_modes(std::vector<const char*>{
      "conv_transpose3d(3,16,k=3,s=2) | swish @ 2x3x3x24x8 ", "conv_transpose2d(2,5,k=4,s=3,p=1) @ 2x2x7x6 ",
      "conv3d(3,16,k=4) | relu @ 2x3x6x9x7 ", "conv2d(3,9,k=3,p=2,s=2) | tanh @ 2x3x9x11 ",
      "conv2d(1,32,k=5,p=2) | relu @ 2x1x40x257 ",
      "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 3x3x6x8x9 ",
      "conv2d(3,40,k=3,p=1) | hardswish | group_norm(5) | relu @ 3x3x33x35 ",
      "conv_transpose2d(2,8,k=3,s=2) | swish | group_norm(2) | silu @ 3x2x9x24 "});
  const std::vector<std::string> rows = rows_of(problems);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const auto i = static_cast<size_t>(index);
    return not_finite_errors(problems[i], std::span(&rows[i], 1), stream);
  });
}

TEST_F(Thin, RoundsOperandsToTf32) {
  const std::vector<Problem> problems = thin_forward_problems(gpu);
  const std::vector<std::string> rows = rows_of(problems);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    // The row that is compared with the reference: its kernel is there.
    std::vector<std::string> tried{rows[static_cast<size_t>(index)]};
    if (problem.precision == Precision::tf32_away) tried.push_back("direct");
    return rounding_errors(problem, tried, stream);
  });
}

// A mean has thousands of outputs, over which the rounding of x averages out, but not that of weights. In
// near_f32 they are kept in two parts, in "fast" rounded otherwise from plane to plane: rounded once it is
// seen. Operands have more bits than tf32.
TEST_F(Thin, MeansOfNearF32AndFastAreNotOffByRoundedWeights) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 2x3x16x32x32 near_f32",
        "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 2x3x16x32x32 tf32 fast",
        "conv2d(3,24,k=3,p=1) | gelu | group_norm(6) | swish | mean @ 5x3x40x41 near_f32"})
    problems.push_back(Problem::parse(text, gpu));
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    Operands given = random_operands(problem, Distribution::uniform, 21);
    std::vector<std::vector<double>> rounded = given.parameters;
    const auto give_more_bits = [](std::vector<double>& values) {
      for (size_t i = 0; i < values.size(); ++i) {
        const double x = round_to_tf32(values[i]);
        const double part = std::fmod(0.618034 * static_cast<double>(i), 1.0);  // of the last bit of tf32
        values[i] = static_cast<float>(x + part * std::ldexp(1.0, std::ilogb(x == 0 ? 1 : x) - 10));
      }
    };
    give_more_bits(given.input);
    give_more_bits(given.parameters[0]);
    for (size_t i = 0; i < rounded[0].size(); ++i) rounded[0][i] = round_to_tf32(given.parameters[0][i]);
    const Accuracy whole{.tf32 = Accuracy::Tf32::weights_whole};
    const std::vector<double> exact = expected_output(problem, given.input, given.parameters, whole).values;
    const auto distance = [&](const std::vector<double>& values) {
      double sum = 0;
      for (size_t i = 0; i < exact.size(); ++i) sum += (values[i] - exact[i]) * (values[i] - exact[i]);
      return std::sqrt(sum / static_cast<double>(exact.size()));
    };
    const double limit = 0.3 * distance(expected_output(problem, given.input, rounded, whole).values);
    const bool is_fast = problem.numerics == Numerics::fast;
    for (const std::string row : {"thin_wgmma", is_fast ? "thin_wgmma" : "thin_samples"}) {
      if (rows_named(row, problem).empty()) return row + " does not take " + problem.text();
      const double error = distance(run(plan(problem, {row, ""}), given, stream).output);
      if (!(error <= limit))
        return row + " is off by " + std::to_string(1e6 * error) + "e-6 where " +
               std::to_string(1e6 * limit) + "e-6 are allowed: " + problem.text();
    }
    return std::string();
  });
}

// Two products before a mean of many positions and three of few, dithered weights, functions as exact as f32
// in 16 bits; by every row.
TEST_F(Thin, AgreesWithTheReferenceInOtherNumerics) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 9x3x9x13x14 near_f32",
        "conv2d(5,33,k=3,s=2,p=1) | swish | group_norm(3) | gelu | mean @ 9x5x51x49 near_f32 nhwc",
        "conv1d(2,64,k=9,p=4) | instance_norm(affine=true) | relu | mean @ 9x2x600 near_f32",
        "conv2d(3,8,k=3) | relu | mean @ 5x3x9x9 near_f32",
        "conv2d(3,24,k=3,p=1) | silu | group_norm(6) | gelu @ 3x3x17x18 near_f32",
        "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 9x3x19x12x13 tf32 fast",
        "conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 2x3x4x6x5 bf16 strict",
        "conv2d(8,64,k=5,p=2) | swish | group_norm(4) | gelu @ 2x8x24x25 f16 strict",
        "conv3d(3,16,k=4) | sigmoid | group_norm(4) | silu | mean @ 3x3x6x9x10 f16 nhwc strict"})
    problems.push_back(Problem::parse(text, gpu));
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const Check check{.distributions = {Distribution::uniform, Distribution::normal},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 1500 + static_cast<uint64_t>(index),
                      .options = {.statistics = true}};
    return forward_errors(problem, rows_named("thin_", problem), check, stream);
  });
}

TEST_F(Thin, AgreesWithTheReferenceOnRandomProblems) {
  const uint64_t first = base_seed() + 3'000'000;
  const int64_t tried = try_for(6, [first](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const Problem problem = random_thin_problem(seed, gpu);
    const std::vector<std::string> rows = rows_in_turn(thin_rows(problem), index, 1, turn());
    if (rows.empty()) return "no thin row takes " + problem.text();
    const size_t next = seed % std::size(distributions);
    const Check check{.distributions = {distributions[next], Distribution::normal},
                      .placements = {placements[seed % std::size(placements)]},
                      .seed = seed};
    return forward_errors(problem, rows, check, stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << '\n';
  EXPECT_GT(tried, 0);
}

// More tiles than are computed at a time: first and second passes of different samples run side by side, and
// what one of them leaves in memory is read by another block while the samples after it are on their way.
TEST_F(Thin, AgreesWithTheReferenceOnManySamples) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv2d(3,8,k=3,p=1) | swish | group_norm(2) | silu @ 700x3x33x31 ",
        "conv2d(2,24,k=3) | prelu(per=channel) | group_norm(3) @ 600x2x18x37 ",
        "conv1d(2,20,k=5) | group_norm(4) | relu @ 3000x2x68 ",
        "conv_transpose2d(2,12,k=4,s=2,p=1) | hardswish | group_norm(3) | gelu @ 500x2x16x17 "}) {
    for (const char* const mode : {"f32", "tf32 nhwc", "bf16"})
      problems.push_back(Problem::parse(text + std::string(mode), gpu));
  }
  const std::vector<std::string> rows = rows_of(problems);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const auto i = static_cast<size_t>(index);
    return forward_errors(problems[i], std::span(&rows[i], 1),
                          {.placements = {Placement::vectors}, .seed = 700 + static_cast<uint64_t>(index)},
                          stream);
  });
}

// Same bits in every run, for every place in a batch (of a size that has the same kernel), with statistics
// asked for and without.
TEST_F(Thin, GivesTheSameBits) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 4x3x9x17x19 ",
        "conv_transpose3d(3,16,k=3,s=2) | swish | group_norm(4) | hardswish @ 5x3x6x10x11 ",
        "conv2d(3,40,k=3,p=1) | gelu | group_norm(5) | swish @ 9x3x60x61 ",
        "conv2d(8,24,k=4,p=2) | hardswish | group_norm(4) | silu @ 5x8x40x41 ",
        "conv2d(3,24,k=3,p=1) | gelu | group_norm(6) | swish | mean @ 5x3x40x41 "}) {
    for (const char* const mode : modes) problems.push_back(Problem::parse(text + std::string(mode), gpu));
  }
  const std::vector<std::string> rows = rows_of(problems);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const auto i = static_cast<size_t>(index);
    return other_bits(problems[i], std::span(&rows[i], 1), 20, stream);
  });
}

using ThinBackward = GpuTest;

// The row whose kernels the compiler has soonest, for the statistics.
std::string soonest(const Problem& problem) {
  return rows_named("thin_cores", problem).empty() ? "" : "thin_cores";
}

// Eight of thirteen of the forward's problems, others in other turns: a backward kernel takes the compiler
// three seconds. The forward is by the row that it is tested by.
TEST_F(ThinBackward, AgreesWithTheReferenceInEveryMode) {
  const std::vector<Problem> problems = thin_problems(gpu);
  const std::vector<std::string> rows = rows_of(problems);
  const std::vector<int64_t> chosen = thin_gradients_in_turn(std::ssize(problems), turn());
  EXPECT_GE(chosen.size(), 48u);  // with those below it is over sixty
  std::mutex mutex;
  GradientComparison total;
  int64_t refused = 0;
  try_all(std::ssize(chosen), [&](int64_t place, const GpuStream& stream) {
    const int64_t index = chosen[static_cast<size_t>(place)];
    const BackwardProblem problem(problems[static_cast<size_t>(index)]);
    if (!accepts(problem)) {  // its weights, split, take more than shared memory
      const std::lock_guard lock(mutex);
      ++refused;
      return std::string();
    }
    GradientComparison own;
    std::string errors = backward_errors(problem,
                                         {.distributions = {Distribution::uniform, Distribution::normal},
                                          .placements = {Placement::elements, Placement::vectors},
                                          .seed = 700 + static_cast<uint64_t>(index)},
                                         stream, &own, rows[static_cast<size_t>(index)]);
    const std::lock_guard lock(mutex);
    total += own;
    return errors;
  });
  std::cout << refused << " refused; " << total.checked << " elements checked, " << total.unchecked
            << " not\n";
  EXPECT_LE(refused, 2);
  EXPECT_GT(total.checked, total.unchecked);
}

// More samples than the ring has room for, more tickets than blocks.
TEST_F(ThinBackward, AgreesWithTheReferenceOnManySamples) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 300x3x5x7x6 tf32",
        "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 20x3x19x12x13 tf32 fast",
        "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 40x3x9x13x14 near_f32",
        "conv2d(3,16,k=3,p=1) | swish | group_norm(4) | gelu @ 40x3x9x14 bf16 strict",
        "conv_transpose3d(3,16,k=3,s=2) | swish | group_norm(4) | hardswish @ 150x3x2x4x5",
        "conv1d(2,8,k=3,p=1) | relu @ 700x2x31 bf16", "conv2d(3,24,k=3,s=2) | group_norm(6) @ 300x3x9x11"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return backward_errors(BackwardProblem(problems[static_cast<size_t>(index)]),
                           {.placements = {Placement::vectors}, .seed = 900}, stream);
  });
}

// Magnitudes at both ends of f32, offsets, and what is not finite: operands may be halves, scaled.
TEST_F(ThinBackward, AgreesWithTheReferenceOnHardData) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 3x3x6x9x19 tf32",
        "conv_transpose2d(3,8,k=3,s=2) | swish | group_norm(4) | hardswish @ 2x3x9x16 tf32",
        "conv2d(4,24,k=3,p=1) | relu | group_norm(6) @ 2x4x11x16 bf16"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return backward_errors(BackwardProblem(problems[static_cast<size_t>(index)]),
                           {.distributions = {std::begin(distributions), std::end(distributions)},
                            .placements = {Placement::vectors},
                            .seed = 950 + static_cast<uint64_t>(index)},
                           stream);
  });
}

TEST_F(ThinBackward, AgreesWithTheReferenceOnRandomProblems) {
  const uint64_t first = base_seed() + 4'000'000;
  std::mutex mutex;
  int64_t refused = 0;
  const int64_t tried = try_for(6, [&](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const BackwardProblem problem(random_thin_problem(seed, gpu));
    if (!accepts(problem)) {
      const std::lock_guard lock(mutex);
      ++refused;
      return std::string();
    }
    return backward_errors(problem, {.placements = {placements[seed % std::size(placements)]}, .seed = seed},
                           stream, nullptr, soonest(problem.forward));
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << ", " << refused
            << " refused\n";
  EXPECT_GT(tried, 4 * refused);
}

// Few of the first one's, many of the second one's.
TEST_F(ThinBackward, ComputesAnySubsetOfTheGradients) {
  std::vector<BackwardProblem> subsets;
  for (const char* const text :
       {"conv2d(3,8,k=3,p=1) | prelu(per=channel) | group_norm(2) | residual_add @ 2x3x9x7 tf32",
        "conv_transpose2d(2,5,k=3,s=2) | channel_add | swish | mean @ 3x2x5x6"}) {
    BackwardProblem problem(Problem::parse(text, gpu));
    const bool many = !subsets.empty();
    for (const std::vector<bool>& wanted : few_and_many(problem.wanted.size())) {
      const auto count = static_cast<size_t>(std::count(wanted.begin(), wanted.end(), true));
      problem.wanted = wanted;
      if ((2 * count > wanted.size()) == many) subsets.push_back(problem);
    }
  }
  try_all(std::ssize(subsets), [&](int64_t index, const GpuStream& stream) {
    const BackwardProblem& problem = subsets[static_cast<size_t>(index)];
    return backward_errors(problem, {.placements = {Placement::elements}, .seed = 4}, stream, nullptr,
                           soonest(problem.forward));
  });
}

TEST_F(ThinBackward, GivesTheSameBits) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 40x3x7x13x11 tf32",
        "conv_transpose3d(3,16,k=3,s=2) | swish | group_norm(4) | hardswish @ 20x3x4x10x11"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const BackwardProblem problem(problems[static_cast<size_t>(index)]);
    const BackwardPlan plan = plan_backward(problem);
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 12);
    const GradientValues once = run(plan, operands, stream).gradients;
    for (int i = 0; i < 20; ++i) {
      if (!same_bits(once, run(plan, operands, stream).gradients))
        return "other bits in run " + std::to_string(i) + ": " + problem.text();
    }
    return std::string();
  });
}

TEST_F(ThinBackward, GradientsOfAnEmptyBatchAreZero) {
  const GpuStream stream;
  for (const char* const text :
       {"conv2d(3,8,k=3) | group_norm(2) @ 0x3x9x7", "conv1d(1,4,k=3) | relu @ 0x1x9"}) {
    const std::string errors = backward_errors(BackwardProblem(Problem::parse(text, gpu)), {}, stream);
    if (!errors.empty()) ADD_FAILURE() << errors;
  }
}

}  // namespace
}  // namespace onepass::testing
