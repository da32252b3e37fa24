// What the rows for gradients of tails share.
#pragma once

#include <string>

#include "cuda/tail/tail.h"

namespace onepass::cuda {

// The shape, with the gradients of the input's size.
TailShape backward_shape(const BackwardProblem& problem);

// Why no kernel that holds a slab on the chip can take the problem; empty where one can.
std::string held_slab_refusal(const BackwardProblem& problem);

}  // namespace onepass::cuda
