// What the CPU strategies cost: seconds from multiply-adds, elements and bytes, with constants per SIMD
// target.
#pragma once

#include "cpu/block_kernel.h"
#include "cpu/isa.h"
#include "onepass/problem.h"

namespace onepass::cpu {

double predicted_seconds(const Problem& problem, const Isa& isa, const BlockKernel& kernel);

}  // namespace onepass::cpu
