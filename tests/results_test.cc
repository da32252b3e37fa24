// Nothing is merged that no GPU has run: results/<GPU>.json belongs to what plans do as they are, its tests'
// part to the tests as they are, and what failed, was skipped, left out or missed is written down with its
// reason.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sstream>
#include <string>

#include "cuda/export/plan_hash.h"
#include "cuda/export/record_plan.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/device_code.h"
#include "cuda/runtime/sha256.h"
#include "onepass/onepass.h"
#include "plan/build_error.h"
#include "plan/strategy.h"
#include "support/lists.h"
#include "support/results_hash.h"

// The build defines it; without it tests run in the root of the source tree.
#ifndef ONEPASS_SOURCE_DIR
#define ONEPASS_SOURCE_DIR "."
#endif

namespace onepass {
namespace {

using Json = nlohmann::json;

// What GPUs have written, by file name.
std::map<std::string, Json> gpu_results() {
  std::map<std::string, Json> results;
  for (const auto& item : std::filesystem::directory_iterator(ONEPASS_SOURCE_DIR "/results")) {
    if (item.path().extension() != ".json") continue;
    Json result = Json::parse(std::ifstream(item.path()));
    if (result.contains("tests") || result.contains("benchmarks"))
      results.emplace(item.path().filename(), std::move(result));
  }
  return results;
}

struct Hashes {
  std::string plans;
  std::string tests;
};

// What is wrong with the part of a result that a command writes; empty where nothing is.
std::string fault(const std::string& file, const Json& result, const std::string& part,
                  const Hashes& hashes) {
  const std::string advice = ": run `make " + std::string(part == "tests" ? "test" : "bench") +
                             "-gpu` on a machine with that GPU and commit results/" + file;
  if (!result.contains(part)) return "results/" + file + " has no " + part + advice;
  const Json& found = result.at(part);
  if (found.value("device_code_hash", "") != hashes.plans)
    return "kernels, launches or chosen rows changed since the " + part + " of results/" + file + advice;
  if (part == "tests" && found.value("tests_hash", "") != hashes.tests)
    return "the tests of a GPU changed since the tests of results/" + file + advice;
  return "";
}

struct KnownFailures {
  std::set<std::string> names;
  std::string mistakes;  // lines that are no "NAME -- why"
};

KnownFailures read_known_failures(std::istream& file) {
  KnownFailures known;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    const size_t end = line.find(" -- ");
    if (end == std::string::npos || end == 0 || line.find_first_not_of(' ', end + 4) == std::string::npos) {
      known.mistakes += line + '\n';
    } else {
      known.names.insert(line.substr(0, end));
    }
  }
  return known;
}

// Problems for which a run chose another row than is chosen now, and that row: lines "chosen anew PROBLEM,
// recorded ROW". All rows have run, so a better choice among them needs a reason and no run.
class Choices {
 public:
  explicit Choices(const std::set<std::string>& names) {
    const std::string begin = "chosen anew ", middle = ", recorded ";
    for (const std::string& name : names) {
      const size_t end = name.rfind(middle);
      if (!name.starts_with(begin) || end == std::string::npos) continue;
      recorded_[name.substr(begin.size(), end - begin.size())] = name.substr(end + middle.size());
      names_.insert(name);
    }
  }

  const std::set<std::string>& names() const { return names_; }

  // testing::plans_hash with the recorded rows in place of those that are chosen now.
  std::string plans_hash(const std::string& architecture) {
    if (recorded_.empty()) return testing::plans_hash(architecture);
    const cuda::WithoutCompiling quickly;
    const Device device = Device::cuda_architecture(architecture);
    cuda::Sha256 hash;
    std::set<std::string> known;
    for (const Problem& problem : testing::problems_of_results(device)) {
      if (!known.insert(problem.text()).second) continue;
      add(strategies(Device::Kind::cuda), problem, hash, [&](const std::string& row) {
        return plan(problem, {row, ""});
      });
    }
    known.clear();
    for (const Problem& forward : testing::gradients_of_results(device)) {
      if (!known.insert(forward.text()).second) continue;
      const BackwardProblem problem(forward);
      add(backward_strategies(Device::Kind::cuda), problem, hash, [&](const std::string& row) {
        return plan_backward(problem, {row, ""});
      });
    }
    return hash.hex();
  }

  // Lines that name no problem of the hash, or the row that is chosen now.
  std::set<std::string> idle() const {
    std::set<std::string> problems;
    for (const auto& [problem, row] : recorded_) {
      if (!used_.contains(problem)) problems.insert(problem);
    }
    return problems;
  }

 private:
  template <class Row, class AnyProblem, class PlanFor>
  void add(std::span<const Row* const> table, const AnyProblem& problem, cuda::Sha256& hash,
           const PlanFor& plan_for) {
    hash.add_field(problem.text());
    std::set<std::string> takes;
    for (const Row* row : table) {
      if (!row->refusal(problem).empty()) continue;
      const std::string name(row->name);
      takes.insert(name);
      std::string words;
      try {
        words = cuda::plan_hash(plan_for(name));
      } catch (const BuildError& error) {
        words = error.what();
      }
      hash.add_field(name).add_field(words);
    }
    std::string chosen = takes.empty() ? "none" : plan_for("").strategy();
    const auto found = recorded_.find(problem.text());
    if (found != recorded_.end() && found->second != chosen && takes.contains(found->second)) {
      used_.insert(found->first);
      chosen = found->second;
    }
    hash.add_field(chosen);
  }

  std::map<std::string, std::string> recorded_;  // rows by problem
  std::set<std::string> names_, used_;
};

// Every failure, skip, left-out case and missed target.
std::set<std::string> failures(const Json& result) {
  std::set<std::string> names;
  const Json& tests = result.at("tests");
  for (const Json& name : tests.at("failures")) names.insert(name.get<std::string>());
  for (const auto& [suite, content] : tests.items()) {
    if (!content.is_object() || !content.contains("skipped")) continue;
    for (const auto& [name, words] : content.at("skipped").items())
      names.insert("skipped " + suite + ' ' + name);
  }
  const Json& benchmarks = result.at("benchmarks");
  for (const Json& entry : benchmarks.at("entries")) {
    if (entry.at("passed").get<bool>()) continue;
    std::string name = entry.at("group").get<std::string>();
    for (const char* const part : {"workload", "dtype", "layout"}) {
      name += ' ';
      name += entry.at(part).get<std::string>();
    }
    names.insert(std::move(name));
  }
  for (const Json& name : benchmarks.at("left_out")) names.insert("left out " + name.get<std::string>());
  for (const Json& target : benchmarks.at("targets")) {
    if (!target.at("met").get<bool>()) names.insert("missed " + target.at("what").get<std::string>());
  }
  return names;
}

TEST(GpuResults, BelongToThePlansAndTestsAsTheyAre) {
  const std::map<std::string, Json> results = gpu_results();
  ASSERT_FALSE(results.empty()) << "no GPU has run this code: run `make test-gpu` and `make bench-gpu` on a "
                                   "machine with a GPU and commit results/<GPU>.json";
  std::ifstream file(ONEPASS_SOURCE_DIR "/tests/gpu/known_failures.txt");
  const KnownFailures known = read_known_failures(file);
  EXPECT_EQ(known.mistakes, "") << "lines of tests/gpu/known_failures.txt are \"NAME -- why\"";
  const std::string tests = testing::tests_hash();
  for (const auto& [name, result] : results) {
    const std::string architecture = result.at("device").value("architecture", "sm_90a");
    Choices choices(known.names);
    const Hashes hashes{choices.plans_hash(architecture), tests};
    EXPECT_EQ(choices.idle(), std::set<std::string>{}) << "problems of \"chosen anew\" that are not";
    EXPECT_EQ(fault(name, result, "tests", hashes), "");
    EXPECT_EQ(fault(name, result, "benchmarks", hashes), "");
    if (HasFailure()) continue;
    std::set<std::string> all = failures(result);
    all.insert(choices.names().begin(), choices.names().end());
    EXPECT_EQ(all, known.names)
        << "tests/gpu/known_failures.txt lists what failed, was skipped, left out or missed, and why";
  }
}

Json good_result() {
  return Json::parse(R"({
    "tests": {"device_code_hash": "p", "tests_hash": "t", "failures": [], "turns": [0],
              "cpp": {"skipped": {}}, "python": {"skipped": {}}},
    "benchmarks": {"device_code_hash": "p", "left_out": [],
                   "entries": [{"passed": true, "group": "tail", "workload": "s60", "dtype": "fp32",
                                "layout": "nchw"}],
                   "targets": [{"what": "tail s60: ms", "met": true}]}})");
}

TEST(GateOfResults, TellsWhichPartHasToBeMadeAnew) {
  const Json result = good_result();
  EXPECT_EQ(fault("a.json", result, "tests", {"p", "t"}), "");
  EXPECT_EQ(fault("a.json", result, "benchmarks", {"p", "t"}), "");
  EXPECT_NE(fault("a.json", result, "tests", {"other", "t"}).find("make test-gpu"), std::string::npos);
  EXPECT_NE(fault("a.json", result, "benchmarks", {"other", "t"}).find("make bench-gpu"), std::string::npos);
  EXPECT_NE(fault("a.json", result, "tests", {"p", "other"}), "");
  EXPECT_EQ(fault("a.json", result, "benchmarks", {"p", "other"}), "");  // tests do not gate benchmarks
  EXPECT_NE(fault("a.json", Json::object(), "tests", {"p", "t"}), "");
}

TEST(GateOfResults, SeesFailuresSkipsLeftOutCasesAndMissedTargets) {
  Json result = good_result();
  EXPECT_TRUE(failures(result).empty());
  result["tests"]["failures"].push_back("Forward.Agrees");
  result["tests"]["python"]["skipped"]["test_streams.Streams.test_two"] = "one GPU";
  result["benchmarks"]["left_out"].push_back("block s60 fp32");
  result["benchmarks"]["targets"][0]["met"] = false;
  result["benchmarks"]["entries"][0]["passed"] = false;
  EXPECT_EQ(failures(result),
            (std::set<std::string>{"Forward.Agrees", "skipped python test_streams.Streams.test_two",
                                   "left out block s60 fp32", "missed tail s60: ms", "tail s60 fp32 nchw"}));
}

TEST(GateOfResults, WantsAReasonForEachKnownFailure) {
  std::istringstream file(
      "# a comment\n\nmissed tail s60: ms -- 2% over, memory clock\nForward.Agrees\nA -- \n");
  const KnownFailures known = read_known_failures(file);
  EXPECT_EQ(known.names, std::set<std::string>{"missed tail s60: ms"});
  EXPECT_EQ(known.mistakes, "Forward.Agrees\nA -- \n");
}

TEST(GateOfResults, TellsANewChoiceFromNewKernels) {
  const std::string problem = "gelu | group_norm(8) @ 128x64x258x258 f32 nhwc";
  const std::string chosen =
      plan(Problem::parse(problem, Device::cuda_architecture("sm_90a")), {"", ""}).strategy();
  Choices same({"missed tail s60: ms", "chosen anew " + problem + ", recorded " + chosen}),
      other({"chosen anew " + problem + ", recorded tail_strips"});
  const std::string hash = same.plans_hash("sm_90a");
  EXPECT_EQ(hash, testing::plans_hash("sm_90a"));
  EXPECT_EQ(same.idle(), std::set<std::string>{problem});
  EXPECT_NE(other.plans_hash("sm_90a"), hash);
  EXPECT_TRUE(other.idle().empty());
}

// A header that no problem's kernels include would change unseen.
TEST(HashOfPlans, HasEveryHeader) {
  const cuda::WithoutCompiling quickly;
  const Device device = Device::cuda_architecture("sm_90a");
  std::set<std::string> unseen;
  for (const cuda::DeviceFile& file : cuda::device_files()) unseen.insert(std::string(file.name));
  const auto see = [&unseen](const cuda::Recording& recording) {
    for (const cuda::Recording::Kernel& kernel : recording.kernels()) {
      for (const cuda::DeviceFile* file : cuda::included_files(kernel.source.text))
        unseen.erase(std::string(file->name));
    }
  };
  void* workspace = nullptr;
  for (const Problem& problem : testing::problems_of_results(device)) {
    for (const std::string& row : testing::accepting_rows(problem)) {
      cuda::Recording recording;
      cuda::record(plan(problem, {row, ""}), false, recording, workspace);
      see(recording);
    }
  }
  for (const Problem& forward : testing::gradients_of_results(device)) {
    const BackwardProblem problem(forward);
    for (const BackwardStrategy* row : backward_strategies(Device::Kind::cuda)) {
      if (!row->refusal(problem).empty()) continue;
      cuda::Recording recording;
      cuda::record(plan_backward(problem, {std::string(row->name), ""}), recording, workspace);
      see(recording);
    }
  }
  EXPECT_EQ(unseen, std::set<std::string>{});
}

TEST(HashOfPlans, DiffersBetweenArchitectures) {
  const std::string hash = testing::plans_hash("sm_90a");
  EXPECT_EQ(hash.size(), 64u);
  EXPECT_NE(hash, testing::plans_hash("sm_80"));
}

TEST(HashOfTests, IsMade) { EXPECT_EQ(testing::tests_hash().size(), 64u); }

}  // namespace
}  // namespace onepass
