// Nothing is merged that no GPU has run: results/<GPU>.json belongs to what plans do as they are, its tests'
// part to the tests as they are, and what failed, was skipped, left out or missed is written down with its
// reason.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "cuda/export/record_plan.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/device_code.h"
#include "onepass/onepass.h"
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
    const Hashes hashes{testing::plans_hash(architecture), tests};
    EXPECT_EQ(fault(name, result, "tests", hashes), "");
    EXPECT_EQ(fault(name, result, "benchmarks", hashes), "");
    if (HasFailure()) continue;
    EXPECT_EQ(failures(result), known.names)
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
