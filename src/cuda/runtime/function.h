// A kernel loaded on a GPU, ready to be launched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/runtime/compile.h"
#include "cuda/runtime/gpu.h"
#include "cuda/runtime/number.h"
#include "cuda/runtime/scoped.h"
#include "onepass/executor.h"
#include "onepass/problem.h"

namespace onepass::cuda {

// The numbers of a launch, fixed when the plan is made.
struct Launch {
  Number blocks = 1;
  uint32_t threads = 32;
  uint32_t cluster = 1;       // blocks in a cluster
  uint32_t shared_bytes = 0;  // dynamic
  // Blocks wait for each other: none starts before all can run at the same time. Not with clusters.
  bool cooperative = false;
  // It calls wait_for_kernel_before (device/types.cuh) before it touches memory. In a LaunchChain it may so
  // begin before its predecessor has ended.
  bool waits = false;
};

// While it lives, launches of this thread follow each other on one stream by programmatic dependent launch. A
// kernel that waits by itself may begin when all blocks of its predecessor have begun. That saves 1 to 2 us
// between two kernels.
class LaunchChain : public Scoped {
 public:
  LaunchChain();
  ~LaunchChain();

  // What this thread has put on a stream last, where a chain lives.
  static void note_kernel();
  static void note_other();
  // Whether that was a kernel.
  static bool follows_kernel();

 private:
  LaunchChain* before_;
  bool has_kernel_ = false;
};

// Compiled for the device's architecture and loaded at once, with its attributes set (dynamic shared memory,
// clusters of more than 8). Nothing is loaded in a capture, nor where the device only names an architecture.
// Throws BuildError where the GPU refuses the attributes or has no room for one cluster.
class Function {
 public:
  Function(const Source& source, const Device& device, const Launch& launch);

  const Launch& numbers() const { return launch_; }
  const Cubin& cubin() const { return cubin_; }
  const Source& source() const { return source_; }
  // How many clusters of this launch the whole GPU runs at a time, at least one; a typical figure where there
  // is no GPU. Blocks count where the cluster is 1.
  Number resident_clusters() const;
  // Throws BuildError unless so many of them run at a time: those that wait for each other would hang.
  void require_resident(int64_t clusters) const;
  // What formulas call that figure: a name of its own for each kernel.
  std::string resident_name() const;

  // Puts the kernel on the stream with the bytes of one parameter struct; `blocks` replaces the plan's count
  // where it is not 0. Works from any thread, whatever its current context. Throws Error with the kernel's
  // name and the driver's words.
  void launch(const void* parameters, size_t bytes, Stream stream, const Number& blocks = 0) const;
  template <class Parameters>
  void launch(const Parameters& parameters, Stream stream, const Number& blocks = 0) const {
    launch(&parameters, sizeof parameters, stream, blocks);
  }

 private:
  struct Loaded;

  int count_resident_clusters() const;

  const Gpu* gpu_;
  Launch launch_;
  Source source_;
  Cubin cubin_;
  std::shared_ptr<const Loaded> loaded_;  // null where the device only names an architecture
};

// Sets bytes of the device's memory to zero on the stream.
void clear(void* memory, const Number& bytes, Stream stream, const Device& device);

}  // namespace onepass::cuda
