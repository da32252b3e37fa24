// Tests that need a process of their own: another environment, or libraries that are not open yet.
//
// A child is a disabled test of the same program, run by name.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace onepass::test {

struct ChildResult {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

using ChildEnvironment = std::map<std::string, std::string>;

// Runs the test `DISABLED_Child.NAME`, in the test's environment changed by `environment`.
ChildResult run_child(const std::string& name, const ChildEnvironment& environment);
// The same in `count` processes at once.
std::vector<ChildResult> run_children(int count, const std::string& name,
                                      const ChildEnvironment& environment);

// A folder that is removed with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read_bytes(const std::string& path);
void write_bytes(const std::string& path, const std::string& bytes);

// An environment variable until the end of the scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::string& value);
  ~ScopedVariable();
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::string before_;
  bool was_set_;
};

}  // namespace onepass::test
