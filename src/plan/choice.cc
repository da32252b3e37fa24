// The choice among rows, its text, and checks of a call.
#include "plan/choice.h"

#include <cstdint>
#include <cstdio>
#include <iomanip>
#include <sstream>

namespace onepass {
namespace {

std::string milliseconds(double seconds) {
  std::ostringstream out;
  out << std::setprecision(3) << seconds * 1e3 << " ms";
  return out.str();
}

}  // namespace

const Candidate& choose(const std::vector<Candidate>& candidates, const std::string& forced) {
  const Candidate* best = nullptr;
  for (const Candidate& candidate : candidates) {
    if (!forced.empty() && candidate.strategy != forced) continue;
    if (!candidate.reason.empty()) {
      if (forced.empty()) continue;
      throw Error("strategy \"" + forced + "\" cannot run this problem: " + candidate.reason);
    }
    if (best == nullptr || candidate.seconds < best->seconds) best = &candidate;
  }
  if (best == nullptr) throw Error("no strategy accepts this problem");
  return *best;
}

void drop_row(std::vector<Candidate>& candidates, const std::string& row, const BuildError& error) {
  const std::string words = error.what();
  bool others = false;
  for (Candidate& candidate : candidates) {
    if (candidate.strategy == row) candidate.reason = words.substr(0, words.find('\n'));
    others = others || candidate.reason.empty();
  }
  if (!others) throw;
  std::fprintf(stderr, "onepass: warning: strategy %s is left out: %s\n", row.c_str(), words.c_str());
}

std::string explain_choice(const std::string& problem, const std::string& chosen, const Device& device,
                           const std::vector<Candidate>& candidates, const BuiltStrategy& built,
                           const Fitted* fit) {
  std::ostringstream out;
  out << problem << "\n\n";
  for (const Candidate& candidate : candidates) {
    out << (candidate.strategy == chosen ? "* " : "  ") << std::left << std::setw(24) << candidate.strategy;
    out << (candidate.reason.empty() ? milliseconds(candidate.seconds) + " predicted"
                                     : "no: " + candidate.reason)
        << '\n';
  }
  out << "\n" << chosen;
  if (device.kind == Device::Kind::cpu) {
    out << " with " << device.threads << (device.threads == 1 ? " thread\n" : " threads\n");
  } else {
    out << " on " << device.text() << '\n';
  }
  std::istringstream lines(built.describe());
  for (std::string line; std::getline(lines, line);) out << "  " << line << '\n';
  if (built.packed_bytes() > 0)
    out << "  frozen: " << built.packed_bytes() << " bytes of packed weights may be kept\n";
  for (const std::string& line : built.numerics()) out << "  numerics: " << line << '\n';
  if (fit != nullptr) {
    out << std::setprecision(3) << "  prediction: typically " << fit->typical
        << " times off, in one of ten cases " << fit->rarely << " (" << fit->problems << " drawn problems)\n";
  }
  return out.str();
}

void check_parameters(size_t given, const Problem& problem) {
  if (given == problem.parameters.size()) return;
  throw Error("the call has " + std::to_string(given) + " parameters, the block takes " +
              std::to_string(problem.parameters.size()));
}

void check_packed(const Problem& problem, const BuiltStrategy& built, const void* packed) {
  const size_t bytes = built.packed_bytes();
  if (bytes == 0) throw Error(problem.text() + ": its plan keeps no packed weights");
  if (packed == nullptr || reinterpret_cast<uintptr_t>(packed) % 64 != 0)
    throw Error("the packed weights must be " + std::to_string(bytes) + " bytes aligned to 64");
}

void check_call(size_t given_parameters, const Problem& problem, const BuiltStrategy& built,
                const void* workspace) {
  check_parameters(given_parameters, problem);
  const size_t bytes = built.workspace_bytes();
  if (bytes > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 64 != 0)) {
    throw Error("the workspace must be " + std::to_string(bytes) + " bytes aligned to 64");
  }
}

void check_executor(const Problem& problem, const Executor& executor) {
  if (executor.concurrency() > problem.device.threads) {
    throw Error("the executor runs " + std::to_string(executor.concurrency()) +
                " threads, the plan was made for at most " + std::to_string(problem.device.threads));
  }
}

}  // namespace onepass
