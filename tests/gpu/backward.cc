// The backward rows on a GPU against the reference: all tails of the list, random ones, hard data, large
// tails.
#include <iostream>
#include <limits>
#include <mutex>

#include "gpu/pool.h"
#include "onepass/onepass.h"
#include "plan/strategy.h"
#include "support/cases.h"
#include "support/random_problem.h"

namespace onepass::testing {
namespace {

using Backward = GpuTest;

const Device gpu = Device::cuda();

// Statistics by the plan's row, or by any row, another one in each turn.
void check_all(const std::vector<Problem>& problems, const Check& check, bool by_any_row = false) {
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    Check own = check;
    own.seed += static_cast<uint64_t>(index);
    const std::vector<std::string> rows = rows_in_turn(accepting_rows(problem), index, 1, turn());
    return backward_errors(BackwardProblem(problem), own, stream, nullptr, by_any_row ? rows.at(0) : "");
  });
}

TEST_F(Backward, AgreesWithTheReferenceOnEveryTailOfTheList) {
  const std::vector<Problem> tails = tails_of_the_list(gpu);
  EXPECT_GT(tails.size(), 50u);
  check_all(tails, {.distributions = {Distribution::uniform, Distribution::normal, Distribution::offset_100}},
            true);
}

TEST_F(Backward, AgreesWithTheReferenceOnTheTailsOfConvolutions) {
  const std::vector<Problem> tails = in_turn(tails_of_convolutions(gpu), turn());
  EXPECT_GT(tails.size(), 15u);
  check_all(tails, {.placements = {Placement::elements, Placement::vectors}, .seed = 1000});
}

TEST_F(Backward, AgreesWithTheReferenceOnHardData) {
  std::vector<Problem> problems;
  for (const char* const text : hard_tails) problems.push_back(Problem::parse(text, gpu));
  check_all(problems, {.distributions = {std::begin(distributions), std::end(distributions)},
                       .placements = {Placement::vectors},
                       .seed = 2000});
}

TEST_F(Backward, AgreesWithTheReferenceOnLargeTails) {
  std::vector<Problem> problems;
  for (const char* const text : large_tails) problems.push_back(Problem::parse(text, gpu));
  for (const char* const text : {
           "swish | group_norm(4) | hardswish @ 2x16x31x63x63",
           "gelu | group_norm(8) @ 1x64x258x258",
           "relu | group_norm(8) @ 1x128x34x34x34",
           "hardswish | group_norm(4) | mean @ 5x16x13x29x29",
           "swish | group_norm(4) | hardswish @ 1x16x31x63x63 bf16",
           "gelu | group_norm(8) @ 1x64x130x130 f16 nhwc",
           // Several samples of a cluster, whose vectors take turns in its memory.
           "mish | group_norm(8) | gelu @ 7x64x60x61 f16 nhwc",
           "softplus | group_norm(16) | channel_mul | elu @ 9x64x30x31 nhwc",
           "relu | group_norm(8) @ 1x128x34x34x34 bf16",
           "hardswish | group_norm(4) | mean @ 9x16x13x29x29 bf16 nhwc",
           "hardswish | group_norm(4) | mean @ 700x16x5x5",
           "instance_norm(affine=true) | leaky_relu(0.01) @ 1x3x96x96x96",
           "group_norm(1) | silu @ 2x1280x17x9",
           "group_norm(1) | silu @ 2x1280x17x9 f16 nhwc",
           "channel_add(per=sample) | group_norm(32) | silu @ 3x320x32x32 bf16",
           "prelu(per=channel) | group_norm(2) | channel_mul(per=sample) | residual_add @ 2x64x65x67",
           "gelu | residual_add @ 3x17x101x99",
           "swish | mean @ 3x5x100003",
           "relu | instance_norm | swish @ 100x40x3x7 nhwc",
       }) {
    problems.push_back(Problem::parse(text, gpu));
  }
  check_all(problems, {.placements = {Placement::elements, Placement::vectors}, .seed = 3000});
}

TEST_F(Backward, AgreesWithTheReferenceOnRandomTails) {
  const uint64_t first = base_seed();
  std::mutex mutex;
  GradientComparison total;
  int64_t refused = 0;
  const int64_t tried = try_for(6, [&](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const BackwardProblem problem = random_tail_backward(seed, gpu);
    if (!accepts(problem)) {  // strided in a way only the CPU takes
      const std::lock_guard lock(mutex);
      ++refused;
      return std::string();
    }
    GradientComparison own;
    const size_t next = seed % std::size(distributions);
    std::string errors = backward_errors(problem,
                                         {.distributions = {distributions[next]},
                                          .placements = {placements[seed % std::size(placements)]},
                                          .seed = seed},
                                         stream, &own);
    const std::lock_guard lock(mutex);
    total += own;
    return errors;
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << ", " << refused
            << " refused; " << total.checked << " elements checked, " << total.unchecked << " not\n";
  EXPECT_GT(tried, refused + refused / 2);
  EXPECT_GT(total.checked, total.unchecked);
}

TEST_F(Backward, AgreesWithTheReferenceOnRandomLargeTails) {
  const uint64_t first = base_seed() + 2'000'000;
  const int64_t tried = try_for(6, [first](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const BackwardProblem problem(random_large_tail(seed, gpu));
    return backward_errors(problem, {.placements = {placements[seed % std::size(placements)]}, .seed = seed},
                           stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << '\n';
  EXPECT_GT(tried, 0);
}

// Every operation at its corners and beyond, with gradients that are and are not finite.
TEST_F(Backward, HasTheCornersOfTheReference) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> corners = corner_values();
  const Shape sizes{1, 1, static_cast<int64_t>(corners.size())};
  const std::vector<Pointwise> stages = corner_stages();
  try_all(std::ssize(stages), [&](int64_t index, const GpuStream& stream) {
    const Pointwise& pointwise = stages[static_cast<size_t>(index)];
    const BackwardProblem problem(Problem(Block({pointwise}), sizes, DType::f32, gpu));
    const BackwardPlan backward = plan_backward(problem);
    BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 1);
    operands.forward.input = corners;
    for (const double gradient : {1.0, -2.5, 0.0, infinity, nan}) {
      operands.output_gradient.assign(corners.size(), gradient);
      const std::string errors = compare(problem, operands, run(backward, operands, stream)).errors;
      if (!errors.empty()) return problem.text() + ", gradient " + std::to_string(gradient) + ": " + errors;
    }
    return std::string();
  });
}

TEST_F(Backward, ComputesAnySubsetOfTheGradients) {
  std::vector<BackwardProblem> subsets;
  for (const char* const text :
       {"prelu(per=channel) | group_norm(2) | channel_mul(per=sample) | residual_add @ 3x6x5x7",
        "residual_add | group_norm(3) | swish | prelu @ 3x6x5x7 bf16 nhwc",
        "group_norm(2) | prelu | mean @ 2x6x11"}) {
    BackwardProblem problem(Problem::parse(text, gpu));
    for (const std::vector<bool>& wanted : few_and_many(problem.wanted.size())) {
      problem.wanted = wanted;
      subsets.push_back(problem);
    }
  }
  try_all(std::ssize(subsets), [&](int64_t index, const GpuStream& stream) {
    return backward_errors(subsets[static_cast<size_t>(index)],
                           {.placements = {Placement::elements}, .seed = 4}, stream);
  });
}

// The input's gradient of the last sample, beside others and alone: every row that takes the tail.
TEST_F(Backward, ASampleHasTheBitsItHasAlone) {
  struct Item {
    Problem problem;
    std::string row;
  };
  std::vector<Item> items;
  for (const char* const text :
       {"swish | group_norm(4) | gelu @ 37x16x9x12", "mish | group_norm(4) | tanh @ 33x32x31x36 bf16 nhwc",
        "gelu | group_norm(8) | swish | mean @ 21x64x12x12 f16 nhwc"}) {
    const Problem problem = Problem::parse(text, gpu);
    for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
      if (row->refusal(BackwardProblem(problem)).empty()) items.push_back({problem, std::string(row->name)});
    }
  }
  try_all(std::ssize(items), [&](int64_t index, const GpuStream& stream) {
    const auto& [problem, row] = items[static_cast<size_t>(index)];
    const int64_t batch = problem.input.sizes[0];
    Problem single = problem;
    single.input.sizes[0] = single.output.sizes[0] = 1;
    const BackwardProblem together(problem), alone(single);
    const BackwardOperands operands = random_backward_operands(together, Distribution::normal, 6);
    const auto last = [batch](const std::vector<double>& values) {
      return std::vector<double>(values.end() - std::ssize(values) / batch, values.end());
    };
    const BackwardOperands own{{last(operands.forward.input), operands.forward.parameters},
                               last(operands.output_gradient)};
    const Place place(stream, Placement::vectors);
    const PlanOptions forward{"tail_streamed", ""};
    const auto of_all = run(plan_backward(together, {row, ""}), operands, place, forward).gradients.at(0);
    const auto of_one = run(plan_backward(alone, {row, ""}), own, place, forward).gradients.at(0);
    if (same_bits({last(of_all)}, {of_one})) return std::string();
    return row + " gives other bits beside others: " + problem.text();
  });
}

TEST_F(Backward, GradientsOfAnEmptyBatchAreZero) {
  std::vector<Problem> problems;
  for (const char* const text : {"swish | group_norm(2) | prelu | channel_mul @ 0x4x7x9",
                                 "group_norm(2) | mean @ 0x4x7x9 bf16 nhwc", "channel_add | tanh @ 0x4x7"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  check_all(problems, {});
}

}  // namespace
}  // namespace onepass::testing
