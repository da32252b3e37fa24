// What the tests on a GPU share: a pool of threads with a stream each, and the check of one problem.
//
// A kernel takes the compiler most of a second and the GPU microseconds, so problems are tried side by side.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "support/backward_harness.h"
#include "support/gpu.h"
#include "support/harness.h"
#include "support/lists.h"
#include "support/settings.h"

namespace onepass::testing {

// Fails at once after a kernel has broken the GPU's context, with the words of then: nothing works after
// that.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

// What is wrong, with the problem's text; empty where nothing is.
using Attempt = std::function<std::string(int64_t index, const GpuStream& stream)>;

// Tries each index < count on the pool. Every answer is a failure of the test; after twenty the rest is left.
void try_all(int64_t count, const Attempt& attempt);
// Tries 0, 1, 2 ... for so many seconds (times ONEPASS_TEST_SCALE) or until something is wrong, and eight in
// any case, on half of the pool: what is begun in time is finished, however long that takes beside other
// tests. Returns how many were tried.
int64_t try_for(int64_t seconds, const Attempt& attempt);

// The kernels of the problem by each row are compiled side by side: a test that goes on alone finds them.
void compile_all(const std::vector<ProblemAndRow>& list);
// What to ask for where each of so many gradients may be wanted or not: none, all, each alone and all but
// one.
std::vector<std::vector<bool>> few_and_many(size_t count);

struct Check {
  std::vector<Distribution> distributions{Distribution::normal};
  std::vector<Placement> placements{Placement::elements, Placement::vectors, Placement::mixed};
  uint64_t seed = 1;
  RunOptions options{};
};
// Runs the problem by each row, on data of each distribution, in each placement. Statistics are compared too
// where the options ask for them.
std::string forward_errors(const Problem& problem, std::span<const std::string> rows, const Check& check,
                           const GpuStream& stream);
// By every row that takes it; there must be one.
std::string forward_errors(const Problem& problem, const Check& check, const GpuStream& stream);

// A value that is not finite, in the input or in the weight, reaches the outputs whose taps meet it, and no
// others.
std::string not_finite_errors(const Problem& problem, std::span<const std::string> rows,
                              const GpuStream& stream);
// Operands of tf32 are rounded to nearest, ties to even or away from zero as the problem says: rounding x and
// the weights beforehand changes no bit. Empty for other problems.
std::string rounding_errors(const Problem& problem, std::span<const std::string> rows,
                            const GpuStream& stream);
// Whether a row gives the same bits in so many runs, with statistics asked for and without, and for each
// sample alone.
std::string other_bits(const Problem& problem, std::span<const std::string> rows, int runs,
                       const GpuStream& stream);

// The same backward. The forward, of which gradients take the statistics alone, is run where there are some,
// by this row, or by the plan's where it is empty.
std::string backward_errors(const BackwardProblem& problem, const Check& check, const GpuStream& stream,
                            GradientComparison* total = nullptr, const std::string& forward_row = "");
// By the rows whose names begin so.
std::string backward_errors(const std::string& prefix, const BackwardProblem& problem, const Check& check,
                            const GpuStream& stream);

}  // namespace onepass::testing
