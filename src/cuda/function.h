// A kernel loaded on a GPU, ready to be launched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cuda/compile.h"
#include "cuda/gpu.h"
#include "onepass/executor.h"
#include "onepass/problem.h"

namespace onepass::cuda {

// The numbers of a launch, fixed when the plan is made.
struct Launch {
  uint32_t blocks = 1;
  uint32_t threads = 32;
  uint32_t cluster = 1;       // blocks in a cluster
  uint32_t shared_bytes = 0;  // dynamic
};

// Compiled for the device's architecture and, unless the device only names an architecture, loaded there at
// once with its attributes set (dynamic shared memory, clusters of more than 8): nothing is loaded in a
// capture.
class Function {
 public:
  Function(const Source& source, const Device& device, const Launch& launch);

  const Launch& numbers() const { return launch_; }
  const Cubin& cubin() const { return cubin_; }
  // How many clusters (blocks, where the cluster is 1) of this launch the whole GPU runs at a time; a typical
  // figure where there is no GPU.
  int resident_clusters() const;

  // Puts the kernel on the stream with the bytes of one parameter struct; `blocks` replaces the plan's count
  // where it is not 0. Works from any thread, whatever its current context. Throws Error with the kernel's
  // name and the driver's words.
  void launch(const void* parameters, size_t bytes, Stream stream, uint32_t blocks = 0) const;
  template <class Parameters>
  void launch(const Parameters& parameters, Stream stream, uint32_t blocks = 0) const {
    launch(&parameters, sizeof parameters, stream, blocks);
  }

 private:
  struct Loaded;

  const Gpu* gpu_;
  Launch launch_;
  Cubin cubin_;
  std::string name_;
  std::shared_ptr<const Loaded> loaded_;  // null where the device only names an architecture
};

// Sets bytes of the device's memory to zero on the stream.
void clear(void* memory, size_t bytes, Stream stream, const Device& device);

}  // namespace onepass::cuda
