// What results/<GPU>.json belong to, as two hashes. Both are made without a GPU, in seconds.
#pragma once

#include <string>
#include <vector>

#include "onepass/problem.h"

namespace onepass::testing {

// The problems whose plans are hashed, forward and for gradients: lists of the suite, and what is measured.
std::vector<Problem> problems_of_results(const Device& device);
std::vector<Problem> gradients_of_results(const Device& device);

// Of what the GPU suite's lists do on this architecture: for each problem the row that is chosen, and by each
// row that takes it the kernels without comments and the launches (cuda/plan_hash.h). Host code that changes
// none of it, and comments of device code, leave the hash as it is.
std::string plans_hash(const std::string& architecture);

// Of the tests themselves, their lists and bounds: tests/gpu, tests/support, tests/cases.txt and
// python/tests_gpu. C++ comments do not count. Throws Error where they cannot be read.
std::string tests_hash();

}  // namespace onepass::testing
