// The command-line tool as a user meets it: exit codes, one-sentence errors, JSON, and right results.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace {

using nlohmann::json;

constexpr const char* small_problem = "conv2d(3,8,p=1) | group_norm(4) | relu @ 2x3x9x7";

struct Result {
  int exit_code = -1;
  std::string out;
  std::string err;

  json parsed() const { return json::parse(out); }
};

std::string quoted(const std::string& argument) {
  std::string text = "'";
  for (const char c : argument) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

std::string read_file(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class ToolTest : public ::testing::Test {
 protected:
  ToolTest()
      : directory_(std::filesystem::temp_directory_path() / ("onepass_tool_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(directory_);
  }
  ~ToolTest() override { std::filesystem::remove_all(directory_); }

  Result run(const std::vector<std::string>& arguments) const {
    const auto out = directory_ / "out";
    const auto err = directory_ / "err";
    std::string command = "cd " + quoted(directory_) + " && " + quoted(ONEPASS_TOOL_PATH);
    for (const std::string& argument : arguments) command.append(" ").append(quoted(argument));
    const int status = std::system((command + " >" + quoted(out) + " 2>" + quoted(err)).c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
  }

  std::string write_file(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ / name) << text;
    return directory_ / name;
  }

  const std::filesystem::path& directory() const { return directory_; }

  // The request is refused with code 2 and one sentence that has `words`, and nothing else is printed.
  void expect_refused(const std::vector<std::string>& arguments, const std::string& words) const {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(result.err.rfind("onepass: ", 0), 0u) << result.err;
    EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  }

 private:
  std::filesystem::path directory_;
};

TEST_F(ToolTest, HelpShowsTheBlockLanguageAndExitCodes) {
  const Result result = run({"--help"});
  EXPECT_EQ(result.exit_code, 0);
  for (const char* words :
       {"explain", "check", "bench", "cases", "Examples:", "group_norm(groups", "Exit codes:"}) {
    EXPECT_NE(result.out.find(words), std::string::npos) << words;
  }
  for (const char* command : {"explain", "check", "bench", "cases", "cache"}) {
    EXPECT_EQ(run({command, "--help"}).exit_code, 0);
    EXPECT_EQ(run({"help", command}).out, run({command, "--help"}).out);
  }
  EXPECT_EQ(run({}).out, result.out);
  EXPECT_EQ(run({}).exit_code, 0);
  EXPECT_EQ(run({"help"}).out, result.out);
}

TEST_F(ToolTest, VersionIsPrinted) {
  const Result result = run({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.rfind("onepass ", 0), 0u) << result.out;
}

TEST_F(ToolTest, BadCommandLinesAreRefused) {
  expect_refused({"--json"}, "give a command: explain, check");
  expect_refused({"frobnicate"},
                 "unknown command 'frobnicate', there are explain, check, bench, cases, cache");
  expect_refused({"banch", small_problem}, "unknown command 'banch', did you mean bench?");
  expect_refused({""}, "unknown command ''");
  expect_refused({"optimize", "model.py"}, "optimize is a command of the PyTorch package");
  expect_refused({"help", "explian"}, "did you mean explain?");
  expect_refused({"check"}, "a block is missing");
  expect_refused({"check", small_problem, "--bogus"}, "--bogus");
  expect_refused({"check", small_problem, "--threads", "0"}, "--threads");
  expect_refused({"check", small_problem, "--seed", "x"}, "--seed");
  expect_refused({"check", small_problem, "--file", "list.txt"}, "give one of the two");
  expect_refused({"bench"}, "a block is missing");
}

TEST_F(ToolTest, NumbersOutOfRangeAreRefusedWithTheRange) {
  for (const char* seconds : {"nan", "inf", "-inf", "1e30", "-1", "-1e-3", "soon"}) {
    expect_refused({"bench", small_problem, "--seconds", seconds},
                   std::string(seconds) + " must be a number from 0 to 3600");
  }
  for (const char* threads : {"0", "-1", "4096", "1.5", "99999999999999999999"}) {
    expect_refused({"check", small_problem, "--threads", threads},
                   std::string(threads) + " must be a whole number from 1 to 1024");
  }
}

TEST_F(ToolTest, JsonIsAloneOnStandardOutput) {
  const std::string list = write_file("two.txt", "relu @ 1x2x3\nswish | group_norm(1) @ 1x2x4\n");
  const std::vector<std::vector<std::string>> commands{
      {"explain", small_problem},
      {"check", small_problem},
      {"check", "--file", list},
      {"bench", small_problem, "--seconds", "0", "--threads", "1"},
      {"bench", "--file", list, "--peaks", "--seconds", "0", "--threads", "1"},
      {"cases", "--file", list},
      {"cache", "list"}};
  for (std::vector<std::string> command : commands) {
    command.emplace_back("--json");
    const Result result = run(command);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(json::accept(result.out)) << command.front() << ": " << result.out;
  }
}

TEST_F(ToolTest, OutputThatCannotBeWrittenIsSaid) {
  const std::string command = quoted(ONEPASS_TOOL_PATH) + " explain " + quoted(small_problem);
  const int status = std::system((command + " >/dev/full 2>" + quoted(write_file("said", ""))).c_str());
  EXPECT_EQ(WEXITSTATUS(status), 2);
  EXPECT_EQ(read_file(directory() / "said"), "onepass: standard output cannot be written\n");
}

TEST_F(ToolTest, BadBlocksAndSizesAreRefused) {
  expect_refused({"explain", "conv2d(3,16) | group_norm(5)", "--input", "1x3x9x9"},
                 "not divisible into 5 groups");
  expect_refused({"check", "relu"}, "sizes are missing");
  expect_refused({"check", "relu", "--input", "2xax4"}, "2xax4");
  expect_refused({"check", "relu", "--input", "2x3x4", "--dtype", "f8"}, "f8");
  expect_refused({"check", "relu", "--input", "2x3x4", "--layout", "chwn"}, "chwn");
  expect_refused({"check", "relu @ 2x3x4", "--input", "2x3x4"}, "--input");
  expect_refused({"check", "relu @ 2x3x4", "--dtype", "f16"}, "--dtype");
  expect_refused({"bench", "relu @ 0x3x4"}, "empty");
}

TEST_F(ToolTest, UnknownStrategiesAndTargetsAreRefused) {
  expect_refused({"check", small_problem, "--strategy", "wishful"}, "wishful");
  expect_refused({"bench", small_problem, "--strategy", "wishful"}, "reference");
  expect_refused({"explain", small_problem, "--target", "abacus"}, "abacus");
  expect_refused(
      {"check", "--file", write_file("two.txt", "relu @ 1x2x3\nrelu @ 1x2x4\n"), "--strategy", "wishful"},
      "wishful");
}

TEST_F(ToolTest, ProblemLargerThanTheMachineIsRefused) {
  expect_refused({"check", "relu @ 1000000x1000x1000"}, "TiB");
  expect_refused({"bench", "relu @ 1000000x1000x1000"}, "TiB");
}

TEST_F(ToolTest, FilesThatAreNoListsAreRefused) {
  expect_refused({"check", "--file", "no_such_file"}, "no_such_file");
  expect_refused({"check", "--file", write_file("empty.txt", "# nothing\n\n")}, "no problem strings");
  expect_refused({"check", "--file", write_file("bad.txt", "relu @ 1x2x3\n\nrelu | @ 1x2x3\n")},
                 "bad.txt:3: ");
  expect_refused({"cases"}, "--file is needed");
}

TEST_F(ToolTest, ExplainNamesTheStrategy) {
  const Result text = run({"explain", small_problem});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("reference"), std::string::npos);
  const Result result = run({"explain", small_problem, "--json", "--threads", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const json parsed = result.parsed();
  EXPECT_EQ(parsed.at("output"), "2x8x9x7");
  EXPECT_EQ(parsed.at("threads"), 1);
  EXPECT_GE(parsed.at("workspace_bytes"), 0);
  bool chosen_is_listed = false;
  for (const json& row : parsed.at("candidates")) {
    EXPECT_NE(row.contains("seconds"), row.contains("reason"));
    chosen_is_listed |= row.at("strategy") == parsed.at("strategy");
  }
  EXPECT_TRUE(chosen_is_listed);
}

TEST_F(ToolTest, BlockWithOptionsIsTheSameProblemAsTheString) {
  const Result options = run({"explain", "conv2d(3,8) | relu", "--input", "2x3x9x7", "--dtype", "bf16",
                              "--layout", "nhwc", "--json"});
  const Result string = run({"explain", "conv2d(3,8) | relu @ 2x3x9x7 bf16 nhwc", "--json"});
  EXPECT_EQ(options.exit_code, 0) << options.err;
  EXPECT_EQ(options.out, string.out);
}

TEST_F(ToolTest, CheckPassesForEveryTypeAndThreadCount) {
  for (const char* type : {"f32", "f16", "bf16", "f64", "f32 nhwc"}) {
    for (const char* threads : {"1", "3"}) {
      const Result result = run({"check", std::string(small_problem) + ' ' + type, "--threads", threads});
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
      EXPECT_NE(result.out.find("PASS"), std::string::npos) << result.out;
      EXPECT_NE(result.out.find("seed 1"), std::string::npos) << result.out;
    }
  }
}

TEST_F(ToolTest, CheckPassesForEveryKindOfParameter) {
  for (const char* block :
       {"channel_add(per=sample) | prelu(per=channel) | group_norm(2) | residual_add | mean @ 3x4x5x7",
        "conv_transpose2d(4,6,k=3,s=2,groups=2) | channel_mul | instance_norm @ 2x4x5x3 nhwc"}) {
    const Result result = run({"check", block, "--seed", "7"});
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  }
}

TEST_F(ToolTest, CheckGivesJson) {
  const Result result = run({"check", small_problem, "--json", "--seed", "5"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const json parsed = result.parsed();
  EXPECT_EQ(parsed.at("passed"), true);
  EXPECT_EQ(parsed.at("seed"), 5);
  EXPECT_EQ(parsed.at("elements"), 2 * 8 * 9 * 7);
  EXPECT_EQ(parsed.at("worst").at("index").size(), 4u);
  EXPECT_GT(parsed.at("worst").at("tolerance"), 0);
  EXPECT_LT(parsed.at("max_abs_error"), 1e-4);
}

TEST_F(ToolTest, CheckOfAFileCountsWhatAStrategyRefuses) {
  const std::string file = write_file(
      "mixed.txt", "# comment\nrelu @ 1x2x3\n  conv2d(2,3) | relu @ 1x2x5x5 f16  # trailing\nmean @ 0x2x3\n");
  const Result all = run({"check", "--file", file});
  EXPECT_EQ(all.exit_code, 0) << all.err;
  EXPECT_NE(all.out.find("\n3 passed, 0 failed; seed 1;"), std::string::npos) << all.out;
  const Result some = run({"check", "--file", file, "--strategy", "tail"});
  EXPECT_NE(some.out.find("\n2 passed, 0 failed, 1 left out;"), std::string::npos) << some.out;
  const Result tails = run({"check", "--file", file, "--strategy", "tail", "--json"});
  EXPECT_EQ(tails.exit_code, 0) << tails.err;
  ASSERT_EQ(tails.parsed().size(), 3u);
  EXPECT_EQ(tails.parsed()[0].at("passed"), true);
  EXPECT_TRUE(tails.parsed()[1].contains("refused"));
}

TEST_F(ToolTest, NothingOfAGoodResultReadsLikeAFailureOrIsTooLong) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"check", small_problem},
           {"check", "--help"},
           {"check", "--file", write_file("two.txt", "relu @ 1x2x3\nconv2d(2,3) | relu @ 1x2x5x5 f16\n")},
           {"bench", "conv2d(3,8,p=1) | swish | group_norm(4) @ 2x3x9x7", "--seconds", "0.01"}}) {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::istringstream lines(result.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110u) << line;
    if (arguments.back() == "--help") continue;
    EXPECT_NE(result.out.find("of what rounding allows"), std::string::npos) << result.out;
    for (const char* word : {"wrong", "expected", "instead", "worst", "refused"})
      EXPECT_EQ(result.out.find(word), std::string::npos) << result.out;
  }
}

TEST_F(ToolTest, AskedToTheToolPrintsItsCalls) {
  setenv("ONEPASS_VERBOSE", "1", 1);
  const Result result = run({"check", small_problem, "--threads", "1"});
  setenv("ONEPASS_VERBOSE", "yes", 1);
  const Result mistaken = run({"check", small_problem, "--threads", "1"});
  unsetenv("ONEPASS_VERBOSE");
  EXPECT_NE(result.err.find("; cpu, 1 thread; conv_"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("; predicted "), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("measured"), std::string::npos) << result.err;
  EXPECT_NE(mistaken.err.find("ONEPASS_VERBOSE is \"yes\", must be 0, 1 or 2"), std::string::npos)
      << mistaken.err;
  EXPECT_EQ(mistaken.err.find("verbose:"), std::string::npos) << mistaken.err;
  EXPECT_EQ(run({"check", small_problem}).err, "");
}

TEST_F(ToolTest, CasesListsProblemsWithTheirOutputs) {
  const std::string file = write_file("list.txt", "relu @ 1x2x3\nconv2d(2,3) | mean @ 4x2x5x5\n");
  const Result text = run({"cases", "--file", file});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_NE(text.out.find("4x3"), std::string::npos) << text.out;
  const json parsed = run({"cases", "--file", file, "--json"}).parsed();
  ASSERT_EQ(parsed.size(), 2u);
  EXPECT_EQ(parsed[1].at("output"), "4x3");
  EXPECT_FALSE(parsed[1].at("strategy").get<std::string>().empty());
}

TEST_F(ToolTest, BenchVerifiesAndGivesEveryFigure) {
  const Result result =
      run({"bench", "conv2d(3,8,p=1) | swish | group_norm(4) @ 2x3x9x7", "--seconds", "0.01", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const json parsed = result.parsed();
  EXPECT_EQ(parsed.at("verification").at("passed"), true);
  EXPECT_GE(parsed.at("seconds").at("runs"), 5);
  EXPECT_LE(parsed.at("seconds").at("best"), parsed.at("seconds").at("median"));
  EXPECT_GT(parsed.at("gflops"), 0);
  EXPECT_GT(parsed.at("floor").at("seconds"), 0);
  EXPECT_EQ(parsed.at("floor").at("activations").size(), 1u);
  EXPECT_GT(parsed.at("peaks").at("gflops"), 0);
}

TEST_F(ToolTest, BenchSaysInWhichPagesLargeTensorsLie) {
  const std::vector<std::string> large{"bench", "relu @ 1x2x600x1000", "--seconds", "0", "--small-pages"};
  EXPECT_NE(run(large).out.find("4.00 MiB or more lie in small pages"), std::string::npos) << run(large).out;
  EXPECT_EQ(run({"bench", "relu @ 1x2x600x10", "--seconds", "0"}).out.find(" pages"), std::string::npos);
}

TEST_F(ToolTest, BenchOfAProblemTooBigForTheReferenceVerifiesASmallerOne) {
  const Result result =
      run({"bench", "conv1d(20,32,k=900) | relu @ 1x20x1802", "--threads", "1", "--seconds", "0", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const json verification = result.parsed().at("verification");
  EXPECT_EQ(verification.at("passed"), true);
  EXPECT_NE(verification.at("what").get<std::string>().find("same block"), std::string::npos) << verification;
}

TEST_F(ToolTest, PeaksNeedNoBlock) {
  const Result result = run({"bench", "--peaks", "--json", "--threads", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* key :
       {"gflops", "gflops_one_thread", "write_gb_per_s", "read_gb_per_s", "copy_gb_per_s"}) {
    EXPECT_GT(result.parsed().at(key), 0) << key;
  }
}

TEST_F(ToolTest, DevicesThatCannotRunAreRefused) {
  expect_refused({"check", "relu @ 1x2x3", "--device", "tpu"}, "device \"tpu\" is unknown");
  expect_refused({"explain", "relu @ 1x2x3", "--device", "cuda:sm_12"}, "sm_12");
  for (const char* command : {"check", "bench"}) {
    expect_refused({command, "relu @ 1x2x3", "--device", "cuda:sm_90a"}, "--device cuda:sm_90a is no GPU");
  }
  setenv("ONEPASS_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
  for (const char* command : {"explain", "check", "bench"}) {
    expect_refused({command, "relu @ 1x2x3", "--device", "cuda"}, "ONEPASS_CUDA_DRIVER");
  }
  expect_refused({"bench", "--peaks", "--device", "cuda:1"}, "ONEPASS_CUDA_DRIVER");
  unsetenv("ONEPASS_CUDA_DRIVER");
}

// The stub's GPU computes nothing: what comes back is the NaN that went there.
TEST_F(ToolTest, CheckAndBenchJudgeWhatTheGpuWrote) {
  setenv("ONEPASS_CUDA_DRIVER", ONEPASS_STUB_PATH, 1);
  const Result check = run({"check", "relu @ 2x3x40", "--device", "cuda", "--json"});
  EXPECT_EQ(check.exit_code, 1) << check.err;
  EXPECT_EQ(check.parsed().at("device"), "cuda:0");
  EXPECT_EQ(check.parsed().at("failures"), 2 * 3 * 40);
  const Result bench = run({"bench", "relu @ 2x3x40", "--device", "cuda:1"});
  EXPECT_EQ(bench.exit_code, 1) << bench.err;
  EXPECT_NE(bench.out.find("WRONG RESULT"), std::string::npos) << bench.out;
  const json peaks = run({"bench", "--peaks", "--device", "cuda", "--json"}).parsed();
  EXPECT_EQ(peaks.at("copy_gb_per_s"), 4220);
  unsetenv("ONEPASS_CUDA_DRIVER");
}

TEST_F(ToolTest, TargetOfTheCpuDoesNotGoWithAGpu) {
  expect_refused({"explain", "relu @ 1x2x3", "--device", "cuda:sm_90a", "--target", "neon"}, "--target");
}

TEST_F(ToolTest, ExplainPlansForAnArchitectureThatIsNotPresent) {
  const Result result =
      run({"explain", "swish | group_norm(4) @ 2x8x16x16", "--device", "cuda:sm_90a", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.parsed().at("device"), "cuda:sm_90a");
  const Result text = run({"explain", "swish | group_norm(4) @ 2x8x16x16", "--device", "cuda:sm_80"});
  EXPECT_NE(text.out.find("on cuda:sm_80"), std::string::npos) << text.out << text.err;
}

TEST_F(ToolTest, CacheIsListedAndCleared) {
  const std::string before = getenv("ONEPASS_CACHE_DIR") == nullptr ? "" : getenv("ONEPASS_CACHE_DIR");
  setenv("ONEPASS_CACHE_DIR", "kernels", 1);  // in the test's own folder
  EXPECT_EQ(run({"cache", "list", "--json"}).parsed().at("kernels").size(), 0u);
  EXPECT_EQ(run({"explain", "swish | group_norm(4) @ 2x8x16x16", "--device", "cuda:sm_90a"}).exit_code, 0);
  const json listed = run({"cache", "list", "--json"}).parsed();
  EXPECT_EQ(listed.at("directory"), "kernels");
  ASSERT_GE(listed.at("kernels").size(), 1u);
  EXPECT_EQ(listed.at("kernels")[0].at("architecture"), "sm_90a");
  EXPECT_GT(listed.at("kernels")[0].at("bytes"), 1000);
  const Result text = run({"cache", "list"});
  EXPECT_NE(text.out.find(listed.at("kernels")[0].at("kernel")), std::string::npos) << text.out;
  EXPECT_EQ(run({"cache", "clear", "--json"}).parsed().at("removed"), listed.at("kernels").size());
  EXPECT_EQ(run({"cache", "clear"}).out, "0 kernels removed from kernels\n");
  expect_refused({"cache", "shred"}, "shred");
  expect_refused({"cache"}, "list or clear");
  setenv("ONEPASS_CACHE_DIR", before.c_str(), 1);
}

}  // namespace
