// The problem strings of tests/cases.txt as a CPU has them: what asks for tf32, which it has not, is f32.
#pragma once

#include <string>
#include <vector>

#include "support/cases.h"

namespace onepass::testing {

inline std::vector<std::string> cpu_cases() {
  static const std::string precision = " tf32";
  std::vector<std::string> cases = read_cases();
  for (std::string& text : cases) {
    const size_t at = text.rfind(precision);
    if (at != std::string::npos) text.replace(at, precision.size(), " f32");
  }
  return cases;
}

}  // namespace onepass::testing
