// A compiler that crashes, and processes that are interrupted while they compile: what the next process does.
//
// The stub compiler crashes, dies or waits where the environment says so.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "cuda/runtime/attempt.h"
#include "cuda/runtime/cache.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/compiler.h"
#include "cuda/runtime/sha256.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "onepass/plan.h"
#include "stub_driver/stub_cuda.h"
#include "support/child_process.h"

// In place of the system's, for the library too: refused with the error that the environment names.
extern "C" int flock(int file, int operation) noexcept {
  if (const char* error = std::getenv("ONEPASS_TEST_FLOCK_ERROR")) {
    errno = std::atoi(error);
    return -1;
  }
  return static_cast<int>(syscall(SYS_flock, file, operation));
}
extern "C" int memfd_create(const char* name, unsigned flags) noexcept {
  if (const char* error = std::getenv("ONEPASS_TEST_MEMFD_ERROR")) {
    errno = std::atoi(error);
    return -1;
  }
  return static_cast<int>(syscall(SYS_memfd_create, name, flags));
}

namespace onepass::cuda {
namespace {

namespace files = std::filesystem;
using test::ChildEnvironment;
using test::ChildResult;
using test::read_bytes;
using test::run_child;
using test::run_children;
using test::ScopedVariable;
using test::TemporaryFolder;
using test::write_bytes;

constexpr const char* stub_path = ONEPASS_STUB_PATH;
constexpr const char* here = "\n1 compiled in this process";
constexpr const char* elsewhere = "\n0 compiled in this process";
constexpr const char* good = "\nthe image is //fragile";

// The environment of a process whose compiler suffers this on the fragile kernel.
ChildEnvironment with_fault(const std::string& fault, ChildEnvironment more = {}) {
  more.insert({{"ONEPASS_NVRTC", stub_path}, {"ONEPASS_STUB_FAULT_AT", "//fragile"}});
  more["ONEPASS_STUB_FAULT"] = fault;
  return more;
}

stub::State& stub_state() {
  void* library = dlopen(stub_path, RTLD_NOW | RTLD_LOCAL);
  return *reinterpret_cast<stub::State* (*)()>(dlsym(library, "onepass_stub_state"))();
}

void expect_has(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << words << "\nis not in\n" << text;
}

void print_result(const std::string& text) {
  try {
    std::printf("\nthe image is %s\n", compile(Source{"fragile", text}, "sm_80").image.c_str());
  } catch (const Error& error) {
    std::printf("\n%s\n", error.what());
  }
  std::printf("\n%d compiled in this process\n", stub_state().compilations.load());
}

TEST(DISABLED_Child, CompilesTheFragileKernel) { print_result("//fragile"); }
TEST(DISABLED_Child, CompilesTheFragileKernelThatIsWrong) {
  print_result("//fragile #error //log the words");
}

// A process that compiles the fragile kernel, and two at once.
ChildResult run_fragile(const ChildEnvironment& environment) {
  return run_child("CompilesTheFragileKernel", environment);
}
std::vector<ChildResult> run_two(const ChildEnvironment& environment) {
  return run_children(2, "CompilesTheFragileKernel", environment);
}

class AttemptTest : public ::testing::Test {
 protected:
  AttemptTest() : variable_("ONEPASS_CACHE_DIR", folder_.path()) {}

  std::vector<std::string> names_with(const std::string& words) const {
    std::vector<std::string> list;
    for (const auto& item : files::directory_iterator(folder_.path())) {
      const std::string name = item.path().filename();
      if (name.find(words) != std::string::npos) list.push_back(name);
    }
    return list;
  }
  size_t markers() const { return names_with(".compiling-").size(); }
  std::string record_path() const {
    const std::vector<std::string> names = names_with(".condemned-");
    EXPECT_EQ(names.size(), 1u);
    return names.empty() ? "no record" : path_of(names.front());
  }
  size_t records() const { return names_with(".condemned-").size(); }
  void wait_for_markers(size_t count) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (markers() != count && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(markers(), count);
  }
  std::string path_of(const std::string& name) const { return folder_.path() + '/' + name; }

  // Leaves a suspect, then a record of it.
  void condemn(const std::string& fault, const ChildEnvironment& more = {}) const {
    EXPECT_NE(run_fragile(with_fault(fault, more)).exit_code, 0);
    expect_has(run_fragile(with_fault(fault, more)).output, "is not compiled: NVRTC 99.");
    EXPECT_EQ(records(), 1u);
  }

  const CacheKey key_{"tail", "sm_90a", Sha256().add("key").hex()};

  TemporaryFolder folder_;
  TemporaryFolder gate_;  // for a file that processes wait for

 private:
  ScopedVariable variable_;
};

// ---- Markers

TEST_F(AttemptTest, HeldMarkerIsNoSuspicion) {
  {
    const CompileMarker marker(key_);
    EXPECT_EQ(markers(), 1u);
    EXPECT_FALSE(Attempts(key_, "").is_suspect());
  }
  EXPECT_EQ(markers(), 0u);
}

TEST_F(AttemptTest, MarkerOfAnotherKernelIsNoSuspicion) {
  CacheKey other = key_;
  other.architecture = "sm_90";
  write_bytes(path_of(".compiling-" + file_name(other) + "-1"), "");
  EXPECT_FALSE(Attempts(key_, "").is_suspect());
  EXPECT_TRUE(Attempts(other, "").is_suspect());
}

TEST_F(AttemptTest, TwoThatLookAtOnceBothSuspect) {
  const std::string name = ".compiling-" + file_name(key_) + "-1";
  write_bytes(path_of(name), "");
  const Descriptor folder = open_folder();
  const Descriptor other = open_file(folder.get(), name);
  ASSERT_EQ(flock(other.get(), LOCK_SH), 0);
  EXPECT_TRUE(Attempts(key_, "").is_suspect());
}

TEST_F(AttemptTest, KilledProcessLeavesASuspectThatIsCompiledInAChild) {
  EXPECT_NE(run_fragile(with_fault("kill")).exit_code, 0);
  EXPECT_EQ(markers(), 1u);
  const ChildResult next = run_fragile(with_fault(""));
  EXPECT_EQ(next.exit_code, 0);
  expect_has(next.output, good);
  expect_has(next.output, elsewhere);
  EXPECT_EQ(next.output.find("warning"), std::string::npos) << next.output;
  EXPECT_EQ(names_with("").size(), 1u) << "the image alone";
  EXPECT_EQ(names_with(".cubin").size(), 1u);
}

TEST_F(AttemptTest, ProcessesThatCompileASuspectAtOnceAllHaveIt) {
  EXPECT_NE(run_fragile(with_fault("kill")).exit_code, 0);
  for (const ChildResult& next : run_children(3, "CompilesTheFragileKernel", with_fault(""))) {
    EXPECT_EQ(next.exit_code, 0);
    expect_has(next.output, good);
    EXPECT_EQ(next.output.find("warning"), std::string::npos) << next.output;
  }
  EXPECT_EQ(names_with("").size(), 1u) << "the image alone";
}

TEST_F(AttemptTest, SuspectThatDoesNotCompileIsNoSuspectAnyMore) {
  const std::string name = "CompilesTheFragileKernelThatIsWrong";
  EXPECT_NE(run_child(name, with_fault("kill")).exit_code, 0);
  const ChildResult next = run_child(name, with_fault(""));
  expect_has(next.output, "\nkernel fragile does not compile: STUB_ERROR\nthe words");
  expect_has(next.output, elsewhere);
  EXPECT_TRUE(names_with("").empty());
  expect_has(run_child(name, with_fault("")).output, here);
}

TEST_F(AttemptTest, InterruptedRunsDoNotDisableAKernel) {
  const std::string gate = gate_.path() + "/gate";
  std::thread killed([&] {
    for (const ChildResult& result : run_two(with_fault("kill", {{"ONEPASS_STUB_GATE", gate}}))) {
      EXPECT_NE(result.exit_code, 0);
    }
  });
  wait_for_markers(2);
  write_bytes(gate, "open");
  killed.join();
  EXPECT_EQ(markers(), 2u);
  for (int i = 0; i < 2; ++i) {  // the process that tries again is killed too
    const ChildResult third = run_fragile(with_fault("kill"));
    EXPECT_EQ(third.exit_code, 0);
    expect_has(third.output, "was ended by signal 9 (Killed); the next call tries again");
    EXPECT_EQ(records(), 0u);
    EXPECT_EQ(markers(), 2u);
  }
  expect_has(run_fragile(with_fault("")).output, good);
  EXPECT_EQ(markers(), 0u);
}

// As in another container: the process lives, its number here does not.
TEST_F(AttemptTest, LiveProcessesAreNotSuspectedWhateverTheirNumbers) {
  const std::string gate = gate_.path() + "/gate";
  std::thread holders([&] {
    for (const ChildResult& holder : run_two(with_fault("", {{"ONEPASS_STUB_GATE", gate}}))) {
      EXPECT_EQ(holder.exit_code, 0);
      expect_has(holder.output, good);
    }
  });
  wait_for_markers(2);
  int dead = 99999990;  // more than a system has
  for (const std::string& name : names_with(".compiling-")) {
    files::rename(path_of(name), path_of(name.substr(0, name.rfind(".cubin-") + 7) + std::to_string(dead++)));
  }
  const ChildResult other = run_fragile(with_fault(""));
  expect_has(other.output, good);
  expect_has(other.output, here);
  EXPECT_EQ(markers(), 2u);
  write_bytes(gate, "open");
  holders.join();
}

TEST_F(AttemptTest, FileSystemWithoutLocksMeansNoMarkers) {
  for (const int error : {ENOLCK, EOPNOTSUPP, EINVAL}) {
    const ChildEnvironment refused{{"ONEPASS_TEST_FLOCK_ERROR", std::to_string(error)}};
    EXPECT_NE(run_fragile(with_fault("kill", refused)).exit_code, 0);
    EXPECT_TRUE(names_with("").empty());
    write_bytes(path_of(".compiling-" + file_name(key_) + "-1"), "");
    {
      const ScopedVariable variable("ONEPASS_TEST_FLOCK_ERROR", std::to_string(error));
      EXPECT_FALSE(Attempts(key_, "").is_suspect());
    }
    EXPECT_TRUE(Attempts(key_, "").is_suspect());
    const ChildResult next = run_fragile(with_fault("", refused));
    expect_has(next.output, good);
    expect_has(next.output, here);
    clear_cache();
  }
}

// ---- Kernels on which the compiler crashes

TEST_F(AttemptTest, CrashInTheChildCondemnsTheKernel) {
  for (const std::string fault : {"crash", "exit"}) {
    EXPECT_NE(run_fragile(with_fault(fault)).exit_code, 0);
    const ChildResult second = run_fragile(with_fault(fault));
    EXPECT_EQ(second.exit_code, 0) << second.output;
    expect_has(second.output, "\nkernel fragile is not compiled: NVRTC 99.1 of ");
    expect_has(second.output, elsewhere);
    ASSERT_EQ(records(), 1u);
    EXPECT_EQ(markers(), 0u);
    const std::string record = record_path();
    expect_has(second.output, " UTC; remove " + record + " to try again\n");
    expect_has(read_bytes(record), "\nended by ");
    // The record is enough: a compiler that would not crash is not asked.
    const ChildResult third = run_fragile(with_fault(""));
    expect_has(third.output, "\nkernel fragile is not compiled: NVRTC 99.1 of ");
    expect_has(third.output, elsewhere);
    files::remove(record);
    const ChildResult fourth = run_fragile(with_fault(""));
    expect_has(fourth.output, good);
    expect_has(fourth.output, here);
    clear_cache();
  }
}

TEST_F(AttemptTest, ClearedCacheForgetsTheRecord) {
  condemn("crash");
  EXPECT_EQ(clear_cache(), 0);
  EXPECT_EQ(records(), 0u);
  expect_has(run_fragile(with_fault("")).output, good);
}

TEST_F(AttemptTest, NewVersionOfTheCompilerTriesAgainInAChild) {
  condemn("crash");
  const ChildEnvironment newer{{"ONEPASS_STUB_MINOR", "2"}};
  const ChildResult still = run_fragile(with_fault("crash", newer));
  EXPECT_EQ(still.exit_code, 0);
  expect_has(still.output, "is not compiled: NVRTC 99.2 of ");
  expect_has(read_bytes(record_path()), "\nNVRTC 99.2 of ");
  const ChildEnvironment newest{{"ONEPASS_STUB_MINOR", "3"}};
  const ChildResult mended = run_fragile(with_fault("", newest));
  expect_has(mended.output, good);
  expect_has(mended.output, elsewhere);
  EXPECT_EQ(records(), 0u);
}

TEST_F(AttemptTest, AnotherBuildOfTheSameVersionTriesAgain) {
  condemn("crash");
  const TemporaryFolder other;
  const std::string build = other.path() + "/libnvrtc.so";
  write_bytes(build, read_bytes(stub_path) + "more");
  const ChildResult result =
      run_child("CompilesTheFragileKernel", {{"ONEPASS_NVRTC", build}, {"ONEPASS_STUB_FAULT", ""}});
  expect_has(result.output, good);
  EXPECT_EQ(records(), 0u);
}

TEST_F(AttemptTest, DamagedRecordIsASuspicion) {
  condemn("crash");
  write_bytes(record_path(), "onepass condemned kernel 1\nNVRTC 99.1");
  const ChildResult result = run_fragile(with_fault(""));
  expect_has(result.output, good);
  expect_has(result.output, elsewhere);
  EXPECT_EQ(records(), 0u);
}

TEST(DISABLED_Child, PlansATail) {
  std::printf("%s\n",
              plan(Problem::parse("swish | group_norm(2) @ 2x8x9x7", Device::cuda())).explain().c_str());
}

TEST_F(AttemptTest, PlansGoOnWithTheNextRow) {
  ChildEnvironment environment = with_fault("", {{"ONEPASS_CUDA_DRIVER", stub_path}});
  const std::string text = run_child("PlansATail", environment).output;
  const size_t star = text.find("\n* ") + 3;
  const std::string row = text.substr(star, text.find(' ', star) - star);
  clear_cache();
  environment["ONEPASS_STUB_FAULT"] = "crash";
  environment["ONEPASS_STUB_FAULT_AT"] = "onepass_" + row + "(";
  EXPECT_NE(run_child("PlansATail", environment).exit_code, 0);
  const ChildResult second = run_child("PlansATail", environment);
  EXPECT_EQ(second.exit_code, 0) << second.output;
  expect_has(second.output, "no: kernel onepass_" + row + " is not compiled: NVRTC 99.1 of ");
  EXPECT_EQ(second.output.find("\n* " + row + ' '), std::string::npos) << second.output;
}

// ---- The process of its own

TEST(DISABLED_Child, StopsACompilerThatHangs) {
  const CompilerInput input{"fragile.cu", "//fragile", {}, {}};
  const auto start = std::chrono::steady_clock::now();
  const ChildOutcome outcome = run_compiler_in_child(input, std::chrono::milliseconds(300));
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(outcome.kind, ChildOutcome::Kind::crashed);
  EXPECT_EQ(outcome.how, "stopped after 300 ms");
  EXPECT_GE(took, std::chrono::milliseconds(300));
}

TEST_F(AttemptTest, CompilerThatHangsIsStopped) {
  const ChildResult result =
      run_child("StopsACompilerThatHangs", with_fault("", {{"ONEPASS_STUB_GATE", "/nowhere/gate"}}));
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

// A program that ignores SIGCHLD never learns the status of a child; one that has closed its streams has
// their numbers free.
TEST(DISABLED_Child, CompilesInAnOddProgram) {
  std::signal(SIGCHLD, SIG_IGN);
  close(STDIN_FILENO);
  const CompilerInput input{"fragile.cu", "//fragile", {}, {}};
  const ChildOutcome outcome = run_compiler_in_child(input, std::chrono::minutes(1));
  std::printf("\n%d %s%s\n", static_cast<int>(outcome.kind), outcome.how.c_str(),
              outcome.output.image.c_str());
}

TEST_F(AttemptTest, OddProgramsHaveItToo) {
  expect_has(run_child("CompilesInAnOddProgram", with_fault("")).output, "\n0 //fragile\n");
  expect_has(run_child("CompilesInAnOddProgram", with_fault("crash")).output, "\n1 ended by ");
  expect_has(run_child("CompilesInAnOddProgram", with_fault("kill")).output, "\n2 ended by signal 9");
  expect_has(run_child("CompilesInAnOddProgram", with_fault("orphan")).output, "\n2 ended by a signal");
}

TEST_F(AttemptTest, WithoutAProcessOfItsOwnASuspectIsCompiledHereWithAWarning) {
  EXPECT_NE(run_fragile(with_fault("kill")).exit_code, 0);
  const ChildResult next = run_fragile(with_fault("", {{"ONEPASS_TEST_MEMFD_ERROR", std::to_string(EPERM)}}));
  EXPECT_EQ(next.exit_code, 0);
  expect_has(next.output, good);
  expect_has(next.output, here);
  expect_has(next.output, "onepass: warning: kernel fragile was not compiled to its end before");
  EXPECT_EQ(markers(), 0u);
}

// The real NVRTC, which loads its builtins.
TEST(CompilerChild, SaysTheSameAsThisProcess) {
  for (const std::string body : {"*x = 1;", "*x = undeclared;"}) {
    const CompilerInput input{
        "one.cu",
        "#include \"device/types.cuh\"\nextern \"C\" __global__ void one(float* x) {" + body + "}",
        {"--gpu-architecture=sm_90a", "--std=c++20", "--device-as-default-execution-space",
         "--ptxas-options=-v"},
        {}};
    CompilerInput whole = input;
    for (const DeviceFile* file : included_files(input.text)) whole.headers.push_back(file);
    const CompilerOutput expected = run_compiler(whole);
    const ChildOutcome outcome = run_compiler_in_child(whole, std::chrono::minutes(5));
    ASSERT_EQ(outcome.kind, ChildOutcome::Kind::ended) << outcome.how;
    EXPECT_EQ(outcome.output.result, expected.result);
    EXPECT_EQ(outcome.output.words, expected.words);
    EXPECT_EQ(outcome.output.image, expected.image);
    EXPECT_EQ(expected.image.empty(), expected.result != cuda_success);
    const auto first_line = [](const std::string& log) { return log.substr(0, log.find('\n')); };
    EXPECT_EQ(first_line(outcome.output.log), first_line(expected.log));  // others tell the time it took
    EXPECT_FALSE(expected.log.empty());
  }
}

TEST(CompilerChild, NeedsTheCLibraryAlone) {
  const std::string_view program = child_program();
  if (program.find("san.so") != program.npos) GTEST_SKIP() << "a sanitizer brings its libraries";
  EXPECT_NE(program.find("libc.so"), program.npos);
  EXPECT_EQ(program.find("libstdc++"), program.npos);
  EXPECT_EQ(program.find("libgcc_s"), program.npos);
}

}  // namespace
}  // namespace onepass::cuda
