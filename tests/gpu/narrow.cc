// Convolutions with few inputs a group and their gradients, on a GPU, by the rows "narrow" and
// "narrow_backward", against the reference.
#include <cmath>
#include <iostream>
#include <limits>
#include <span>

#include "gpu/pool.h"
#include "onepass/onepass.h"
#include "reference/backward.h"
#include "support/random_problem.h"

namespace onepass::testing {
namespace {

using Narrow = GpuTest;
using Banded = GpuTest;

const Device gpu = Device::cuda();

std::span<const std::string> one(const std::string& row) { return {&row, 1}; }

void check_list(const std::vector<Problem>& problems, const std::string& row, uint64_t seed) {
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    // Hard data by turns.
    const Check check{.distributions = {Distribution::uniform, Distribution::normal,
                                        distributions[static_cast<size_t>(index) % std::size(distributions)]},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = seed + static_cast<uint64_t>(index)};
    std::string errors = forward_errors(problem, one(row), check, stream);
    if (errors.empty()) errors = rounding_errors(problem, one(row), stream);
    return errors;
  });
}

void check_not_finite(const std::vector<Problem>& problems, const std::string& row) {
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    if (index % 3 != 0) return std::string();
    return not_finite_errors(problems[static_cast<size_t>(index)], one(row), stream);
  });
}

// Tiles follow the batch, and the order of a sum does not.
void check_bits(const std::vector<std::string>& texts, const std::string& row) {
  try_all(std::ssize(texts), [&](int64_t index, const GpuStream& stream) {
    return other_bits(Problem::parse(texts[static_cast<size_t>(index)], gpu), one(row), 5, stream);
  });
}

void check_random(uint64_t first, const std::string& row) {
  const int64_t tried = try_for(4, [&](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const Problem problem = seed % 2 == 0 ? random_problem(seed, gpu) : random_thin_problem(seed, gpu);
    const std::vector<std::string> rows = rows_named(row, problem);
    if (rows.empty()) return std::string();
    return forward_errors(problem, rows,
                          {.distributions = {Distribution::normal},
                           .placements = {placements[seed % std::size(placements)]},
                           .seed = seed},
                          stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << '\n';
}

TEST_F(Narrow, AgreesWithTheReference) { check_list(narrow_problems(gpu), "narrow", 1500); }
TEST_F(Banded, AgreesWithTheReference) { check_list(banded_problems(gpu), "banded", 1700); }

// A weight that is not finite meets no zero outside the input.
TEST_F(Narrow, KeepsWhatIsNotFiniteWhereItIs) { check_not_finite(narrow_problems(gpu), "narrow"); }
// And a value of x no zero of the band.
TEST_F(Banded, KeepsWhatIsNotFiniteWhereItIs) { check_not_finite(banded_problems(gpu), "banded"); }

TEST_F(Narrow, ASampleHasTheBitsItHasAlone) {
  check_bits({"conv2d(32,32,k=5,p=2,groups=32) | relu @ 5x32x28x28 bf16",
              "conv2d(64,48,k=3,p=1) | swish @ 5x64x20x24 f32",
              "conv_transpose2d(16,16,k=4,s=2,p=1,groups=4) | relu @ 5x16x14x16 f32 nhwc"},
             "narrow");
}
TEST_F(Banded, ASampleHasTheBitsItHasAlone) {
  check_bits({"conv2d(32,32,k=5,p=2,groups=32) | relu @ 5x32x28x28 bf16",
              "conv3d(16,16,k=3,p=1,groups=16) | swish @ 5x16x9x17x8 bf16 nhwc",
              "conv_transpose2d(16,16,k=4,s=2,p=1,groups=4) | relu @ 5x16x14x16 f16 nhwc"},
             "banded");
}

TEST_F(Narrow, AgreesWithTheReferenceOnRandomProblems) { check_random(base_seed() + 9'000'000, "narrow"); }
TEST_F(Banded, AgreesWithTheReferenceOnRandomProblems) { check_random(base_seed() + 9'500'000, "banded"); }

// --- Gradients of a convolution alone ---

using NarrowBackward = GpuTest;

std::string gradient_errors(const BackwardProblem& problem, const Check& check, const GpuStream& stream) {
  return backward_errors("narrow_backward", problem, check, stream);
}

TEST_F(NarrowBackward, AgreesWithTheReference) {
  const std::vector<Problem> problems = narrow_gradients(gpu);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return gradient_errors(BackwardProblem(problems[static_cast<size_t>(index)]),
                           {.placements = {Placement::elements, Placement::vectors},
                            .seed = 1600 + static_cast<uint64_t>(index)},
                           stream);
  });
}

TEST_F(NarrowBackward, GivesWhatIsAskedFor) {
  std::vector<BackwardProblem> subsets;
  for (const char* const text : {"conv2d(8,24,k=3,p=1,groups=8) @ 2x8x11x12 bf16",
                                 "conv_transpose2d(12,24,k=3,s=2,groups=6) @ 2x12x9x8 tf32 nhwc"}) {
    BackwardProblem problem(Problem::parse(text, gpu));
    for (const std::vector<bool>& wanted : few_and_many(problem.wanted.size())) {
      problem.wanted = wanted;
      subsets.push_back(problem);
    }
  }
  try_all(std::ssize(subsets), [&](int64_t index, const GpuStream& stream) {
    return gradient_errors(subsets[static_cast<size_t>(index)],
                           {.placements = {Placement::elements}, .seed = 4}, stream);
  });
}

// What lies beside the border meets no zero outside, and no zero that fills a box.
TEST_F(NarrowBackward, KeepsWhatIsNotFiniteWhereItIs) {
  const char* const texts[] = {"conv2d(8,8,k=3,p=1,groups=8) @ 2x8x13x21 f32",
                               "conv2d(16,16,k=5,p=2,groups=4) @ 2x16x9x11 tf32 nhwc",
                               "conv_transpose2d(6,6,k=4,s=2,p=1,groups=6) @ 2x6x9x7 f32"};
  try_all(std::ssize(texts), [&](int64_t index, const GpuStream& stream) {
    const BackwardProblem problem(Problem::parse(texts[index], gpu));
    BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 31);
    const double infinity = std::numeric_limits<double>::infinity();
    operands.output_gradient.front() = infinity;
    operands.forward.input.back() = -infinity;
    const Problem& forward = problem.forward;
    const reference::Gradients expected =
        reference::backward(forward.block, forward.input.sizes, operands.forward.input,
                            operands.forward.parameters, operands.output_gradient);
    const GradientValues found =
        run(plan_backward(problem, {"narrow_backward", ""}), operands, stream).gradients;
    GradientValues all{expected.input};
    all.insert(all.end(), expected.parameters.begin(), expected.parameters.end());
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t k = 0; k < all[i].size(); ++k) {
        if (std::isfinite(all[i][k]) == std::isfinite(found[i][k])) continue;
        return std::string(texts[index]) + ": gradient " + std::to_string(i) + ", element " +
               std::to_string(k);
      }
    }
    return std::string();
  });
}

TEST_F(NarrowBackward, GivesTheSameBits) {
  const char* const texts[] = {"conv2d(32,32,k=3,p=1,groups=32) @ 9x32x97x101 bf16 nhwc",
                               "conv3d(16,32,k=3,s=2,p=1,groups=4) @ 4x16x23x24x25 f32"};
  try_all(std::ssize(texts), [&](int64_t index, const GpuStream& stream) {
    const BackwardProblem problem(Problem::parse(texts[index], gpu));
    const BackwardPlan plan = plan_backward(problem, {"narrow_backward", ""});
    const BackwardOperands operands = random_backward_operands(problem, Distribution::normal, 12);
    const GradientValues once = run(plan, operands, stream).gradients;
    for (int i = 0; i < 5; ++i) {
      if (!same_bits(once, run(plan, operands, stream).gradients))
        return "other bits in run " + std::to_string(i) + ": " + problem.text();
    }
    return std::string();
  });
}

}  // namespace
}  // namespace onepass::testing
