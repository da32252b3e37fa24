// Prints a hash of the machine code of every kernel that the suite's lists launch: what a change of device
// code that should change nothing is compared by. Needs NVRTC, no GPU.
//
//   kernel_images [architecture=sm_90a] [row prefix] [every nth problem=1]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/export/record_plan.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/recording.h"
#include "cuda/runtime/sha256.h"
#include "onepass/onepass.h"
#include "plan/build_error.h"
#include "plan/strategy.h"
#include "support/results_hash.h"

namespace onepass {
namespace {

template <class T>
T read_at(std::string_view image, size_t offset) {
  T value;
  std::memcpy(&value, image.substr(offset, sizeof value).data(), sizeof value);
  return value;
}

// Of the sections of an ELF file of 64 bits that hold instructions.
std::string code_hash(std::string_view image) {
  const auto sections = read_at<uint64_t>(image, 0x28);
  const auto size = read_at<uint16_t>(image, 0x3a);
  const auto count = read_at<uint16_t>(image, 0x3c);
  const auto offset_of = [&](size_t index) {
    return read_at<uint64_t>(image, sections + index * size + 0x18);
  };
  const uint64_t names = offset_of(read_at<uint16_t>(image, 0x3e));
  cuda::Sha256 hash;
  for (size_t i = 0; i < count; ++i) {
    const char* const name = image.data() + names + read_at<uint32_t>(image, sections + i * size);
    if (!std::string_view(name).starts_with(".text.")) continue;
    hash.add_field(image.substr(offset_of(i), read_at<uint64_t>(image, sections + i * size + 0x20)));
  }
  return hash.hex().substr(0, 16);
}

struct Options {
  std::string architecture = "sm_90a";
  std::string prefix;
  size_t every = 1;
};

// The plan is made and recorded without compiling; its kernels are compiled afterwards, each text once.
class Printer {
 public:
  explicit Printer(const Options& options) : options_(options) {}

  template <class Row, class AnyProblem, class RecordPlan>
  void print(std::span<const Row* const> rows, const AnyProblem& problem, const RecordPlan& record_plan) {
    for (const Row* const row : rows) {
      if (!row->name.starts_with(options_.prefix) || !row->refusal(problem).empty()) continue;
      cuda::Recording recording;
      try {
        const cuda::WithoutCompiling without;
        record_plan(std::string(row->name), recording);
      } catch (const BuildError&) {
        continue;
      }
      recording.stop();
      for (const cuda::Recording::Kernel& kernel : recording.kernels())
        print(kernel, std::string(row->name) + " | " + problem.text());
    }
  }

 private:
  void print(const cuda::Recording::Kernel& kernel, const std::string& use) {
    if (!known_.insert(kernel.source.text).second) return;
    const cuda::Cubin cubin = cuda::compile(kernel.source, options_.architecture);
    std::printf("%s %d registers %d spilled %u threads %u shared | %s\n", code_hash(cubin.image).c_str(),
                cubin.registers, cubin.spilled_bytes, kernel.threads, kernel.shared_bytes, use.c_str());
    std::fflush(stdout);
  }

  const Options& options_;
  std::set<std::string> known_;
};

template <class Print>
void every_nth(const std::vector<Problem>& problems, size_t n, const Print& print) {
  for (size_t i = 0; i < problems.size(); i += n) print(problems[i]);
}

void print_all(const Options& options) {
  const Device device = Device::cuda_architecture(options.architecture);
  Printer printer(options);
  every_nth(testing::problems_of_results(device), options.every, [&](const Problem& problem) {
    printer.print(strategies(Device::Kind::cuda), problem, [&](const std::string& row, auto& recording) {
      void* workspace = nullptr;
      record(plan(problem, {row, ""}), false, recording, workspace);
    });
  });
  every_nth(testing::gradients_of_results(device), options.every, [&](const Problem& forward) {
    const BackwardProblem problem(forward);
    printer.print(backward_strategies(Device::Kind::cuda), problem,
                  [&](const std::string& row, auto& recording) {
                    void* workspace = nullptr;
                    record(plan_backward(problem, {row, ""}), recording, workspace);
                  });
  });
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  onepass::Options options;
  if (argc > 1) options.architecture = argv[1];
  if (argc > 2) options.prefix = argv[2];
  if (argc > 3) options.every = std::max<size_t>(1, std::strtoull(argv[3], nullptr, 10));
  onepass::print_all(options);
}
