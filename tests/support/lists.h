// What the GPU suite goes through: its long lists of problems, the rows that take each, and the part of all
// pairs that one run takes.
//
// A kernel takes the compiler most of a second, so a run takes one of so many pairs of a problem and a row
// (turns_in_all). ONEPASS_TEST_TURN says which: as many runs, one of each turn, take every pair.
// scripts/gpu_test.py counts. Nothing here needs a GPU: tests/turns_test.cc goes through all turns.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "onepass/backward.h"
#include "onepass/problem.h"

namespace onepass::testing {

inline constexpr int64_t turns_in_all = 15;

struct ProblemAndRow {
  Problem problem;
  std::string row;
};

// The forward rows that take the problem.
std::vector<std::string> accepting_rows(const Problem& problem);
// Those of them whose names begin so.
std::vector<std::string> rows_named(const std::string& prefix, const Problem& problem);
bool accepts(const BackwardProblem& problem);

// So many of the rows of the problem at this index; in all turns every row.
std::vector<std::string> rows_in_turn(std::vector<std::string> rows, int64_t index, size_t count,
                                      int64_t turn);
// One row for each problem; in all turns every row of every problem. Empty where no row takes it.
using RowsOf = std::function<std::vector<std::string>(const Problem& problem)>;
std::vector<std::string> one_row_each(const std::vector<Problem>& problems, const RowsOf& rows_of,
                                      int64_t turn);
// One of so many problems; in all turns every problem.
std::vector<Problem> in_turn(const std::vector<Problem>& problems, int64_t turn);

// tests/cases.txt without f64, which no GPU row takes.
std::vector<Problem> gpu_cases(const Device& device);
// One of so many pairs of a case and a row. Pairs of matrix products, whose kernels take the compiler
// longest, are dealt by themselves: every turn has as many.
std::vector<ProblemAndRow> cases_in_turn(const Device& device, int64_t turn);

// Wide convolutions as matrix products, each in one or two of four modes.
std::vector<Problem> wide_problems(const Device& device);
// Rows of matrix products but gemm_mma, which takes what gemm_wgmma does and has a part of its own.
std::vector<std::string> wide_rows(const Problem& problem);

// For gemm_mma: convolutions whose taps along x are rows of the product, each in two of four modes.
std::vector<Problem> row_tap_problems(const Device& device);
// For gemm_mma: 16 bits whose window is x as it lies.
std::vector<Problem> copied_problems(const Device& device);
// These, and others of few channels.
std::vector<Problem> few_problems(const Device& device);

// Thin convolutions, each in two of four modes.
std::vector<Problem> thin_problems(const Device& device);
// These, and some whose operands are rounded with ties away from zero, which have no gradients.
std::vector<Problem> thin_forward_problems(const Device& device);
std::vector<std::string> thin_rows(const Problem& problem);
// Those whose gradients a turn takes, by index: eight of thirteen.
std::vector<int64_t> thin_gradients_in_turn(int64_t count, int64_t turn);

// Convolutions in groups, each a product by itself: channels of a group that fill tiles and that do not, both
// orders, groups of the norm that are one of the convolution's and a part of one, chains that read values of
// channels and tensors, means, strides, classes of transposed ones.
std::vector<Problem> grouped_problems(const Device& device);
// For gemm_boxes: boxes whose rows are neighbours and 8 x 8 positions, of several samples, taps in one window
// and in windows of their own, strides, dilation, classes, chunks of 16, 32 and 64 channels, whole and not;
// values that wait in registers for moments of slabs of one channel, of a part of eight, of tiles and more.
std::vector<Problem> box_problems(const Device& device);
// Few inputs a group, for the row "narrow": depthwise, groups of a few, one group; both orders, strides,
// dilation, classes of transposed ones; chunks of inputs, a tile's channels and a part of them.
std::vector<Problem> narrow_problems(const Device& device);
// The same in 16 bits, for the row "banded": segments along each dimension, several products for the taps of
// x, rows of inputs and outputs that begin anywhere, channels by eights, fours and one by one, tensors that
// the chain reads; several items of a warp, chunks of inputs.
std::vector<Problem> banded_problems(const Device& device);
// Convolutions of one tap and one input for each output, for the rows "scaled" and "scaled_backward".
std::vector<Problem> scaled_problems(const Device& device);
// Convolutions alone, for the row "narrow_backward".
std::vector<Problem> narrow_gradients(const Device& device);
// For gemm_pingpong: boxes that fill samples and that do not, values that leave by rows and by columns, one
// to three dimensions, rows of an odd number of outputs and of few, slabs of one channel to sixteen, chunks
// that channels do not fill, chains that read values of channels; many samples a block.
std::vector<Problem> pingpong_problems(const Device& device);
// Wide convolutions alone, for gradients.
std::vector<Problem> wide_gradients(const Device& device);

// What runs under compute-sanitizer, which slows kernels a hundredfold. Every row of both tables takes one of
// these.
struct SmallProblems {
  std::string prefix;  // of the rows that they are for
  std::vector<Problem> problems;
};
std::vector<SmallProblems> small_forward(const Device& device);
std::vector<Problem> small_backward(const Device& device);

}  // namespace onepass::testing
