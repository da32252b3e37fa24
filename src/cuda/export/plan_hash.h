// The hash of what a plan does on a GPU: its row, its kernels and its launches.
//
// Comments and blank lines of device code do not count, nor does host code that changes neither kernels nor
// launches. Nothing is compiled or run: it takes milliseconds and no GPU. The plan's device must name an
// architecture.
#pragma once

#include <string>
#include <string_view>

#include "onepass/backward.h"
#include "onepass/plan.h"

namespace onepass::cuda {

// C++ or CUDA text without comments, blank lines and space at the ends of lines.
std::string without_comments(std::string_view text);

// Hexadecimal. With statistics asked for and without where the block has a norm.
std::string plan_hash(const Plan& plan);
std::string plan_hash(const BackwardPlan& plan);

}  // namespace onepass::cuda
