// Convolutions with few inputs a group, on a GPU, by the row "narrow", against the reference.
#include <iostream>

#include "gpu/pool.h"
#include "onepass/onepass.h"
#include "support/random_problem.h"

namespace onepass::testing {
namespace {

using Narrow = GpuTest;

const Device gpu = Device::cuda();
const std::vector<std::string> narrow{"narrow"};

TEST_F(Narrow, AgreesWithTheReference) {
  const std::vector<Problem> problems = narrow_problems(gpu);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    const Problem& problem = problems[static_cast<size_t>(index)];
    // Hard data by turns.
    const Check check{.distributions = {Distribution::uniform, Distribution::normal,
                                        distributions[static_cast<size_t>(index) % std::size(distributions)]},
                      .placements = {Placement::elements, Placement::vectors},
                      .seed = 1500 + static_cast<uint64_t>(index)};
    std::string errors = forward_errors(problem, narrow, check, stream);
    if (errors.empty()) errors = rounding_errors(problem, narrow, stream);
    return errors;
  });
}

// A weight that is not finite meets no zero outside the input.
TEST_F(Narrow, KeepsWhatIsNotFiniteWhereItIs) {
  const std::vector<Problem> problems = narrow_problems(gpu);
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    if (index % 3 != 0) return std::string();
    return not_finite_errors(problems[static_cast<size_t>(index)], narrow, stream);
  });
}

// Tiles follow the batch, and the order of a sum does not.
TEST_F(Narrow, ASampleHasTheBitsItHasAlone) {
  std::vector<Problem> problems;
  for (const char* const text :
       {"conv2d(32,32,k=5,p=2,groups=32) | relu @ 5x32x28x28 bf16",
        "conv2d(64,48,k=3,p=1) | swish @ 5x64x20x24 f32",
        "conv_transpose2d(16,16,k=4,s=2,p=1,groups=4) | relu @ 5x16x14x16 f32 nhwc"}) {
    problems.push_back(Problem::parse(text, gpu));
  }
  try_all(std::ssize(problems), [&](int64_t index, const GpuStream& stream) {
    return other_bits(problems[static_cast<size_t>(index)], narrow, 5, stream);
  });
}

TEST_F(Narrow, AgreesWithTheReferenceOnRandomProblems) {
  const uint64_t first = base_seed() + 9'000'000;
  const int64_t tried = try_for(4, [&](int64_t index, const GpuStream& stream) {
    const uint64_t seed = first + static_cast<uint64_t>(index);
    const Problem problem = seed % 2 == 0 ? random_problem(seed, gpu) : random_thin_problem(seed, gpu);
    const std::vector<std::string> rows = rows_named("narrow", problem);
    if (rows.empty()) return std::string();
    return forward_errors(problem, rows,
                          {.distributions = {Distribution::normal},
                           .placements = {placements[seed % std::size(placements)]},
                           .seed = seed},
                          stream);
  });
  std::cout << "seeds " << first << " to " << first + static_cast<uint64_t>(tried) - 1 << '\n';
}

}  // namespace
}  // namespace onepass::testing
