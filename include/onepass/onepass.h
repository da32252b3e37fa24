// onepass: convolution blocks in one pass over memory. This header is the whole public interface.
#pragma once

#include "onepass/backward.h"  // IWYU pragma: export
#include "onepass/block.h"     // IWYU pragma: export
#include "onepass/error.h"     // IWYU pragma: export
#include "onepass/executor.h"  // IWYU pragma: export
#include "onepass/plan.h"      // IWYU pragma: export
#include "onepass/problem.h"   // IWYU pragma: export
#include "onepass/tensor.h"    // IWYU pragma: export
