// What the environment says about tests: ONEPASS_SEED, ONEPASS_TEST_SCALE, ONEPASS_TEST_TURN and
// ONEPASS_TEST_COMPILE_ONLY.
#pragma once

#include <cstdint>

namespace onepass::testing {

// ONEPASS_SEED, or a number that the turn decides: a run repeats unless asked otherwise. Printed once, on
// first use.
uint64_t base_seed();

// `count` times ONEPASS_TEST_SCALE (1 where it is not set), at least 1.
int64_t scaled(int64_t count);

// ONEPASS_TEST_TURN (0 where it is not set): which part of its long lists the GPU suite takes (lists.h).
// Throws Error where it is no number from 0 on.
int64_t turn();

// ONEPASS_TEST_COMPILE_ONLY=1: the GPU suite only compiles the kernels of its problems, into the cache. A
// machine without a GPU can do that with the stub of the driver.
bool compiles_only();

}  // namespace onepass::testing
