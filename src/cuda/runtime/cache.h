// Compiled kernels on disk, one file each, in a folder that only its owner may write to.
//
// Nothing here throws. A kernel that cannot be read is compiled again; one that cannot be written stays in
// memory. There is one warning per process.
#pragma once

#include <optional>
#include <string>

#include "cuda/runtime/compile.h"

namespace onepass::cuda {

struct CacheKey {
  std::string kernel;
  std::string architecture;
  std::string hash;  // of all that decides the machine code
};

std::optional<Cubin> read_cached(const CacheKey& key);
void write_cached(const CacheKey& key, const Cubin& cubin);

}  // namespace onepass::cuda
