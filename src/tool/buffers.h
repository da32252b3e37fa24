// Memory of a call: tensors filled with random values, every page written before anything is timed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "onepass/executor.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::tool {

// How large buffers lie in memory. Huge: in pages of 2 MiB where the system gives them. Programs that work on
// large arrays ask for them: with pages of 4 KiB, writing 60 MB can be bound by the TLB.
enum class Pages : uint8_t { small, huge };
// What the system gives where huge pages are asked for.
Pages given_pages(Pages asked);
inline constexpr size_t least_huge_bytes = size_t{4} << 20;

// Bytes at a multiple of 64, all 0xff: NaN in every element type, and no page shares the kernel's zero page.
class Buffer {
 public:
  explicit Buffer(size_t bytes, Pages pages = Pages::huge);
  void* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }
  // NaN everywhere again.
  void poison();

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(void* memory) const { ::operator delete(memory, alignment); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> memory_;
};

// What one run of a plan reads and writes, the workspace included.
struct Tensors {
  Buffer input;
  Buffer output;
  std::vector<Buffer> parameters;
  Buffer workspace;

  // Random values, the same for a seed whatever the number of threads; the output is NaN. For a plan of a GPU
  // they are what is uploaded and downloaded, without a workspace.
  // Throws Error where this machine has not as much memory.
  Tensors(const Plan& plan, uint64_t seed, Executor& executor, Pages pages = Pages::huge);
  Arguments arguments() const;
  // Tells two outputs apart: equal for the same bits.
  uint64_t output_hash() const;
};

// What Tensors takes, and what reading the inputs once moves.
int64_t tensor_bytes(const Problem& problem);
int64_t input_bytes(const Problem& problem);

// Throws Error "the problem needs N GiB" where the machine does not have as much free.
void require_memory(double bytes);
// The Error itself, for an allocation that failed.
[[noreturn]] void refuse_memory(double bytes);

// Values of sample n as dense NCHW doubles, and of a whole tensor.
std::vector<double> sample_values(const TensorSpec& spec, const void* memory, int64_t n);
std::vector<double> all_values(const TensorSpec& spec, const void* memory);

}  // namespace onepass::tool
