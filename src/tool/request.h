// What the command line asks for, and the problems it means.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::tool {

// The command line as it was written; empty: not given.
struct Options {
  std::string block;
  std::string input;
  std::string dtype;
  std::string layout;
  std::string file;
  std::string device;
  std::string strategy;
  std::string target;
  std::string action;  // of cache
  int threads = 0;     // 0: all
  uint64_t seed = 1;
  double seconds = 1.5;
  bool peaks = false;
  bool small_pages = false;
  bool tune = false;
  bool json = false;

  PlanOptions plan_options() const { return {.strategy = strategy, .target = target, .tune = tune}; }
};

inline constexpr const char* default_cases = "tests/cases.txt";

// The problem strings of a file: one a line, '#' opens a comment. Throws Error naming a line that is none.
std::vector<Problem> read_problems(const std::string& path, const Device& device);
// The problem of BLOCK and --input, or of a problem string; those of --file. Throws Error for what is none,
// and for a strategy or a target that does not exist.
std::vector<Problem> requested_problems(const Options& options);
// The device of --device; cpu where it is not given.
Device requested_device(const Options& options);
// The same for a command that runs plans: throws Error where the device is an architecture or has no GPU.
Device runnable_device(const Options& options);
// How many threads the command uses; says so on stderr where it is fewer than asked for.
int requested_threads(const Options& options);

}  // namespace onepass::tool
