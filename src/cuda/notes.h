// The lines "numerics: ..." of explain: what a kernel computes in less than f32, in the same words for every
// row.
#pragma once

#include <string>
#include <vector>

#include "cuda/source.h"

namespace onepass::cuda {

using Notes = std::vector<std::string>;

namespace note {
inline const std::string operands_rounded = "operands of the convolution are rounded to tf32";
inline const std::string operands_rounded_away =
    "operands of the convolution are rounded to tf32, ties away from zero";
inline const std::string input_rounded = "the convolution's input is rounded to tf32";
inline const std::string weights_dithered = "weights are dithered: tf32 values that are right on average";
inline const std::string gradients_rounded = "gradients between the products are rounded to tf32";
inline const std::string held_as_f16 = "values before the norm are held as f16";
inline const std::string normed_in_f16 = "values before the norm are held as f16, and normalised in f16";
inline const std::string held_in_20_bits = "values before the norm are held as integers of 20 bits";
inline const std::string redone = "samples that leave f16's range are computed again on CUDA cores";
inline const std::string approximate = "activations are approximate: by tanh.approx, off by up to 6e-6";
inline const std::string approximate_gelu = "gelu is approximate: by tanh.approx, off by up to 2.9e-5";
inline const std::string approximate_swish =
    "swish is approximate: off by less than rounding its argument to 16 bits takes";
}  // namespace note

// Of a block whose chains have this many bits.
inline Notes notes_of_chains(const Block& block, int bits) {
  return bits == 16 && has_short_form(block) ? Notes{note::approximate} : Notes{};
}

inline Notes operator+(Notes notes, const Notes& more) {
  notes.insert(notes.end(), more.begin(), more.end());
  return notes;
}

// How a row that rounds operands to tf32 treats ties.
inline const std::string& rounding_note(const Problem& problem) {
  return problem.precision == Precision::tf32_away ? note::operands_rounded_away : note::operands_rounded;
}
// Of a row that rounds operands as the precision says.
inline Notes notes_of_rounding(const Problem& problem) {
  if (!problem.rounds_to_tf32()) return {};
  return {rounding_note(problem)};
}

// A note where it holds.
inline Notes where(bool holds, const std::string& note) { return holds ? Notes{note} : Notes{}; }

}  // namespace onepass::cuda
