// The runtime against a driver that remembers what it was asked (tests/stub_driver): GPUs, contexts, loading,
// launches, memory, errors. Kernels are compiled by the real NVRTC.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string_view>
#include <thread>

#include "cuda/runtime/context.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/function.h"
#include "cuda/runtime/gpu.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "stub_driver/stub_cuda.h"
#include "support/child_process.h"

namespace onepass::cuda {
namespace {

using test::ChildResult;
using test::run_child;

constexpr const char* stub_path = ONEPASS_STUB_PATH;

struct Parameters {
  float* x;
  int64_t count;
  float factor;
};

Source kernel(const std::string& name) {
  return {name, "struct P { float* x; long count; float factor; };\nextern \"C\" __global__ void " + name +
                    "(P p) { if (threadIdx.x < p.count) p.x[threadIdx.x] *= p.factor; }"};
}

void expect_has(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << words << "\nis not in\n" << text;
}

template <class Body>
std::string sentence_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class RuntimeTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    static test::TemporaryFolder& cache = *new test::TemporaryFolder;
    setenv("ONEPASS_CUDA_DRIVER", stub_path, 1);
    setenv("ONEPASS_CACHE_DIR", cache.path().c_str(), 1);
  }
  RuntimeTest() {
    void* library = dlopen(stub_path, RTLD_NOW | RTLD_LOCAL);
    state_ = reinterpret_cast<stub::State* (*)()>(dlsym(library, "onepass_stub_state"))();
    state_->failing = "";
    state_->error = 1;
    state_->capturing = false;
    state_->free_bytes = size_t{1} << 30;
    state_->launches.clear();
    state_->milliseconds = nullptr;
    state_->attributes.clear();
    state_->loaded_modules = 0;
    driver().cuCtxPushCurrent(static_cast<ContextHandle>(stub::foreign_context()));
  }
  // Whatever a test did, the caller's context and capture mode are as they were.
  ~RuntimeTest() override {
    ContextHandle context = nullptr;
    EXPECT_EQ(driver().cuCtxPopCurrent(&context), cuda_success);
    EXPECT_EQ(context, stub::foreign_context());
    EXPECT_EQ(driver().cuCtxPopCurrent(&context), 201) << "contexts are left on the stack";
    int mode = 0;
    driver().cuThreadExchangeStreamCaptureMode(&mode);
    EXPECT_EQ(mode, 0);
  }

  void fail(const char* function, int error) {
    state_->failing = function;
    state_->error = error;
  }
  int set_value(int attribute) const {
    int value = -1;
    for (const auto& record : state_->attributes) {
      if (record.attribute == attribute) value = record.value;
    }
    return value;
  }

  stub::State* state_;
};

// ---- GPUs

TEST_F(RuntimeTest, GpusAreCountedAndDescribed) {
  EXPECT_EQ(unavailable_reason(), "");
  EXPECT_EQ(device_count(), 2);
  expect_has(describe_device(0), "NVIDIA H200, sm_90a, 132 multiprocessors, 140.0 GiB; driver 13.0, NVRTC ");
  expect_has(describe_device(0), " from " + nvrtc().path);
  expect_has(describe_device(1), "NVIDIA A100, sm_80");
}

TEST_F(RuntimeTest, PropertiesComeFromTheDriver) {
  const Gpu& first = gpu_of(Device::cuda(0));
  EXPECT_EQ(first.architecture, "sm_90a");
  EXPECT_EQ(first.multiprocessors, 132);
  EXPECT_EQ(first.shared_bytes_per_block, 227 * 1024);
  EXPECT_EQ(first.shared_bytes_per_multiprocessor, 228 * 1024);
  EXPECT_EQ(first.l2_bytes, 50 << 20);
  EXPECT_EQ(first.bytes_per_second, 4.22e12);
  EXPECT_NEAR(first.flops, 66.9e12, 0.1e12);
  EXPECT_EQ(first.largest_cluster(), 16);
  const Gpu& second = gpu_of(Device::cuda(1));
  EXPECT_EQ(second.architecture, "sm_80");
  EXPECT_NEAR(second.bytes_per_second, 0.88 * 1555e9, 1e9);
  EXPECT_NEAR(second.flops, 19.5e12, 0.1e12);
  EXPECT_EQ(second.largest_cluster(), 1);
  EXPECT_EQ(&gpu_of(Device::cuda(0)), &first);
  EXPECT_EQ(device_rates(1).bytes_per_second, second.bytes_per_second);
}

TEST_F(RuntimeTest, ArchitecturesHaveATypicalGpu) {
  for (const std::string& name : known_architectures()) {
    const Gpu& gpu = gpu_of(Device::cuda_architecture(name));
    EXPECT_EQ(gpu.architecture, name);
    EXPECT_GT(gpu.multiprocessors, 0);
    EXPECT_LT(gpu.shared_bytes_per_block, gpu.shared_bytes_per_multiprocessor);
    EXPECT_GT(gpu.bytes_per_second, 1e11);
    EXPECT_GT(gpu.flops, 1e13);
  }
  EXPECT_EQ(sentence_of([] { gpu_of(Device::cuda_architecture("sm_90")); }),
            "architecture \"sm_90\" is unknown, must be one of sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120");
}

TEST_F(RuntimeTest, GpuThatDoesNotExistIsAnError) {
  EXPECT_EQ(sentence_of([] { gpu_of(Device::cuda(2)); }), "cuda:2 does not exist: this machine has 2 GPUs");
  EXPECT_EQ(sentence_of([] { Memory(7, 16); }), "cuda:7 does not exist: this machine has 2 GPUs");
  expect_has(sentence_of([] { gpu_of(Device::cpu()); }), "no GPU");
}

// ---- Kernels

TEST_F(RuntimeTest, LaunchPassesNumbersAndParameters) {
  const Function function(kernel("scale"), Device::cuda(0),
                          {.blocks = 40, .threads = 256, .shared_bytes = 1000});
  int stream = 0;
  const Parameters parameters{reinterpret_cast<float*>(16), 100, 1.5f};
  function.launch(parameters, Stream{&stream});
  function.launch(parameters, Stream{}, 7);
  ASSERT_EQ(state_->launches.size(), 2u);
  const stub::LaunchRecord& launch = state_->launches[0];
  EXPECT_EQ(launch.grid, 40u);
  EXPECT_EQ(launch.threads, 256u);
  EXPECT_EQ(launch.shared_bytes, 1000u);
  EXPECT_EQ(launch.stream, &stream);
  EXPECT_TRUE(launch.clusters.empty());
  EXPECT_EQ(launch.context, stub::context_of(0));
  ASSERT_EQ(launch.parameters.size(), sizeof parameters);
  EXPECT_EQ(std::memcmp(launch.parameters.data(), &parameters, sizeof parameters), 0);
  EXPECT_EQ(state_->launches[1].grid, 7u);
  EXPECT_EQ(state_->launches[1].stream, nullptr);
  EXPECT_GT(function.cubin().registers, 0);
}

// In a chain a kernel that waits by itself begins early, if a kernel is what it follows.
TEST_F(RuntimeTest, KernelsOfAChainBeginEarly) {
  const Function waits(kernel("waits"), Device::cuda(0),
                       {.blocks = 4, .threads = 64, .cluster = 4, .waits = true});
  const Function other(kernel("other"), Device::cuda(0), {.blocks = 4, .threads = 64});
  const Parameters parameters{};
  Memory memory(0, 64);
  const auto launch_all = [&] {
    waits.launch(parameters, Stream{});
    waits.launch(parameters, Stream{});
    other.launch(parameters, Stream{});
    waits.launch(parameters, Stream{});
    clear(memory.data(), 64, Stream{}, Device::cuda(0));
    waits.launch(parameters, Stream{});
  };
  launch_all();
  {
    const LaunchChain chain;
    launch_all();
  }
  launch_all();
  std::vector<bool> early;
  for (const stub::LaunchRecord& launch : state_->launches) early.push_back(launch.is_early);
  const std::vector<bool> none(5, false), some{false, true, false, true, false};
  std::vector<bool> wanted(none);
  wanted.insert(wanted.end(), some.begin(), some.end());
  wanted.insert(wanted.end(), none.begin(), none.end());
  EXPECT_EQ(early, wanted);
  EXPECT_EQ(state_->launches[6].clusters, (std::vector<uint32_t>{4, 1, 1}));
}

TEST_F(RuntimeTest, ClusterIsAnAttributeOfTheLaunch) {
  const Function eight(kernel("eight"), Device::cuda(0), {.blocks = 16, .threads = 64, .cluster = 8});
  EXPECT_EQ(set_value(non_portable_cluster_size_allowed), -1);
  const Function sixteen(kernel("sixteen"), Device::cuda(0), {.blocks = 32, .threads = 64, .cluster = 16});
  EXPECT_EQ(set_value(non_portable_cluster_size_allowed), 1);
  const Parameters parameters{};
  sixteen.launch(parameters, Stream{});
  EXPECT_EQ(state_->launches.back().clusters, (std::vector<uint32_t>{16, 1, 1}));
  EXPECT_EQ(state_->launches.back().grid, 32u);
  EXPECT_EQ(sixteen.resident_clusters(), 8);
  EXPECT_EQ(eight.resident_clusters(), 16);
}

TEST_F(RuntimeTest, OccupancyWithoutClustersCountsAllMultiprocessors) {
  EXPECT_EQ(Function(kernel("scale"), Device::cuda(1), {.threads = 512}).resident_clusters(), 4 * 108);
}

TEST_F(RuntimeTest, FunctionsWithTheSameCodeShareAModuleOfEachGpu) {
  const Function first(kernel("shared"), Device::cuda(0), {.shared_bytes = 100 << 10});
  const Function second(kernel("shared"), Device::cuda(0), {.shared_bytes = 10 << 10});
  EXPECT_EQ(state_->loaded_modules, 1);
  // What the first was promised is not taken back by the second.
  EXPECT_EQ(set_value(max_dynamic_shared_bytes), 100 << 10);
  const Function other(kernel("shared"), Device::cuda(1), {});
  EXPECT_EQ(state_->loaded_modules, 2);
}

TEST_F(RuntimeTest, NothingIsLoadedByALaunch) {
  const Function function(kernel("early"), Device::cuda(0), {});
  EXPECT_EQ(state_->loaded_modules, 1);
  const auto attributes = state_->attributes.size();
  function.launch(Parameters{}, Stream{});
  EXPECT_EQ(state_->loaded_modules, 1);
  EXPECT_EQ(state_->attributes.size(), attributes);
}

TEST_F(RuntimeTest, LoadingAndAllocatingWorkWhileAnotherThreadCaptures) {
  state_->capturing = true;
  const Function function(kernel("during_capture"), Device::cuda(1), {.shared_bytes = 1 << 16});
  const Memory memory(1, 100);
  function.launch(Parameters{}, Stream{});
  EXPECT_EQ(state_->launches.size(), 1u);
}

TEST_F(RuntimeTest, AnyThreadLaunchesOnAnyGpu) {
  const std::array functions{Function(kernel("any"), Device::cuda(0), {}),
                             Function(kernel("any"), Device::cuda(1), {})};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (uint32_t n = 1; n <= 50; ++n) functions[static_cast<size_t>(i % 2)].launch(i, Stream{}, n);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(state_->launches.size(), 400u);
  for (const stub::LaunchRecord& launch : state_->launches) {
    int thread = 0;
    std::memcpy(&thread, launch.parameters.data(), sizeof thread);
    EXPECT_EQ(launch.context, stub::context_of(thread % 2));
  }
  EXPECT_LE(state_->retained_contexts, 2);
}

TEST_F(RuntimeTest, ArchitectureIsCompiledForAndRunsNowhere) {
  const Function function(kernel("nowhere"), Device::cuda_architecture("sm_100"),
                          {.threads = 256, .cluster = 4});
  EXPECT_EQ(state_->loaded_modules, 0);
  EXPECT_GT(function.cubin().image.size(), 0u);
  EXPECT_GT(function.resident_clusters(), 100);
  expect_has(sentence_of([&] { function.launch(Parameters{}, Stream{}); }),
             "kernel nowhere was compiled for an arch");
}

TEST_F(RuntimeTest, TypicalOccupancyHeedsRegistersThreadsAndSharedMemory) {
  const auto blocks = [](const char* architecture, Launch launch) {
    return Function(kernel("typical"), Device::cuda_architecture(architecture), launch).resident_clusters();
  };
  EXPECT_EQ(blocks("sm_90a", {.threads = 1024}), 2 * 132);
  EXPECT_EQ(blocks("sm_86", {.threads = 1024}), 82);
  EXPECT_EQ(blocks("sm_90a", {.threads = 128, .shared_bytes = 100 << 10}), 2 * 132);
  EXPECT_EQ(blocks("sm_90a", {.threads = 128, .shared_bytes = 200 << 10}), 132);
  EXPECT_EQ(blocks("sm_90a", {.threads = 128, .cluster = 16, .shared_bytes = 200 << 10}), 8);
}

TEST_F(RuntimeTest, ErrorsOfTheDriverCarryTheKernelAndItsWords) {
  const Function function(kernel("failing"), Device::cuda(0), {.blocks = 3, .threads = 96});
  fail("cuLaunchKernelEx", 700);
  EXPECT_EQ(sentence_of([&] { function.launch(Parameters{}, Stream{}); }),
            "kernel failing cannot be launched with 3 blocks of 96 threads: CUDA_ERROR_ILLEGAL_ADDRESS, stub "
            "words");
  fail("cuModuleLoadData", 1);
  expect_has(sentence_of([] { Function(kernel("unloadable"), Device::cuda(0), {}); }),
             "kernel unloadable cannot be loaded on cuda:0 (driver 13.0, NVRTC " + nvrtc().version +
                 "): CUDA_ERROR_INVALID_VALUE");
  fail("cuFuncSetAttribute", 1);
  expect_has(sentence_of([] {
               Function(kernel("greedy"), Device::cuda(0), {.cluster = 16, .shared_bytes = 300000});
             }),
             "kernel greedy cannot have 300000 bytes of shared memory in clusters of 16");
  fail("cuOccupancyMaxActiveBlocksPerMultiprocessor", 12345);
  expect_has(sentence_of([&] { function.resident_clusters(); }),
             "kernel failing cannot be determined: CUDA error 12345");
}

TEST_F(RuntimeTest, FailedLoadIsTriedAgain) {
  fail("cuModuleLoadData", 2);
  EXPECT_THROW(Function(kernel("again"), Device::cuda(0), {}), Error);
  fail("", 0);
  Function(kernel("again"), Device::cuda(0), {}).launch(Parameters{}, Stream{});
  EXPECT_EQ(state_->launches.size(), 1u);
}

// ---- Counters of samples that are computed again

TEST_F(RuntimeTest, CountersAreZeroAndApartAlsoWhileAnotherThreadCaptures) {
  state_->capturing = true;
  std::set<int64_t*> counters;
  for (int i = 0; i < 1100; ++i) {  // more than a page has
    int64_t* const counter = new_counter(i % 2);
    EXPECT_EQ(value_of(counter), 0);
    *counter = i + 1;
    EXPECT_EQ(value_of(counter), i + 1);
    counters.insert(counter);
  }
  EXPECT_EQ(counters.size(), 1100u);
}

TEST_F(RuntimeTest, CounterThatCannotBeHadIsAnError) {
  // Until a page is full: how many are left is the other tests' doing.
  fail("cuMemHostAlloc", 2);
  const std::string words = sentence_of([] {
    for (int i = 0; i < 600; ++i) new_counter(0);
  });
  expect_has(words, "host memory for counters cannot be allocated: CUDA_ERROR_OUT_OF_MEMORY");
  fail("", 0);
  EXPECT_EQ(value_of(new_counter(0)), 0);
}

// The counter reaches the last launch, which does samples again, and no other.
TEST_F(RuntimeTest, PlanHandsItsCounterToTheLaunchThatComputesAgain) {
  const Problem problem = Problem::parse("conv2d(16,16,k=1) | relu @ 2x16x4x4 tf32", Device::cuda(0));
  const Plan forced = plan(problem, {.strategy = "gemm_mma", .target = ""});
  std::vector<float> memory(8192 + forced.workspace_bytes());
  void* aligned = memory.data();
  size_t space = memory.size() * sizeof(float);
  std::align(64, 1, aligned, space);
  int64_t* const counter = new_counter(0);
  const std::string_view address(reinterpret_cast<const char*>(&counter), sizeof counter);
  for (int64_t* const redone : {counter, static_cast<int64_t*>(nullptr)}) {
    state_->launches.clear();
    forced.run({aligned, aligned, {aligned, aligned}, nullptr, redone}, aligned, Stream{});
    ASSERT_GE(state_->launches.size(), 2u);
    for (const stub::LaunchRecord& launch : state_->launches) {
      const bool is_last = &launch == &state_->launches.back();
      EXPECT_EQ(launch.parameters.find(address) != std::string::npos, is_last && redone != nullptr);
    }
  }
}

// ---- Memory and time

// ---- Tuned plans

class TuningTest : public RuntimeTest {
 protected:
  // The launch of the last row that is predicted to be close, which the GPU is then fastest with.
  void SetUp() override {
    const Plan predicted = plan(problem_);
    double least = 1;
    for (const Candidate& candidate : predicted.candidates()) {
      if (candidate.strategy == predicted.strategy()) least = candidate.seconds;
    }
    for (const Candidate& candidate : predicted.candidates()) {
      const bool close = candidate.reason.empty() && candidate.seconds < 3 * least;
      if (close && candidate.strategy != predicted.strategy()) fastest_ = candidate.strategy;
    }
    ASSERT_NE(fastest_, "");
    const stub::LaunchRecord wanted = launch_of(fastest_);
    ASSERT_NE(shape(launch_of(predicted.strategy())), shape(wanted)) << "they are told apart by it";
    state_->launches.clear();
    state_->milliseconds = [wanted](const stub::LaunchRecord& launch) {
      return shape(launch) == shape(wanted) ? 1.0f : 2.0f;
    };
  }
  static std::array<uint32_t, 3> shape(const stub::LaunchRecord& launch) {
    return {launch.grid, launch.threads, launch.shared_bytes};
  }
  stub::LaunchRecord launch_of(const std::string& strategy) {
    const Plan forced = plan(problem_, {.strategy = strategy, .target = ""});
    std::vector<float> memory(8192 + forced.workspace_bytes());
    void* aligned = memory.data();
    size_t space = memory.size() * sizeof(float);
    std::align(64, 1, aligned, space);
    forced.run({aligned, aligned, {aligned, aligned}, nullptr}, aligned, Stream{});
    return state_->launches.back();
  }

  const Problem problem_ = Problem::parse("swish | group_norm(4) @ 8x16x32x32", Device::cuda(0));
  std::string fastest_;
};

TEST_F(TuningTest, TakesTheFastestAndRemembersIt) {
  const PlanOptions tuning{.strategy = "", .target = "", .tune = true};
  EXPECT_EQ(plan(problem_, tuning).strategy(), fastest_);
  EXPECT_GT(state_->launches.size(), 4u);
  state_->launches.clear();
  EXPECT_EQ(plan(problem_, tuning).strategy(), fastest_);
  EXPECT_TRUE(state_->launches.empty()) << "it was measured again";
  EXPECT_NE(plan(problem_).strategy(), fastest_) << "nobody asked for it";
  const std::vector<CacheEntry> entries = cache_entries();
  EXPECT_TRUE(
      std::any_of(entries.begin(), entries.end(), [](auto& entry) { return entry.kernel == "tuned"; }));
}

TEST_F(TuningTest, WithoutMemoryThePredictionDecides) {
  const Problem larger = Problem::parse("swish | group_norm(4) @ 9x16x32x32", Device::cuda(0));
  fail("cuMemAlloc", 2);
  EXPECT_EQ(plan(larger, {.strategy = "", .target = "", .tune = true}).strategy(), plan(larger).strategy());
}

TEST_F(RuntimeTest, StreamThatIsCapturedIsKnown) {
  int stream = 0;
  EXPECT_FALSE(is_captured(0, Stream{&stream}));
  state_->capturing = true;
  EXPECT_TRUE(is_captured(0, Stream{&stream}));
  EXPECT_FALSE(is_captured(0, Stream{}));
}

TEST_F(TuningTest, CallersChoicesAreRemembered) {
  EXPECT_EQ(remembered_choice(0, "tea or coffee"), "");
  remember_choice(0, "tea or coffee", "tea");
  EXPECT_EQ(remembered_choice(0, "tea or coffee"), "tea");
  EXPECT_EQ(remembered_choice(1, "tea or coffee"), "") << "another GPU";
}

TEST_F(RuntimeTest, MemoryIsCopiedAndFilled) {
  Memory memory(0, 4);
  memory.fill(7);
  std::array<char, 4> bytes{};
  memory.download(bytes.data(), 4);
  EXPECT_EQ(bytes, (std::array<char, 4>{7, 7, 7, 7}));
  memory.upload("ab", 2);
  const Memory moved(std::move(memory));
  moved.download(bytes.data(), 4);
  EXPECT_EQ(bytes, (std::array<char, 4>{'a', 'b', 7, 7}));
  clear(moved.data(), 3, Stream{}, Device::cuda(0));
  moved.download(bytes.data(), 4);
  EXPECT_EQ(bytes, (std::array<char, 4>{0, 0, 0, 7}));
  EXPECT_THROW(moved.download(bytes.data(), 5), Error);
  EXPECT_EQ(Memory(0, 0).data(), nullptr);
}

TEST_F(RuntimeTest, OutOfMemoryNamesTheBytesAndLeavesTheProcessUsable) {
  EXPECT_EQ(sentence_of([] { Memory(1, size_t{3} << 30); }),
            "cuda:1 has no 3.0 GiB of memory left: 1.0 GiB of 140.0 GiB are free");
  state_->free_bytes = 1000;
  EXPECT_EQ(sentence_of([] { Memory(0, 1001); }),
            "cuda:0 has no 1001 bytes of memory left: 0.0 GiB of 140.0 GiB are free");
  EXPECT_NE(Memory(0, 999).data(), nullptr);
  fail("cuMemAlloc", 700);
  expect_has(sentence_of([] { Memory(0, 10); }),
             "cuda:0 cannot give 10 bytes of memory: CUDA_ERROR_ILLEGAL_ADDRESS");
}

TEST_F(RuntimeTest, FailedWorkIsReportedWhenWaitedFor) {
  Timer timer(0);
  timer.start();
  EXPECT_DOUBLE_EQ(timer.stop(), 2.5e-3);
  synchronize(1);
  fail("cuCtxSynchronize", 700);
  EXPECT_EQ(sentence_of([] { synchronize(0); }),
            "work on the GPU failed: CUDA_ERROR_ILLEGAL_ADDRESS, stub words");
  fail("cuEventSynchronize", 700);
  expect_has(sentence_of([&] { timer.stop(); }), "work on the GPU failed");
}

// ---- Processes without a GPU, a driver or a compiler

TEST(DISABLED_Child, PrintsWhyThereIsNoGpu) {
  std::printf("%s\n%d GPUs\n", unavailable_reason().c_str(), device_count());
}

TEST(WithoutGpu, MissingDriverIsOneSentence) {
  const ChildResult result =
      run_child("PrintsWhyThereIsNoGpu", {{"ONEPASS_CUDA_DRIVER", "/nowhere/libcuda.so.1"}});
  expect_has(result.output,
             "\nthe CUDA driver cannot be opened where ONEPASS_CUDA_DRIVER says: /nowhere/libcuda.so.1");
  expect_has(result.output, "\n0 GPUs");
}

TEST(WithoutGpu, DriverWithoutGpusIsOneSentence) {
  const ChildResult result =
      run_child("PrintsWhyThereIsNoGpu", {{"ONEPASS_CUDA_DRIVER", stub_path}, {"ONEPASS_STUB_GPUS", "0"}});
  expect_has(result.output, std::string("\nthe CUDA driver at ") + stub_path +
                                " does not start: CUDA_ERROR_NO_DEVICE, no CUDA-capable device is detected");
  expect_has(result.output, "\n0 GPUs");
}

TEST(WithoutGpu, MissingCompilerIsOneSentence) {
  const ChildResult result =
      run_child("PrintsWhyThereIsNoGpu", {{"ONEPASS_CUDA_DRIVER", stub_path}, {"ONEPASS_NVRTC", "/nowhere"}});
  expect_has(result.output, "\nNVRTC cannot be opened where ONEPASS_NVRTC says: /nowhere");
  expect_has(result.output, "\n0 GPUs");
}

}  // namespace
}  // namespace onepass::cuda
