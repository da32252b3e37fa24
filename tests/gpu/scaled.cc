// Convolutions of one tap and one input for each output on a GPU, by the rows "scaled" and "scaled_backward",
// against the reference.
#include "gpu/pool.h"
#include "onepass/onepass.h"

namespace onepass::testing {
namespace {

using Scaled = GpuTest;

const Device gpu = Device::cuda();
const std::vector<std::string> scaled{"scaled"};

TEST_F(Scaled, AgreesWithTheReference) {
  const std::vector<Problem> problems = scaled_problems(gpu);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    const Check check{.distributions = {Distribution::uniform, Distribution::normal,
                                        distributions[static_cast<size_t>(index) % std::size(distributions)]},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 2100 + static_cast<uint64_t>(index),
                      .options = {.statistics = problem.block.norm() != nullptr}};
    std::string errors = forward_errors(problem, scaled, check, stream);
    if (errors.empty()) errors = rounding_errors(problem, scaled, stream);
    return errors;
  });
}

TEST_F(Scaled, ASampleHasTheBitsItHasAlone) {
  std::vector<Problem> problems;
  for (const char* const text : {"conv2d(32,32,k=1,groups=32) | relu @ 5x32x28x28 bf16",
                                 "conv2d(64,64,k=1,groups=64) | swish | group_norm(8) @ 5x64x20x24 tf32 nhwc",
                                 "conv2d(48,48,k=1,groups=48) | group_norm(4) | gelu | mean @ 5x48x20x20"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return other_bits(problems[static_cast<size_t>(index)], scaled, 5, stream);
  });
}

std::string gradient_errors(const BackwardProblem& problem, const Check& check, const GpuStream& stream) {
  return backward_errors("scaled_backward", problem, check, stream);
}

TEST_F(Scaled, GradientsAgreeWithTheReference) {
  std::vector<Problem> problems = scaled_problems(gpu);
  std::erase_if(problems, [](const Problem& one) { return one.precision == Precision::tf32_away; });
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return gradient_errors(BackwardProblem(problems[static_cast<size_t>(index)]),
                           {.placements = {Placement::elements, Placement::vectors},
                            .seed = 2200 + static_cast<uint64_t>(index)},
                           stream);
  });
}

TEST_F(Scaled, GradientsAreThoseAskedFor) {
  std::vector<BackwardProblem> subsets;
  for (const char* const text : {"conv2d(8,8,k=1,groups=8) @ 2x8x11x12 bf16",
                                 "conv2d(12,12,k=1,groups=12) | swish | group_norm(3) @ 2x12x9x8 nhwc"}) {
    BackwardProblem problem(Problem::parse(text, gpu));
    for (const std::vector<bool>& wanted : few_and_many(problem.wanted.size())) {
      problem.wanted = wanted;
      subsets.push_back(problem);
    }
  }
  try_all(std::ssize(subsets), [&](int64_t index, const GpuStream& stream) {
    return gradient_errors(subsets[static_cast<size_t>(index)],
                           {.placements = {Placement::elements}, .seed = 6}, stream);
  });
}

}  // namespace
}  // namespace onepass::testing
