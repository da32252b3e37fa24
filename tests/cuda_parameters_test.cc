// The words that a launch passes lie where the kernel's parameter struct has the members of the same names.
//
// Each row runs the small problems that it takes into a recording. NVRTC then checks the struct of every
// recorded kernel: member i lies at byte 8 i, and the struct has no member besides. NVRTC is needed and never
// skipped.
#include <gtest/gtest.h>

#include <bit>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/export/record_plan.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/device_code.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/recording.h"
#include "onepass/cuda.h"
#include "onepass/executor.h"
#include "onepass/onepass.h"
#include "plan/strategy.h"
#include "support/lists.h"

namespace onepass {
namespace {

const std::string architecture = "sm_90a";
const Device gpu = Device::cuda_architecture(architecture);

using Names = std::vector<std::string>;

// The text of a kernel and assertions about the struct that it takes. __INTADDR__ is the front end's
// offsetof.
std::string with_assertions(const cuda::Source& source, const Names& names) {
  std::string text = source.text +
                     "\ntemplate <class Function>\nstruct Check;\n"
                     "template <class P>\nstruct Check<void (*)(P)> {\n";
  for (size_t i = 0; i < names.size(); ++i) {
    text += "  static_assert(__INTADDR__(&static_cast<P*>(nullptr)->" + names[i] +
            ") == " + std::to_string(8 * i) + ", \"parameter " + names[i] + "\");\n";
  }
  text += "  static_assert(sizeof(P) == " + std::to_string(8 * names.size()) +
          ", \"all parameters\");\n};\ntemplate struct Check<decltype(&" + source.name + ")>;\n";
  return text;
}

// What the compiler's front end finds wrong with it; empty where nothing is. No machine code is made.
std::string faults(const cuda::Source& source, const Names& names) {
  const std::string text = with_assertions(source, names);
  std::vector<const char*> header_names;
  std::vector<const char*> header_texts;
  for (const cuda::DeviceFile* const file : cuda::included_files(text)) {
    header_names.push_back(file->name.data());
    header_texts.push_back(file->text.data());
  }
  const std::string target = "--gpu-architecture=" + architecture;
  const std::vector<const char*> options{target.c_str(), "--std=c++20", "--device-as-default-execution-space",
                                         "--fdevice-syntax-only"};
  const cuda::Nvrtc& nvrtc = cuda::nvrtc();
  cuda::ProgramHandle program = nullptr;
  cuda::CudaResult result = nvrtc.nvrtcCreateProgram(&program, text.c_str(), source.name.c_str(),
                                                     static_cast<int>(header_names.size()),
                                                     header_texts.data(), header_names.data());
  std::string log;
  if (result == cuda::cuda_success) {
    result = nvrtc.nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());
    size_t bytes = 0;
    if (nvrtc.nvrtcGetProgramLogSize(program, &bytes) == cuda::cuda_success) log.resize(bytes);
    if (!log.empty()) nvrtc.nvrtcGetProgramLog(program, log.data());
    nvrtc.nvrtcDestroyProgram(&program);
  }
  return result == cuda::cuda_success ? "" : nvrtc.nvrtcGetErrorString(result) + ('\n' + log);
}

class Checker {
 public:
  // `record_plan(recording)` runs the plan of the row.
  template <class RecordPlan>
  void check(const std::string& row, const RecordPlan& record_plan) {
    cuda::Recording recording;
    {
      const cuda::WithoutCompiling quickly;
      record_plan(recording);
    }
    recording.stop();
    for (const cuda::Recording::Step& step : recording.steps()) {
      if (step.kernel < 0) continue;
      const cuda::Source& source = recording.kernels()[static_cast<size_t>(step.kernel)].source;
      if (step.names.empty()) {
        without_names_.insert(row);
        continue;
      }
      EXPECT_EQ(step.names.size(), step.words.size()) << row << ": " << source.name;
      if (!known_.emplace(source.name, step.names).second) continue;
      EXPECT_EQ(faults(source, step.names), "") << row << ": " << source.name;
    }
  }

  const std::set<std::string>& without_names() const { return without_names_; }
  size_t checked() const { return known_.size(); }

 private:
  std::set<std::pair<std::string, Names>> known_;  // kernels, each with each list of names once
  std::set<std::string> without_names_;
};

template <class Row, class AnyProblem, class RecordPlan>
void check_rows(std::span<const Row* const> table, const std::vector<AnyProblem>& problems,
                const RecordPlan& record_plan, Checker& checker) {
  for (const Row* const row : table) {
    const std::string name(row->name);
    bool is_checked = false;
    for (const AnyProblem& problem : problems) {
      if (!row->refusal(problem).empty()) continue;
      is_checked = true;
      checker.check(name, [&](cuda::Recording& recording) { record_plan(name, problem, recording); });
    }
    EXPECT_TRUE(is_checked) << name << " takes no small problem";
  }
}

TEST(Parameters, LieWhereTheKernelReadsThem) {
  std::vector<Problem> forward;
  for (const auto& [prefix, problems] : testing::small_forward(gpu))
    forward.insert(forward.end(), problems.begin(), problems.end());
  std::vector<BackwardProblem> backward;
  for (const Problem& problem : testing::small_backward(gpu)) backward.emplace_back(problem);

  Checker checker;
  void* workspace = nullptr;
  check_rows(
      strategies(Device::Kind::cuda), forward,
      [&](const std::string& row, const Problem& problem, cuda::Recording& recording) {
        record(plan(problem, {row, ""}), problem.block.norm() != nullptr, recording, workspace);
      },
      checker);
  check_rows(
      backward_strategies(Device::Kind::cuda), backward,
      [&](const std::string& row, const BackwardProblem& problem, cuda::Recording& recording) {
        record(plan_backward(problem, {row, ""}), recording, workspace);
      },
      checker);
  EXPECT_GT(checker.checked(), 0u);
  EXPECT_EQ(checker.without_names(), std::set<std::string>{});
}

// It is no row, and has a parameter that is no integer.
TEST(Parameters, OfScaleAndShiftLieWhereTheKernelReadsThem) {
  const cuda::ScaleAndShift kernel(DType::bf16, gpu);
  const float values[3] = {};
  float results[2] = {};
  cuda::Recording recording;
  kernel.run({&values[0], &values[1], &values[2], nullptr, &results[0], &results[1], 300, 1e-5}, Stream{});
  recording.stop();
  ASSERT_EQ(recording.steps().size(), 1u);
  const cuda::Recording::Step& step = recording.steps()[0];
  EXPECT_EQ(faults(recording.kernels().at(0).source, step.names), "");
  ASSERT_EQ(step.words.size(), 8u);
  EXPECT_EQ(step.names[3], "bias");
  EXPECT_EQ(step.words[3].value(), 0);
  EXPECT_EQ(step.names[7], "eps");
  EXPECT_EQ(std::bit_cast<double>(step.words[7].value()), 1e-5);
  EXPECT_EQ(step.blocks.value(), 3);
}

TEST(Parameters, InAnotherOrderAreFound) {
  const cuda::Source source{"two",
                            "struct Two { const void* first; long long second[2]; };\n"
                            "extern \"C\" __global__ void two(const __grid_constant__ Two p) {}\n"};
  EXPECT_EQ(faults(source, {"first", "second[0]", "second[1]"}), "");
  EXPECT_NE(faults(source, {"second[0]", "second[1]", "first"}).find("parameter first"), std::string::npos);
  EXPECT_NE(faults(source, {"first", "second[0]"}).find("all parameters"), std::string::npos);
  EXPECT_NE(faults(source, {"first", "third", "fourth"}), "");
}

}  // namespace
}  // namespace onepass
