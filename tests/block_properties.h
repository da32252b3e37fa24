// What must hold for any text given to the block language, for the fuzzer and the random tests.
#pragma once

#include <string>
#include <string_view>

#include "onepass/block.h"
#include "onepass/error.h"
#include "onepass/problem.h"

namespace onepass {

// A refusal is one line of readable length.
inline std::string broken_refusal(const Error& error) {
  const std::string_view what = error.what();
  if (what.empty()) return "a refusal without a sentence";
  if (what.size() > 2000) return "a refusal of " + std::to_string(what.size()) + " bytes";
  for (const char c : what) {
    if (c < ' ' || c > '~') return "a refusal with unprintable characters";
  }
  return {};
}

// Canonical text is a fixed point and gives the same block.
inline std::string broken_round_trip(const Block& block) {
  const std::string text = block.text();
  try {
    const Block again = Block::parse(text);
    if (!(again == block)) return "another block from its text: " + text;
    if (again.text() != text) return "another text from its text: " + text + " and " + again.text();
    if (again.hash() != block.hash()) return "another hash of an equal block: " + text;
  } catch (const Error& error) {
    return "canonical text refused: " + text + ": " + error.what();
  }
  return {};
}

inline std::string broken_round_trip(const Problem& problem) {
  const std::string text = problem.text();
  try {
    const Problem again = Problem::parse(text, problem.device);
    if (!(again == problem)) return "another problem from its text: " + text;
    if (again.text() != text) return "another text from its text: " + text + " and " + again.text();
  } catch (const Error& error) {
    return "problem text refused: " + text + ": " + error.what();
  }
  return {};
}

// The first property that a text breaks, or nothing. Neither parser may crash, hang or throw anything else.
inline std::string broken_block_property(std::string_view text) {
  try {
    return broken_round_trip(Block::parse(text));
  } catch (const Error& error) {
    return broken_refusal(error);
  }
}

inline std::string broken_problem_property(std::string_view text, const Device& device) {
  try {
    const Problem problem = Problem::parse(text, device);
    std::string broken = broken_round_trip(problem);
    if (broken.empty() && problem.conv_multiply_adds() < 0) broken = "negative work: " + problem.text();
    return broken;
  } catch (const Error& error) {
    return broken_refusal(error);
  }
}

inline std::string broken_property(std::string_view text) {
  std::string broken = broken_block_property(text);
  if (broken.empty()) broken = broken_problem_property(text, Device::cpu());
  // tf32, near_f32 and most of "fast" are a GPU's alone.
  if (broken.empty()) broken = broken_problem_property(text, Device::cuda_architecture("sm_90a"));
  return broken;
}

}  // namespace onepass
