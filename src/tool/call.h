// A plan with its tensors in the memory of its device. It is run, timed and its output copied back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "onepass/executor.h"
#include "onepass/plan.h"
#include "tool/buffers.h"

namespace onepass::tool {

class Call {
 public:
  // Throws Error where the machine or the GPU has not as much memory.
  Call(const Plan& plan, uint64_t seed, Executor& executor, Pages pages = Pages::huge);
  ~Call();

  // On a GPU the work is put on the default stream and not waited for.
  void run();
  void run_and_wait();
  // Seconds of one run. On a GPU its own time, with nothing of the tensors in its cache before.
  double timed_run();
  // Brings the output of the last run into tensors().output.
  void fetch_output();
  const Tensors& tensors() const { return tensors_; }

 private:
  struct OnGpu;

  const Plan& plan_;
  Executor& executor_;
  Tensors tensors_;
  std::unique_ptr<OnGpu> gpu_;  // null for a plan of the CPU
};

// "2 threads" or "cuda:0".
std::string place_text(const Device& device);

}  // namespace onepass::tool
