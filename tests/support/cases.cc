// The problem strings of tests/cases.txt, and the corners of operations.
#include "support/cases.h"

#include <fstream>
#include <limits>

#include "onepass/error.h"

// The build defines it; without it tests run in the root of the source tree.
#ifndef ONEPASS_SOURCE_DIR
#define ONEPASS_SOURCE_DIR "."
#endif

namespace onepass::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

std::vector<std::string> read_cases() {
  const std::string path = ONEPASS_SOURCE_DIR "/tests/cases.txt";
  std::ifstream file(path);
  if (!file) throw Error("cannot read " + path + ": run from the root of the source tree");
  std::vector<std::string> cases;
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find_first_not_of(" \t\r");
    if (first != std::string::npos && line[first] != '#') cases.push_back(line.substr(first));
  }
  return cases;
}

std::vector<Pointwise> corner_stages() {
  std::vector<Pointwise> stages;
  for (int i = 0; i < op_count; ++i) {
    const Op op = static_cast<Op>(i);
    const Per per = argument_kind(op) == ArgumentKind::channel ? Per::channel : Per::tensor;
    const int constants = constant_count(op);
    stages.push_back({op, constants > 0 ? -3.0 : 0.0, constants > 1 ? 3.0 : 0.0, per});
    if (constants < 2) continue;
    stages.push_back({op, 0, infinity, per});
    stages.push_back({op, -infinity, 6, per});
    stages.push_back({op, 1, 1, per});
    if (op != Op::hardtanh) stages.push_back({op, 3, -3, per});
  }
  return stages;
}

std::vector<double> corner_values() {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  return {0,  -0.0, -3,  3,     6,        -6,   20,        20.5, 25, -1e-3,
          85, -85,  104, -1e15, infinity, 1e15, -infinity, nan,  1,  -1};
}

}  // namespace onepass::testing
