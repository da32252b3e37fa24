// The least time a block can take, whatever its convolution costs. On a CPU: write the output and evaluate
// each activation once. On a GPU: read every input and write the output.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "onepass/plan.h"
#include "tool/buffers.h"
#include "tool/output.h"

namespace onepass::tool {

struct Floor {
  double read = 0;  // seconds; counted on a GPU only
  double write = 0;
  std::vector<std::pair<std::string, double>> activations;  // stage and seconds, in the order of the block

  double activation_seconds() const;
  double seconds() const { return read + write + activation_seconds(); }
  std::string text() const;
  Json json() const;
};

// Each pointwise stage is timed alone, on tensors that stay in the cache, and scaled to the problem's
// elements. Overwrites the output.
Floor measure_floor(const Problem& problem, const Buffer& output, const std::string& target);
// At the rate of the GPU's copy.
Floor gpu_floor(const Problem& problem);

}  // namespace onepass::tool
