// Records on disk of attempts to compile a kernel, because a compiler that crashes takes the process along.
//
// A marker is a file that a process holds locked (flock) while it compiles. The system frees the lock however
// the process ends, on every host and in every container that shares the folder. A marker without a lock was
// left by a process that crashed or was interrupted: its kernel is suspect. A kernel is condemned by a
// record, written when the compiler crashed on it in a process of its own. Where the file system has no locks
// there are no markers. Nothing here throws: files that cannot be read or written count as absent, with one
// warning per process.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/runtime/cache.h"
#include "cuda/runtime/cache_folder.h"
#include "cuda/runtime/scoped.h"

namespace onepass::cuda {

// The record of a condemned kernel.
struct Condemnation {
  std::string compiler;
  std::string when;  // "2026-01-31 12:00:00 UTC"
  std::string how;   // "ended by signal 11 (Segmentation fault)"
  std::string file;  // where it is kept
};

// What earlier attempts left. The key's hash leaves the compiler out: a record of another one is known too.
class Attempts {
 public:
  Attempts(CacheKey kernel, std::string compiler);

  // Where this compiler crashed on the kernel.
  const std::optional<Condemnation>& condemnation() const { return condemnation_; }
  // Whether a process ended while it compiled the kernel, or another compiler crashed on it.
  bool is_suspect() const { return !left_.empty(); }

  // The compiler returned: removes markers and records of earlier attempts.
  void forget() const;
  // The compiler crashed: writes the record, returns it, and removes those of earlier attempts.
  Condemnation condemn(const std::string& how);

 private:
  void look_for_record(int folder);
  void look_for_markers(int folder);
  void remove_left(int folder) const;
  std::string record_name() const;

  CacheKey kernel_;
  std::string compiler_;
  std::optional<Condemnation> condemnation_;
  std::vector<std::string> left_;  // markers that nobody holds, a record of another compiler
};

// Marks on disk, for as long as it lives, that this process compiles the kernel.
class CompileMarker : public Scoped {
 public:
  explicit CompileMarker(const CacheKey& kernel);
  ~CompileMarker();

 private:
  void make(const CacheKey& kernel);

  Descriptor folder_;
  Descriptor file_;   // holds the lock
  std::string name_;  // empty where there is no marker
};

}  // namespace onepass::cuda
