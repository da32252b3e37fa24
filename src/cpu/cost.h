// The cost model of the CPU rows: seconds from multiply-adds, elements and bytes, with constants per SIMD
// target.
#pragma once

#include "cpu/block_kernel.h"
#include "cpu/conv_backward.h"
#include "cpu/isa.h"
#include "cpu/slab_backward.h"
#include "cpu/slab_tail.h"
#include "cpu/tail_backward.h"
#include "onepass/problem.h"

namespace onepass::cpu {

double predicted_seconds(const Problem& problem, const Isa& isa, const BlockKernel& kernel);
double predicted_seconds(const Problem& problem, const Isa& isa, const SlabTail& kernel);
double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const SlabBackward& kernel);
double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const TailBackward& kernel);
double predicted_seconds(const BackwardProblem& problem, const Isa& isa, const ConvBackward& kernel);

// Whether the operation has no exponential and no error function.
bool is_cheap(Op op);

}  // namespace onepass::cpu
