// Packed weights that a caller keeps: a call that is given them packs nothing and gives the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/export/record_plan.h"
#include "cuda/runtime/recording.h"
#include "onepass/error.h"
#include "onepass/onepass.h"
#include "support/harness.h"

namespace onepass::testing {
namespace {

// Every row that keeps weights on a CPU, those that are copied first included.
constexpr const char* on_cpu[] = {
    "conv2d(24,40,k=3,p=1) | relu | group_norm(4) @ 3x24x9x11",
    "conv2d(24,40,k=3,p=1) | relu | group_norm(4) @ 3x24x9x11 bf16 nhwc",
    "conv2d(16,16,k=3,p=1,groups=4) | swish @ 2x16x8x9 nhwc",
    "conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 2x3x6x9x11",
    "conv_transpose2d(20,33,k=3,s=2,bias=false) | relu @ 2x20x4x5 nhwc",
};

std::vector<std::byte> packed_by(const Plan& p, const Arguments& arguments, Executor& executor) {
  GuardedMemory memory(p.packed_bytes(), 0);
  p.pack(arguments.parameters, memory.data(), executor);
  const auto* const first = static_cast<const std::byte*>(memory.data());
  std::vector<std::byte> bytes(first, first + p.packed_bytes());
  memory.allow(0, static_cast<int64_t>(p.packed_bytes()));
  EXPECT_TRUE(memory.is_intact()) << p.problem().text() << ": packing writes beyond its memory";
  return bytes;
}

TEST(Frozen, GivesTheBitsOfACallThatPacks) {
  constexpr int threads = 2;
  ThreadExecutor executor(threads);
  int kept = 0;
  for (const char* const text : on_cpu) {
    for (const bool last : {false, true}) {
      Problem problem = Problem::parse(text, Device::cpu(threads));
      TensorSpec& weights = problem.parameters[0];
      weights = TensorSpec::dense(weights.dtype, weights.sizes, last ? Layout::nhwc : Layout::nchw);
      const Operands operands = random_operands(problem, Distribution::normal, 3);
      for (const Candidate& row : candidates(problem)) {
        if (!row.reason.empty()) continue;
        const Plan p = plan(problem, {row.strategy, ""});
        if (p.packed_bytes() == 0) continue;
        ++kept;
        const std::string what = row.strategy + ": " + text;
        EXPECT_NE(p.packing(), 0u) << what;
        const Outcome wanted = run(p, operands, executor);
        ForwardMemory memory(problem, operands, p.workspace_bytes(), executor);
        const std::vector<std::byte> bytes = packed_by(p, memory.arguments(), executor);
        GuardedMemory packed(p.packed_bytes(), 0);
        std::memcpy(packed.data(), bytes.data(), bytes.size());
        packed.remember();
        const auto run_frozen = [&] {
          memory.assign(operands);
          Arguments arguments = memory.arguments();
          arguments.packed = packed.data();
          p.run(arguments, memory.workspace(), executor);
          return memory.outcome();
        };
        for (int i = 0; i < 2; ++i) {
          const Outcome outcome = run_frozen();
          EXPECT_TRUE(same_bits(outcome.output, wanted.output)) << what;
          EXPECT_EQ(outcome.damage, "") << what;
          EXPECT_TRUE(packed.is_intact()) << what << ": a call writes to packed weights";
        }
        // The call reads them, and not the weights.
        std::memset(packed.data(), 0xff, p.packed_bytes());
        EXPECT_FALSE(same_bits(run_frozen().output, wanted.output)) << what;
      }
    }
  }
  EXPECT_GE(kept, 8);
}

TEST(Frozen, IsRefusedByPlansThatKeepNothing) {
  ThreadExecutor executor(1);
  const Plan p = plan(Problem::parse("relu | group_norm(2) @ 1x4x5x5", Device::cpu(1)));
  EXPECT_EQ(p.packed_bytes(), 0u);
  EXPECT_EQ(p.packing(), 0u);
  alignas(64) std::byte memory[64];
  EXPECT_THROW(p.pack({}, memory, executor), Error);
}

// Launches of GPU plans as they would be made, without a GPU.

struct Recorded {
  std::vector<std::string> kernels;  // of the launches, in order; "" is memory set to zero
  std::vector<std::string> words;    // of all launches
};

Recorded recorded(const cuda::Recording& recording) {
  Recorded found;
  for (const cuda::Recording::Step& step : recording.steps()) {
    found.kernels.push_back(
        step.kernel < 0 ? "" : recording.kernels()[static_cast<size_t>(step.kernel)].source.name);
    for (const cuda::Number& word : step.words) found.words.push_back(word.text());
  }
  return found;
}

// A call with packed weights, or the packing.
Recorded record_frozen(const Plan& p, bool packs) {
  cuda::Recording recording;
  const auto address = [&](int64_t index, const char* name) {
    void* const at = reinterpret_cast<void*>(cuda::first_address + (index << 40));
    recording.name(at, name);
    return at;
  };
  void* const packed = address(0, "kept");
  Arguments arguments{address(1, "input"), address(2, "output"), {}, nullptr};
  void* const workspace = address(3, "workspace");
  for (size_t i = 0; i < p.problem().parameters.size(); ++i)
    arguments.parameters.push_back(address(4 + static_cast<int64_t>(i), i == 0 ? "weights" : "other"));
  arguments.packed = packed;
  if (packs) {
    p.pack(arguments.parameters, packed, Stream{});
  } else {
    p.run(arguments, workspace, Stream{});
  }
  return recorded(recording);
}

struct OnGpu {
  const char* text;
  const char* row;
  const char* architecture;
};
constexpr OnGpu on_gpu[] = {
    {"conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 f32", "gemm_wgmma", "sm_90a"},
    {"conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 bf16", "gemm_wgmma", "sm_90a"},
    {"conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 tf32", "gemm_packed", "sm_90a"},
    {"conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 f16", "gemm_packed", "sm_90a"},
    {"conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 tf32", "gemm_mma", "sm_80"},
    {"conv_transpose2d(24,40,k=3,s=2) | relu @ 5x24x11x9 tf32", "gemm_mma", "sm_80"},
};

class FrozenOnGpu : public ::testing::TestWithParam<OnGpu> {};

TEST_P(FrozenOnGpu, LeavesThePackingOut) {
  const auto& [text, row, architecture] = GetParam();
  const Plan p = plan(Problem::parse(text, Device::parse(std::string("cuda:") + architecture)), {row, ""});
  ASSERT_GT(p.packed_bytes(), 0u);
  EXPECT_NE(p.explain().find("frozen: " + std::to_string(p.packed_bytes()) + " bytes"), std::string::npos);
  cuda::Recording recording;
  void* workspace = nullptr;
  cuda::record(p, false, recording, workspace);
  const Recorded whole = recorded(recording);
  recording.stop();
  const Recorded run = record_frozen(p, false);
  const Recorded pack = record_frozen(p, true);
  const auto mentions = [](const Recorded& launches, const std::string& name) {
    return std::ranges::any_of(launches.words,
                               [&](const std::string& word) { return word.find(name) != word.npos; });
  };
  // gemm_packed packs x in a launch of the same kernel; weights that need another scale are packed again.
  const size_t launches_fewer = row != std::string("gemm_packed")     ? 1
                                : std::string(text).ends_with("tf32") ? 1
                                                                      : 0;
  EXPECT_EQ(run.kernels.size() + launches_fewer, whole.kernels.size());
  EXPECT_TRUE(mentions(run, "kept"));
  EXPECT_TRUE(mentions(pack, "kept"));
  EXPECT_TRUE(mentions(pack, "weights"));
  EXPECT_FALSE(mentions(pack, "workspace"));
  for (const std::string& kernel : pack.kernels)
    EXPECT_NE(std::ranges::find(whole.kernels, kernel), whole.kernels.end()) << kernel;
}

INSTANTIATE_TEST_SUITE_P(Rows, FrozenOnGpu, ::testing::ValuesIn(on_gpu));

// The batch is a parameter of the packing kernel's launch, so plans for others have its machine code.
TEST(Frozen, PackedWeightsServePlansOfOtherBatches) {
  const auto packing = [](const char* text) {
    return plan(Problem::parse(text, Device::parse("cuda:sm_80")), {"gemm_mma", ""}).packing();
  };
  const uint64_t first = packing("conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 tf32");
  EXPECT_EQ(packing("conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 9x24x11x9 tf32"), first);
  EXPECT_NE(packing("conv2d(24,72,k=3,p=1) | relu | group_norm(4) @ 5x24x11x9 f16"), first);
}

}  // namespace
}  // namespace onepass::testing
