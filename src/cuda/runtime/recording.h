// Records launches instead of running them. A plan so becomes source text that needs no library.
//
// While a Recording lives, what this thread's plans would put on a stream is kept as steps whose numbers and
// addresses are formulas. Rows do not know of it: Parameters, clear, at and Function report to it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cuda/runtime/function.h"
#include "cuda/runtime/number.h"
#include "cuda/runtime/scoped.h"

namespace onepass::cuda {

class Recording : public Scoped {
 public:
  struct Kernel {
    Source source;
    uint32_t threads = 0;
    uint32_t cluster = 1;
    uint32_t shared_bytes = 0;
    bool cooperative = false;
    bool waits = false;
    std::string resident;  // what formulas call the clusters of it that a GPU runs at a time

    bool operator==(const Kernel&) const = default;
  };
  // A launch of a kernel, or, where `kernel` is negative, memory set to zero.
  struct Step {
    int kernel = -1;
    Number blocks;
    std::vector<Number> words;
    std::vector<std::string> names;  // of the words
    Number memory;
    Number bytes;
  };

  Recording();
  ~Recording();
  // Launches run again; the recorded steps stay.
  void stop();
  // That of this thread; null where launches run.
  static Recording* current();

  // Names an address: it appears so in formulas.
  void name(const void* address, std::string text);
  // What an address is called; its value where it has no name.
  Number address(const void* pointer) const;
  // An address in memory that was named before, and how many bytes there are.
  void note(const void* base, const void* address, const Number& offset, const Number& bytes);

  void launch(const Function& function, const Number& blocks, std::vector<Number> words,
              std::vector<std::string> names);
  void clear(const void* memory, const Number& bytes);

  const std::vector<Kernel>& kernels() const { return kernels_; }
  const std::vector<Step>& steps() const { return steps_; }
  // Where the last noted memory ends that begins from `base` on, relative to it.
  Number end_of(const void* base) const;

 private:
  struct Memory {
    Number offset;  // from the first base
    const void* base;
    Number end;
  };

  std::map<const void*, Number> names_;
  std::map<const void*, Memory> memory_;
  std::vector<Kernel> kernels_;
  std::vector<Step> steps_;
};

}  // namespace onepass::cuda
