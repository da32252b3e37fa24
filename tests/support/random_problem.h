// Random valid problems that span the block language, the element types, the layouts and odd strides.
#pragma once

#include <cstdint>

#include "onepass/backward.h"
#include "onepass/problem.h"

namespace onepass::testing {

// The same seed gives the same problem. At most 300,000 multiply-adds and 20,000 elements in any tensor.
Problem random_problem(uint64_t seed, Device device = Device::cpu());
// A dense one of a thin convolution (at most 512 terms and 64 channels, no groups), in any precision.
Problem random_thin_problem(uint64_t seed, Device device);
// With a convolution of 16 channels and more on both sides, no groups and, where transposed, no stride.
Problem random_wide_problem(uint64_t seed, Device device);
// With 3 to 26 inputs in a group and 2 outputs or more, of any stride.
Problem random_few_problem(uint64_t seed, Device device);
// The backward of a random block without a convolution: gradients of other types and strides, some not
// wanted.
BackwardProblem random_tail_backward(uint64_t seed, Device device = Device::cpu());
// A random dense block without a convolution on 50,000 to about 3,000,000 elements: slabs that no single
// thread block holds, and so many that no GPU takes all at a time.
Problem random_large_tail(uint64_t seed, Device device = Device::cpu());
// The same of a random convolution alone.
BackwardProblem random_conv_backward(uint64_t seed, Device device = Device::cpu());

}  // namespace onepass::testing
