// Compiles kernels from source text to machine code by NVRTC, with a cache in memory and on disk.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cuda/runtime/scoped.h"

namespace onepass::cuda {

// One translation unit with one kernel. It includes the embedded headers of src/cuda by their paths there and
// nothing else.
struct Source {
  std::string name;  // of the extern "C" __global__ function; also names the cached file and errors
  std::string text;

  bool operator==(const Source&) const = default;
};

// Machine code for one architecture, and the assembler's figures for it.
struct Cubin {
  std::string image;
  int registers = 0;      // a thread
  int spilled_bytes = 0;  // stores and loads of a thread's local memory
  int shared_bytes = 0;   // static
};

// From memory, from the disk cache, or compiled now. Throws BuildError with the kernel's name and the
// compiler's log where it does not compile. It also throws where the compiler serialises wgmma, ignores
// setmaxnreg, or has crashed on the kernel before.
Cubin compile(const Source& source, const std::string& architecture);
// The same for several kernels at once, in parallel; in the order given.
std::vector<Cubin> compile(std::span<const Source> sources, const std::string& architecture);

// While one lives, kernels that this thread asks for are not compiled: each is an empty Cubin, and NVRTC is
// not needed. Plans for an architecture are made and recorded in milliseconds. None of them can run.
class WithoutCompiling : public Scoped {
 public:
  WithoutCompiling();
  ~WithoutCompiling();
};

}  // namespace onepass::cuda
