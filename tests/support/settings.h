// What the environment says about random tests: ONEPASS_SEED and ONEPASS_TEST_SCALE.
#pragma once

#include <cstdint>

namespace onepass::testing {

// ONEPASS_SEED, or a fixed number: a run repeats unless asked otherwise. Printed once, on first use.
uint64_t base_seed();

// `count` times ONEPASS_TEST_SCALE (1 where it is not set), at least 1.
int64_t scaled(int64_t count);

}  // namespace onepass::testing
