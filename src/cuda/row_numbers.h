// The numbers of a row for one problem, searched once for its refusal, its cost and its kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>

#include "cuda/runtime/cut_for.h"
#include "cuda/runtime/gpu.h"
#include "plan/strategy.h"

namespace onepass::cuda {

inline const Device& device_of(const Problem& problem) { return problem.device; }
inline const Device& device_of(const BackwardProblem& problem) { return problem.forward.device; }

// What `search()` finds for the problem. A search may try thousands of tiles, and a plan asks three times: a
// thread keeps the numbers of its last problems. `variant` tells apart what one function searches in several
// ways. Numbers are kept for each type of `Search`.
template <class Numbers, class AnyProblem, class Search>
std::shared_ptr<const Numbers> searched(const AnyProblem& problem, int64_t variant, const Search& search) {
  struct Entry {
    AnyProblem problem;
    const Gpu* gpu;
    int64_t cut_for;  // an exported plan cuts tiles for another batch
    int64_t variant;
    std::shared_ptr<const Numbers> numbers;
  };
  constexpr size_t most_entries = 4;
  static thread_local std::deque<Entry> entries;
  const Gpu* const gpu = &gpu_of(device_of(problem));
  const int64_t cut_for = CutFor::instead_of(0);
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) {
    return entry.gpu == gpu && entry.cut_for == cut_for && entry.variant == variant &&
           entry.problem == problem;
  });
  if (found != entries.end()) return found->numbers;
  auto numbers = std::make_shared<const Numbers>(search());
  entries.push_front({problem, gpu, cut_for, variant, numbers});
  if (entries.size() > most_entries) entries.pop_back();
  return numbers;
}

// Numbers that are made of the problem alone.
template <class Numbers, class AnyProblem>
std::shared_ptr<const Numbers> numbers_of(const AnyProblem& problem) {
  return searched<Numbers>(problem, 0, [&] { return Numbers(problem); });
}

// A row of the table.
template <class RowKernel>
constexpr Strategy row_of(std::string_view name, std::string (*refusal)(const Problem&),
                          double (*seconds)(const Problem&, const PlanOptions&)) {
  return {name, refusal, seconds,
          [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
            return std::make_shared<const RowKernel>(problem);
          }};
}

// The same where the kernel's class has its refusal and its cost.
template <class Row>
constexpr Strategy row_of(std::string_view name) {
  return row_of<Row>(name, Row::refusal, Row::seconds);
}

}  // namespace onepass::cuda
