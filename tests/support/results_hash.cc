// What results/<GPU>.json belong to, as two hashes.
#include "support/results_hash.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "cuda/export/plan_hash.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/sha256.h"
#include "onepass/error.h"
#include "onepass/onepass.h"
#include "plan/build_error.h"
#include "plan/strategy.h"
#include "support/backward_harness.h"
#include "support/cases.h"
#include "support/lists.h"

// The build defines it; without it tests run in the root of the source tree.
#ifndef ONEPASS_SOURCE_DIR
#define ONEPASS_SOURCE_DIR "."
#endif

namespace onepass::testing {
namespace {

using Problems = std::vector<Problem>;

void append(Problems& all, const Problems& more) { all.insert(all.end(), more.begin(), more.end()); }

template <size_t count>
void append(Problems& all, const char* const (&texts)[count], const Device& device) {
  for (const char* const text : texts) all.push_back(Problem::parse(text, device));
}

// What is measured most, in every mode: the workloads, and their tails.
Problems measured_problems(const Device& device) {
  Problems all;
  for (const char* const text :
       {"conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32",
        "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 128x64x256x256",
        "conv_transpose3d(64,128,k=3,bias=false) | relu | group_norm(8) @ 16x64x32x32x32",
        "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32"}) {
    for (const char* const mode : {"", " tf32", " f16", " bf16"})
      all.push_back(Problem::parse(text + std::string(mode), device));
  }
  for (const char* const text :
       {"swish | group_norm(4) | hardswish @ 128x16x31x63x63", "gelu | group_norm(8) @ 128x64x258x258",
        "relu | group_norm(8) @ 16x128x34x34x34", "hardswish | group_norm(4) | mean @ 1024x16x13x29x29"}) {
    for (const char* const mode : {"", " nhwc", " f16", " bf16", " bf16 nhwc"})
      all.push_back(Problem::parse(text + std::string(mode), device));
  }
  return all;
}

}  // namespace

std::vector<Problem> problems_of_results(const Device& device) {
  Problems all = gpu_cases(device);
  append(all, measured_problems(device));
  for (const Problems& list :
       {wide_problems(device), thin_forward_problems(device), grouped_problems(device), box_problems(device),
        narrow_problems(device), banded_problems(device), scaled_problems(device), pingpong_problems(device)})
    append(all, list);
  for (const auto& [prefix, problems] : small_forward(device)) append(all, problems);
  append(all, hard_blocks, device);
  append(all, hard_tails, device);
  append(all, large_tails, device);
  return all;
}

std::vector<Problem> gradients_of_results(const Device& device) {
  Problems all = tails_of_the_list(device);
  append(all, measured_problems(device));
  for (const Problems& list : {tails_of_convolutions(device), thin_problems(device), wide_gradients(device),
                               scaled_problems(device), small_backward(device)})
    append(all, list);
  append(all, hard_tails, device);
  append(all, large_tails, device);
  return all;
}

namespace {

// `plan_for(row)` makes a plan by this row, or by the cheapest where the name is empty.
template <class Row, class AnyProblem, class PlanFor>
void add_plans(std::span<const Row* const> table, const AnyProblem& problem, const PlanFor& plan_for,
               cuda::Sha256& hash) {
  hash.add_field(problem.text());
  bool is_taken = false;
  for (const Row* row : table) {
    if (!row->refusal(problem).empty()) continue;
    is_taken = true;
    std::string words;
    try {
      words = cuda::plan_hash(plan_for(std::string(row->name)));
    } catch (const BuildError& error) {
      words = error.what();
    }
    hash.add_field(row->name).add_field(words);
  }
  hash.add_field(is_taken ? plan_for("").strategy() : "none");
}

bool is_source(const std::filesystem::path& path) {
  static const std::set<std::string> extensions{".cc", ".h", ".py", ".txt"};
  // Written after a run, not before it.
  return extensions.contains(path.extension()) && path.filename() != "known_failures.txt";
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw Error("cannot read " + path.string() + ": run from the root of the source tree");
  return text;
}

}  // namespace

std::string plans_hash(const std::string& architecture) {
  const cuda::WithoutCompiling quickly;
  const Device device = Device::cuda_architecture(architecture);
  cuda::Sha256 hash;
  std::set<std::string> known;
  for (const Problem& problem : problems_of_results(device)) {
    if (!known.insert(problem.text()).second) continue;
    add_plans(
        strategies(Device::Kind::cuda), problem,
        [&](const std::string& row) {
          return plan(problem, {row, ""});
        },
        hash);
  }
  known.clear();
  for (const Problem& forward : gradients_of_results(device)) {
    if (!known.insert(forward.text()).second) continue;
    const BackwardProblem problem(forward);
    add_plans(
        backward_strategies(Device::Kind::cuda), problem,
        [&](const std::string& row) {
          return plan_backward(problem, {row, ""});
        },
        hash);
  }
  return hash.hex();
}

std::string tests_hash() {
  const std::filesystem::path root(ONEPASS_SOURCE_DIR);
  std::vector<std::filesystem::path> files{root / "tests/cases.txt"};
  for (const char* const folder : {"tests/gpu", "tests/support", "python/tests_gpu"}) {
    if (!std::filesystem::is_directory(root / folder))
      throw Error("there is no folder " + (root / folder).string() +
                  ": run from the root of the source tree");
    for (const auto& item : std::filesystem::recursive_directory_iterator(root / folder)) {
      if (item.is_regular_file() && is_source(item.path())) files.push_back(item.path());
    }
  }
  std::sort(files.begin(), files.end());
  cuda::Sha256 hash;
  for (const std::filesystem::path& file : files) {
    const std::string text = read(file);
    const bool is_cpp = file.extension() == ".cc" || file.extension() == ".h";
    hash.add_field(std::filesystem::relative(file, root).generic_string());
    hash.add_field(is_cpp ? cuda::without_comments(text) : text);
  }
  return hash.hex();
}

}  // namespace onepass::testing
