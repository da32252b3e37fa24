// Numbers that a row searches for a problem, kept for as long as the plan asks for them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "onepass/problem.h"

namespace onepass::cuda {

// A row's refusal, cost and build ask for the same numbers: those of a thread's last problems are kept.
// `variant` tells apart what the same function searches in several ways. Called from one place for each type
// of `Search`: the numbers belong to it.
template <class Numbers, class Search>
std::shared_ptr<const Numbers> searched(const Problem& problem, int64_t variant, const Search& search) {
  struct Entry {
    Problem problem;
    int64_t variant;
    std::shared_ptr<const Numbers> numbers;
  };
  constexpr size_t most_entries = 4;
  static thread_local std::deque<Entry> entries;
  for (const Entry& entry : entries) {
    if (entry.variant == variant && entry.problem == problem) return entry.numbers;
  }
  auto numbers = std::make_shared<const Numbers>(search());
  entries.push_front({problem, variant, numbers});
  if (entries.size() > most_entries) entries.pop_back();
  return numbers;
}

}  // namespace onepass::cuda
