// Compiled kernels on disk: a file for each, in a folder that nobody else may write to.
//
// Nothing here fails: what cannot be read is compiled again and what cannot be written is kept in memory,
// with one warning in the life of a process.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/compile.h"

namespace onepass::cuda {

struct CacheKey {
  std::string kernel;
  std::string architecture;
  std::string hash;  // of all that decides the machine code
};

// That this process compiles a kernel, left on disk while it does. A compiler that crashes takes the process
// along; those that come later see it by what was left.
class CompileAttempt {
 public:
  explicit CompileAttempt(const CacheKey& key);
  ~CompileAttempt();
  CompileAttempt(const CompileAttempt&) = delete;
  CompileAttempt& operator=(const CompileAttempt&) = delete;

  // Whether two processes did not live to see the end of theirs: one may have been interrupted.
  bool is_fatal() const { return left_.size() >= 2; }

 private:
  std::string own_;                // the file; empty where there is none
  std::vector<std::string> left_;  // those of processes that are gone
};

std::optional<Cubin> read_cached(const CacheKey& key);
void write_cached(const CacheKey& key, const Cubin& cubin);

}  // namespace onepass::cuda
