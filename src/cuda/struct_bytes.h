// The size of a struct whose arrays have sizes that are found at run time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/source.h"

namespace onepass::cuda {

// Counts a kernel's shared memory member by member. The kernel asserts that it equals sizeof.
class StructBytes {
 public:
  StructBytes& add(int64_t bytes, int64_t alignment) {
    bytes_ = round_up(bytes_, alignment) + bytes;
    alignment_ = std::max(alignment_, alignment);
    return *this;
  }
  int64_t total() const { return round_up(bytes_, alignment_); }

 private:
  int64_t bytes_ = 0;
  int64_t alignment_ = 1;
};

}  // namespace onepass::cuda
