// ONEPASS_VERBOSE: one line on standard error for each call of a plan.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "onepass/cuda.h"
#include "onepass/executor.h"
#include "onepass/plan.h"

namespace onepass {

// What $ONEPASS_VERBOSE asked for at the first call: 0 nothing; 1 problem, device, row and predicted time;
// 2 also the measured time, for which the call waits.
int verbosity();

// While one lives, calls of this thread print nothing. Recording a plan is no call of a user.
class Unprinted {
 public:
  Unprinted();
  ~Unprinted();
  Unprinted(const Unprinted&) = delete;
  Unprinted& operator=(const Unprinted&) = delete;

 private:
  bool before_;
};

// Prints a line when a call has ended. Where it is measured, the time of a GPU is that between two events of
// its stream. A call that is captured into a graph does not run, and is not measured.
class CallLine {
 public:
  // `stream`: of a GPU's call.
  CallLine(const Device& device, std::optional<Stream> stream);
  void print(const std::string& problem, const std::string& strategy,
             const std::vector<Candidate>& candidates);

 private:
  double elapsed();

  Device device_;
  std::optional<Stream> stream_;
  bool is_captured_ = false;
  bool is_measured_ = false;
  double start_ = 0;                    // of a CPU's call
  std::unique_ptr<cuda::Timer> timer_;  // of a GPU's
};

// Runs a call, with its line where one was asked for.
template <class AnyPlan, class Call>
void run_call(const AnyPlan& plan, const Device& device, std::optional<Stream> stream, const Call& call) {
  if (verbosity() == 0) [[likely]] {
    call();
    return;
  }
  CallLine line(device, stream);
  call();
  line.print(plan.problem().text(), plan.strategy(), plan.candidates());
}

}  // namespace onepass
