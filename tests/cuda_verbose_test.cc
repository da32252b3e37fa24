// ONEPASS_VERBOSE=2 on a CPU and on a GPU that a stand-in for the driver plays.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "cuda/export/record_plan.h"
#include "onepass/onepass.h"
#include "stub_driver/stub_cuda.h"
#include "support/child_process.h"

namespace onepass {
namespace {

// Before the first call, where the variable is read.
const bool is_verbose = setenv("ONEPASS_VERBOSE", "2", 1) == 0;

// Memory as a workspace has to lie.
std::unique_ptr<void, decltype(&std::free)> workspace_of(const Plan& plan) {
  return {std::aligned_alloc(64, (plan.workspace_bytes() + 127) / 64 * 64), &std::free};
}

template <class Call>
std::string lines_of(const Call& call) {
  testing::internal::CaptureStderr();
  call();
  return testing::internal::GetCapturedStderr();
}

class VerboseTest : public testing::Test {
 protected:
  VerboseTest() {
    static test::TemporaryFolder& cache = *new test::TemporaryFolder;
    setenv("ONEPASS_CUDA_DRIVER", ONEPASS_STUB_PATH, 1);
    setenv("ONEPASS_CACHE_DIR", cache.path().c_str(), 1);
    void* library = dlopen(ONEPASS_STUB_PATH, RTLD_NOW | RTLD_LOCAL);
    state_ = reinterpret_cast<stub::State* (*)()>(dlsym(library, "onepass_stub_state"))();
    state_->capturing = false;
  }

  // A call on this stream.
  static std::string gpu_line(Stream stream) {
    const Plan plan = onepass::plan({Block::parse("relu"), {2, 3, 8}, DType::f32, Device::cuda()});
    float memory[48] = {};
    const auto workspace = workspace_of(plan);
    return lines_of([&] { plan.run({memory, memory, {}}, workspace.get(), stream); });
  }

  stub::State* state_;
};

TEST_F(VerboseTest, ACallOfACpuIsOneLineWithBothTimes) {
  ASSERT_TRUE(is_verbose);
  const Plan plan = onepass::plan({Block::parse("relu"), {2, 3, 8}, DType::f32, Device::cpu()});
  float memory[48] = {};
  SerialExecutor executor;
  const auto workspace = workspace_of(plan);
  const std::string line = lines_of([&] { plan.run({memory, memory, {}}, workspace.get(), executor); });
  const std::string row = std::string(plan.strategy());
  EXPECT_TRUE(line.starts_with("onepass verbose: relu @ 2x3x8 f32; cpu, 1 thread; " + row + "; predicted "))
      << line;
  EXPECT_NE(line.find(" ms; measured "), std::string::npos) << line;
  EXPECT_EQ(line.find('\n'), line.size() - 1) << line;
}

TEST_F(VerboseTest, ACallOfAGpuIsMeasuredOnItsStream) {
  int stream = 0;
  const std::string line = gpu_line(Stream{&stream});
  EXPECT_TRUE(line.starts_with("onepass verbose: relu @ 2x3x8 f32; cuda:0; tail_")) << line;
  EXPECT_NE(line.find(" ms; measured "), std::string::npos) << line;
}

TEST_F(VerboseTest, ACallThatIsCapturedIsNotMeasured) {
  int stream = 0;
  state_->capturing = true;
  const std::string line = gpu_line(Stream{&stream});
  EXPECT_NE(line.find("; captured, not measured\n"), std::string::npos) << line;
  EXPECT_EQ(line.find("; measured"), std::string::npos) << line;
}

TEST_F(VerboseTest, ARecordedPlanPrintsNothing) {
  const Plan plan =
      onepass::plan({Block::parse("relu"), {2, 3, 8}, DType::f32, Device::cuda_architecture("sm_90a")});
  EXPECT_EQ(lines_of([&] {
              cuda::Recording recording;
              void* workspace = nullptr;
              cuda::record(plan, false, recording, workspace);
            }),
            "");
}

}  // namespace
}  // namespace onepass
