// Compiles a kernel with the embedded headers: looks in memory, then on disk, then asks NVRTC.
#include "cuda/runtime/compile.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "cuda/runtime/attempt.h"
#include "cuda/runtime/cache.h"
#include "cuda/runtime/compiler.h"
#include "cuda/runtime/device_code.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/sha256.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "plan/build_error.h"

namespace onepass::cuda {
namespace {

thread_local int without_compiling = 0;

const DeviceFile* find_file(std::string_view name) {
  for (const DeviceFile& file : device_files()) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

// The embedded files that a text includes, directly or not. Only these are given to the compiler, so that
// those hashed and those compiled are the same.
void collect_included(std::string_view text, std::set<const DeviceFile*>& files) {
  constexpr std::string_view directive = "#include \"";
  for (size_t at = text.find(directive); at != text.npos; at = text.find(directive, at)) {
    at += directive.size();
    const DeviceFile* file = find_file(text.substr(at, text.find('"', at) - at));
    if (file != nullptr && files.insert(file).second) collect_included(file->text, files);
  }
}

std::vector<std::string> options_for(const std::string& architecture) {
  return {"--gpu-architecture=" + architecture,  // a real one: machine code, not PTX
          "--std=c++20", "--device-as-default-execution-space",
          "--ptxas-options=-v"};  // registers and spills, in the log
}

// Everything that decides the machine code; without the compiler where it is to be known to all of them.
std::string hash_of(const Source& source, const std::string& architecture, const std::string& compiler) {
  Sha256 hash;
  hash.add_field(compiler).add_field(source.name).add_field(source.text);
  for (const std::string& option : options_for(architecture)) hash.add_field(option);
  for (const DeviceFile* file : included_files(source.text)) hash.add_field(file->name).add_field(file->text);
  return hash.hex();
}

// For the records of kernels on which a compiler crashed. A version has builds that differ: the size tells
// most of them apart.
std::string compiler_name() {
  std::error_code ignored;
  const auto bytes = std::filesystem::file_size(nvrtc().path, ignored);
  return "NVRTC " + nvrtc().version + (ignored ? "" : " of " + std::to_string(bytes) + " bytes");
}

CompilerInput input_for(const Source& source, const std::string& architecture) {
  const std::set<const DeviceFile*> headers = included_files(source.text);
  return {source.name + ".cu", source.text, options_for(architecture), {headers.begin(), headers.end()}};
}

// The sum of the numbers before each occurrence of the words: "32 registers" -> 32.
int sum_before(std::string_view log, std::string_view words) {
  int sum = 0;
  for (size_t at = log.find(words); at != log.npos; at = log.find(words, at + 1)) {
    size_t first = at;
    while (first > 0 && log[first - 1] >= '0' && log[first - 1] <= '9') --first;
    if (first < at) sum += std::stoi(std::string(log.substr(first, at - first)));
  }
  return sum;
}

// Lines in which the assembler says that it gave up what the kernel was written for.
std::string lost_performance(const std::string& log) {
  for (size_t begin = 0; begin < log.size();) {
    const size_t end = std::min(log.find('\n', begin), log.size());
    std::string line = log.substr(begin, end - begin);
    const auto has = [&](const char* word) { return line.find(word) != std::string::npos; };
    if ((has("wgmma") && has("serialized")) || (has("setmaxnreg") && has("ignored"))) return line;
    begin = end + 1;
  }
  return "";
}

Cubin cubin_of(const Source& source, CompilerOutput output) {
  if (output.result != cuda_success) {
    throw BuildError("kernel " + source.name + " does not compile: " + output.words +
                     (output.log.empty() ? "" : "\n" + output.log));
  }
  const std::string& log = output.log;
  if (const std::string line = lost_performance(log); !line.empty()) {
    throw BuildError("kernel " + source.name + " is not compiled as it was written: " + line);
  }
  return {std::move(output.image), sum_before(log, " registers"),
          sum_before(log, " bytes spill stores") + sum_before(log, " bytes spill loads"),
          sum_before(log, " bytes smem")};
}

[[noreturn]] void refuse(const std::string& kernel, const Condemnation& record) {
  throw BuildError("kernel " + kernel + " is not compiled: " + record.compiler + " was " + record.how +
                   " on it at " + record.when + "; remove " + record.file + " to try again");
}

// Compiles a kernel during whose last compilation the process ended, by a crash or an interrupt.
CompilerOutput compile_suspect(const CacheKey& kernel, const CompilerInput& input, Attempts& attempts) {
  using Kind = ChildOutcome::Kind;
  // A hundred times what a kernel takes: half a second to three seconds.
  constexpr std::chrono::minutes limit{5};
  ChildOutcome outcome = run_compiler_in_child(input, limit);
  if (outcome.kind == Kind::crashed) refuse(kernel.kernel, attempts.condemn(outcome.how));
  if (outcome.kind == Kind::interrupted) {
    throw BuildError("kernel " + kernel.kernel + " is not compiled: the process that compiled it was " +
                     outcome.how + "; the next call tries again");
  }
  if (outcome.kind == Kind::not_run) {
    std::fprintf(
        stderr,
        "onepass: warning: kernel %s was not compiled to its end before; no child process can compile it "
        "(%s), so this process does\n",
        kernel.kernel.c_str(), outcome.how.c_str());
    const CompileMarker marker(kernel);
    outcome.output = run_compiler(input);
  }
  attempts.forget();
  return std::move(outcome.output);
}

CompilerOutput compile_guarded(const Source& source, const std::string& architecture) {
  const CacheKey kernel{source.name, architecture, hash_of(source, architecture, "")};
  const CompilerInput input = input_for(source, architecture);
  Attempts attempts(kernel, compiler_name());
  if (attempts.condemnation()) refuse(kernel.kernel, *attempts.condemnation());
  if (attempts.is_suspect()) return compile_suspect(kernel, input, attempts);
  const CompileMarker marker(kernel);
  return run_compiler(input);
}

Cubin read_or_compile(const Source& source, const std::string& architecture, const std::string& hash) {
  const CacheKey key{source.name, architecture, hash};
  if (std::optional<Cubin> cached = read_cached(key)) return *std::move(cached);
  Cubin cubin = cubin_of(source, compile_guarded(source, architecture));
  write_cached(key, cubin);
  return cubin;
}

// What this process has compiled or is compiling, by hash. Never destroyed: threads may still compile while
// the process ends.
class Compiled {
 public:
  // The result of make(), called by the first of several threads that ask; a failure is forgotten once
  // reported.
  template <class Make>
  Cubin find_or(const std::string& hash, const Make& make) {
    std::promise<Cubin> promise;
    std::unique_lock lock(mutex_);
    const auto [known, is_new] = kernels_.try_emplace(hash);
    if (!is_new) {
      const std::shared_future<Cubin> result = known->second;
      lock.unlock();
      return result.get();
    }
    const std::shared_future<Cubin> result = known->second = promise.get_future().share();
    lock.unlock();
    try {
      promise.set_value(make());
    } catch (...) {
      promise.set_exception(std::current_exception());
      lock.lock();
      kernels_.erase(hash);
    }
    return result.get();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_future<Cubin>> kernels_;
};

}  // namespace

std::set<const DeviceFile*> included_files(std::string_view text) {
  std::set<const DeviceFile*> files;
  collect_included(text, files);
  return files;
}

WithoutCompiling::WithoutCompiling() { ++without_compiling; }
WithoutCompiling::~WithoutCompiling() { --without_compiling; }

Cubin compile(const Source& source, const std::string& architecture) {
  if (without_compiling > 0) return {};
  static Compiled& compiled = *new Compiled;
  const std::string hash = hash_of(source, architecture, nvrtc().version);
  return compiled.find_or(hash, [&] { return read_or_compile(source, architecture, hash); });
}

std::vector<Cubin> compile(std::span<const Source> sources, const std::string& architecture) {
  std::vector<Cubin> cubins(sources.size());
  if (without_compiling > 0) return cubins;
  std::vector<std::exception_ptr> failures(sources.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < sources.size(); i = next++) {
      try {
        cubins[i] = compile(sources[i], architecture);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    }
  };
  const size_t processors = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < std::min(processors, sources.size())) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads: the ones that run do all
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return cubins;
}

std::string device_code_hash() {
  Sha256 hash;
  for (const DeviceFile& file : device_files()) hash.add_field(file.name).add_field(file.text);
  return hash.hex();
}

}  // namespace onepass::cuda
