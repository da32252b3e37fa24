// The GPU of a device: asked of the driver once, or a typical one of a named architecture.
#pragma once

#include <string>
#include <vector>

#include "cuda/costs/gpu.h"
#include "onepass/problem.h"

namespace onepass::cuda {

// A device that names an architecture gets the typical GPU of it: sm_80, sm_86, sm_89, sm_90a, sm_100 or
// sm_120. Throws Error where there is no such GPU, no driver, or the architecture is unknown.
const Gpu& gpu_of(const Device& device);

// The architectures that have a typical GPU, oldest first.
const std::vector<std::string>& known_architectures();

}  // namespace onepass::cuda
