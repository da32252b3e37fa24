// Whether plans are tuned on the GPU: off by default.
#pragma once

#include "onepass/plan.h"

namespace onepass::torch_binding {

// The options of a plan that is made now, for work on this GPU's current stream: tuned where tuning is on and
// the stream is not being captured, which could not wait for a measurement.
PlanOptions plan_options(int device);

}  // namespace onepass::torch_binding
