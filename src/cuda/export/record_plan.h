// A plan run into a Recording, with a name for every address it is given.
#pragma once

#include <cstdint>

#include "cuda/runtime/recording.h"
#include "onepass/backward.h"
#include "onepass/plan.h"

namespace onepass::cuda {

// The least address that is given out: no other number of a launch is as large.
inline constexpr int64_t first_address = int64_t{1} << 44;

// `workspace` becomes the address that the plan is given for it.
void record(const Plan& plan, bool with_statistics, Recording& recording, void*& workspace);
void record(const BackwardPlan& plan, Recording& recording, void*& workspace);

}  // namespace onepass::cuda
