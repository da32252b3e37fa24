// The table of strategies: each row is a name, what it accepts, what it costs and how it is built.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "onepass/plan.h"

namespace onepass {

// A built strategy: its numbers are fixed, its memory is the caller's.
class Kernel {
 public:
  virtual ~Kernel();
  virtual size_t workspace_bytes() const = 0;
  // The numbers it runs with, one "name: value" a line, for explain.
  virtual std::string describe() const = 0;
  virtual void run(const Arguments& arguments, void* workspace, Executor& executor) const = 0;
};

struct Strategy {
  std::string_view name;
  // Why it cannot take the problem; empty where it can.
  std::string (*refusal)(const Problem& problem);
  // Predicted seconds on this machine with problem.device.threads threads, from checked-in constants.
  double (*seconds)(const Problem& problem, const PlanOptions& options);
  std::shared_ptr<const Kernel> (*build)(const Problem& problem, const PlanOptions& options);
};

// In order of preference where costs are equal; the reference is last and accepts everything.
std::span<const Strategy* const> strategies();

}  // namespace onepass
