// The problem strings of tests/cases.txt.
#pragma once

#include <string>
#include <vector>

namespace onepass::testing {

// One string a case, comments and empty lines left out. Throws Error when the file cannot be read.
std::vector<std::string> read_cases();

}  // namespace onepass::testing
