// What the rows share that hold slabs on the chip between statistics and output: one launch, no workspace.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/runtime/parameters.h"
#include "cuda/tail/tail.h"
#include "tail/parameters.cuh"

namespace onepass::cuda {

// `Row` has source(problem, shape, numbers), the kernel's text. `Numbers` has threads, blocks (of a cluster),
// shared_bytes(), the size of the kernel's `Shared`, and whether the kernel waits for the one before it by
// itself; it may have by_memory, where the blocks are no cluster but wait for each other.
template <class Row, class Numbers>
class SlabKernel : public Kernel {
 public:
  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override { return 0; }

  std::vector<std::string> numerics() const override {
    return notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void*, Stream stream) const override {
    launch_slabs<TailParameters>(function_, blocks_, shape_, problem_, arguments, stream);
  }

 protected:
  SlabKernel(const Problem& problem, TailShape shape)
      : problem_(problem),
        shape_(std::move(shape)),
        numbers_(*numbers_of<Numbers>(problem)),
        function_(Row::source(problem_, shape_, numbers_), problem.device,
                  {static_cast<uint32_t>(numbers_.blocks), static_cast<uint32_t>(numbers_.threads),
                   static_cast<uint32_t>(by_memory() ? 1 : numbers_.blocks),
                   static_cast<uint32_t>(numbers_.shared_bytes()), by_memory(), numbers_.waits()}) {}

  bool by_memory() const {
    if constexpr (requires { numbers_.by_memory; }) return numbers_.by_memory;
    return false;
  }

  std::string cluster_text() const {
    const char* const several = by_memory() ? " blocks that wait for each other" : " blocks of a cluster";
    return std::to_string(numbers_.blocks) + (numbers_.blocks > 1 ? several : " block");
  }

  Problem problem_;
  TailShape shape_;
  Numbers numbers_;
  Function function_;
  Number blocks_ = 1;
};

}  // namespace onepass::cuda
