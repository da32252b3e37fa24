// Tests that need a process of their own.
#include "support/child_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace onepass::test {
namespace {

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string command_for(const std::string& name, const ChildEnvironment& environment) {
  // The leak sanitizer takes four seconds at the end of a process: the parent looks for leaks.
  std::string command = "env ASAN_OPTIONS=detect_leaks=0";
  for (const auto& [variable, value] : environment) command += ' ' + quoted(variable + '=' + value);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  return command + ' ' + quoted(program) + " --gtest_also_run_disabled_tests --gtest_filter=DISABLED_Child." +
         name + " 2>&1";
}

}  // namespace

std::vector<ChildResult> run_children(int count, const std::string& name,
                                      const ChildEnvironment& environment) {
  const std::string command = command_for(name, environment);
  std::vector<FILE*> pipes;
  for (int i = 0; i < count; ++i) pipes.push_back(popen(command.c_str(), "r"));
  std::vector<ChildResult> results;
  for (FILE* pipe : pipes) {
    ChildResult result;
    for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) result.output += static_cast<char>(c);
    const int status = pclose(pipe);
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    // A name that no test has runs nothing and succeeds.
    EXPECT_NE(result.output.find("[ RUN      ] DISABLED_Child." + name), std::string::npos) << result.output;
    results.push_back(std::move(result));
  }
  return results;
}

ChildResult run_child(const std::string& name, const ChildEnvironment& environment) {
  return run_children(1, name, environment).front();
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = std::filesystem::temp_directory_path() / "onepass_test_XXXXXX";
  path_ = mkdtemp(pattern.data());
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_bytes(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

ScopedVariable::ScopedVariable(const char* name, const std::string& value) : name_(name) {
  const char* before = std::getenv(name);
  was_set_ = before != nullptr;
  if (was_set_) before_ = before;
  setenv(name, value.c_str(), 1);
}

ScopedVariable::~ScopedVariable() {
  if (was_set_) {
    setenv(name_, before_.c_str(), 1);
  } else {
    unsetenv(name_);
  }
}

}  // namespace onepass::test
