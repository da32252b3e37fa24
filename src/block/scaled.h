// A convolution of one tap and one input channel for each output: a product and a sum with a value of the
// channel. With what follows it is a tail, channel_mul | channel_add | ...
#pragma once

#include <string>

#include "onepass/backward.h"
#include "onepass/problem.h"

namespace onepass {

// Why the block's convolution is no such product; empty where it is one.
std::string scaled_refusal(const Problem& problem);

// The block as a tail: the same tensors in the same order, the convolution's parameters as one value a
// channel. It keeps the precision: where that rounds operands, those of its first stage are rounded.
Problem scaled_tail(const Problem& problem);
BackwardProblem scaled_tail(const BackwardProblem& problem);

}  // namespace onepass
