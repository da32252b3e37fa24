// The problem strings of tests/cases.txt.
#include "support/cases.h"

#include <fstream>

#include "onepass/error.h"

// The build defines it; without it tests run in the root of the source tree.
#ifndef ONEPASS_SOURCE_DIR
#define ONEPASS_SOURCE_DIR "."
#endif

namespace onepass::testing {

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

}  // namespace onepass::testing
