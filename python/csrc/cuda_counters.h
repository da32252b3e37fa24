// The counters of samples that are computed again, by number: what operators take and Python keeps.
#pragma once

#include <cstdint>

namespace onepass::torch_binding {

inline constexpr int64_t no_counter = -1;

// Where work on this GPU adds to the counter; null for no_counter. Throws Error for a number that is not one
// of this GPU's.
int64_t* counter_of(int64_t number, int device);

}  // namespace onepass::torch_binding
