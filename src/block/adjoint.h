// The convolution that takes the gradient of another one's output to that of its input.
#pragma once

#include <string>

#include "onepass/block.h"

namespace onepass {

// Why the language has none; empty where it has.
std::string adjoint_refusal(const Conv& conv);
// Transposed where `conv` is not, and the other way round, with the same weights in memory.
Conv adjoint(const Conv& conv, const Shape& input_sizes, const Shape& output_sizes);

}  // namespace onepass
