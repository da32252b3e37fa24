// Compares a plan's output with the expected result and reports where the two differ most.
#pragma once

#include <cstdint>
#include <string>

#include "onepass/executor.h"
#include "onepass/plan.h"
#include "tool/buffers.h"
#include "tool/output.h"

namespace onepass::tool {

struct Comparison {
  int64_t elements = 0;
  int64_t failures = 0;   // elements outside their tolerance
  int64_t unchecked = 0;  // elements that no f32 implementation can compute (see expected.h)
  double max_abs_error = 0;
  double rms_error = 0;
  // The element with the largest error in units of its tolerance.
  Shape worst_index;  // empty where no element was checked
  double worst_actual = 0;
  double worst_expected = 0;
  double worst_tolerance = 0;

  bool passed() const { return failures == 0; }
  // For people: where it passed, nothing reads like a failure.
  std::string text() const;
  Json json() const;

 private:
  std::string unchecked_text() const;
};

// Samples [first, last) of the tensors after a run of the plan, each against the reference. Throws Error
// where this machine has not the memory for the reference.
Comparison compare_samples(const Plan& plan, const Tensors& tensors, int64_t first, int64_t last,
                           Executor& executor);

}  // namespace onepass::tool
