// Calls of NVRTC, in this process or in a child process: their input and output.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/runtime/device_code.h"
#include "cuda/runtime/nvrtc_call.h"

namespace onepass::cuda {

struct CompilerInput {
  std::string file;  // names the text in the log
  std::string text;
  std::vector<std::string> options;
  std::vector<const DeviceFile*> headers;
};

struct CompilerOutput {
  CudaResult result = cuda_success;
  std::string words;  // for the result
  std::string log;
  std::string image;
};

// NVRTC in this process. A compiler that crashes ends it.
CompilerOutput run_compiler(const CompilerInput& input);

// What became of a compiler in a process of its own.
struct ChildOutcome {
  enum class Kind {
    ended,        // there is an output
    crashed,      // by itself: a signal of a fault, a call of exit, no end within the limit
    interrupted,  // killed from outside: nothing is known of the kernel
    not_run,      // no process could be started
  };
  Kind kind = Kind::not_run;
  CompilerOutput output;
  std::string how;  // in words, where there is no output: "ended by signal 11 (Segmentation fault)"
};

// NVRTC in a process of its own, stopped at the limit.
ChildOutcome run_compiler_in_child(const CompilerInput& input, std::chrono::milliseconds limit);

// The program of that process, embedded at build time; empty where the system is not Linux.
std::string_view child_program();

}  // namespace onepass::cuda
