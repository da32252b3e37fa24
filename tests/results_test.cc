// Nothing is merged that no GPU has run: results/<GPU>.json belongs to the device code as it is.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "onepass/cuda.h"

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

// What is wrong with the part of a result that a command writes; empty where nothing is.
std::string fault(const std::string& file, const Json& result, const std::string& part,
                  const std::string& command) {
  const std::string advice = ": run `" + command + "` on a machine with that GPU and commit results/" + file;
  if (!result.contains(part)) return "results/" + file + " has no " + part + advice;
  const Json& found = result.at(part);
  if (found.value("device_code_hash", "") != cuda::device_code_hash())
    return "device code changed since the " + part + " of results/" + file + advice;
  return "";
}

// "NAME: why" a line: what a GPU has seen fail and nobody has mended yet.
std::set<std::string> known_failures() {
  std::set<std::string> names;
  std::ifstream file(ONEPASS_SOURCE_DIR "/tests/gpu/known_failures.txt");
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.front() != '#') names.insert(line.substr(0, line.find(": ")));
  }
  return names;
}

std::set<std::string> failures(const Json& result) {
  std::set<std::string> names;
  for (const Json& name : result.at("tests").at("failures")) names.insert(name.get<std::string>());
  for (const Json& entry : result.at("benchmarks").at("entries")) {
    if (entry.at("passed").get<bool>()) continue;
    std::string name = entry.at("group").get<std::string>();
    for (const char* const part : {"workload", "dtype", "layout"}) {
      name += ' ';
      name += entry.at(part).get<std::string>();
    }
    names.insert(std::move(name));
  }
  return names;
}

TEST(GpuResults, BelongToTheDeviceCodeAsItIs) {
  const std::map<std::string, Json> results = gpu_results();
  ASSERT_FALSE(results.empty()) << "no GPU has run this code: run `make test-gpu` and `make bench-gpu` on a "
                                   "machine with a GPU and commit results/<GPU>.json";
  for (const auto& [file, result] : results) {
    EXPECT_EQ(fault(file, result, "tests", "make test-gpu"), "");
    EXPECT_EQ(fault(file, result, "benchmarks", "make bench-gpu"), "");
    if (HasFailure()) continue;
    EXPECT_EQ(failures(result), known_failures()) << "tests/gpu/known_failures.txt lists what failed and why";
  }
}

}  // namespace
}  // namespace onepass
