// What the command line asks for, and the problems it means.
#include "tool/request.h"

#include <algorithm>
#include <fstream>

#include "onepass/cuda.h"
#include "onepass/error.h"
#include "tool/executor.h"

namespace onepass::tool {
namespace {

void refuse_shape_options(const Options& options, const std::string& where) {
  for (const auto& [option, value] : {std::pair<const char*, const std::string&>{"--input", options.input},
                                      {"--dtype", options.dtype},
                                      {"--layout", options.layout}}) {
    if (!value.empty())
      throw Error(std::string(option) + ": " + where + " already has it, give one of the two");
  }
}

Problem problem_of_options(const Options& options, const Device& device) {
  if (options.block.find('@') != std::string::npos) {
    refuse_shape_options(options, "the problem string");
    return Problem::parse(options.block, device);
  }
  Block block = Block::parse(options.block);
  if (options.input.empty()) {
    throw Error(
        "the input's sizes are missing: give --input 8x3x32x32, or the block as \"BLOCK @ 8x3x32x32\"");
  }
  return {std::move(block), parse_shape(options.input),
          options.dtype.empty() ? DType::f32 : parse_dtype(options.dtype), device,
          options.layout.empty() ? Layout::nchw : parse_layout(options.layout)};
}

void refuse_unknown_strategy(const std::string& name, const Problem& problem) {
  const Plan unforced = plan(problem);
  for (const Candidate& candidate : unforced.candidates()) {
    if (candidate.strategy == name) return;
  }
  plan(problem, {.strategy = name, .target = ""});  // throws the sentence that lists them
}

void refuse_unknown_target(const std::string& name, const Device& device) {
  if (device.kind != Device::Kind::cpu) throw Error("--target is of the CPU, the device is " + device.text());
  std::string names;
  for (const std::string& target : cpu_targets()) {
    if (target == name) return;
    names += (names.empty() ? "" : ", ") + target;
  }
  throw Error("target \"" + name + "\" is not available: this CPU and build have " + names);
}

std::vector<Problem> problems_of(const Options& options, const Device& device) {
  if (options.file.empty()) {
    if (options.block.empty()) throw Error("a block is missing, see onepass --help");
    return {problem_of_options(options, device)};
  }
  if (!options.block.empty()) throw Error("--file: a block is given too, give one of the two");
  refuse_shape_options(options, "the file");
  return read_problems(options.file, device);
}

}  // namespace

std::vector<Problem> read_problems(const std::string& path, const Device& device) {
  std::ifstream file(path);
  if (!file) throw Error("cannot read " + path);
  std::vector<Problem> problems;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    line.erase(std::min(line.find('#'), line.size()));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    while (line.back() == ' ' || line.back() == '\t' || line.back() == '\r') line.pop_back();
    try {
      problems.push_back(Problem::parse(line, device));
    } catch (const Error& error) {
      throw Error(path + ":" + std::to_string(number) + ": " + error.what());
    }
  }
  if (file.bad()) throw Error("cannot read " + path);
  if (problems.empty()) throw Error(path + " has no problem strings");
  return problems;
}

std::vector<Problem> requested_problems(const Options& options) {
  const Device device = requested_device(options);
  std::vector<Problem> problems = problems_of(options, device);
  // Here, since a file would give the same sentence for each of its lines.
  if (!options.strategy.empty()) refuse_unknown_strategy(options.strategy, problems.front());
  if (!options.target.empty()) refuse_unknown_target(options.target, device);
  return problems;
}

Device requested_device(const Options& options) {
  return Device::parse(options.device.empty() ? "cpu" : options.device, requested_threads(options));
}

Device runnable_device(const Options& options) {
  const Device device = requested_device(options);
  if (device.kind == Device::Kind::cpu) return device;
  if (!device.architecture.empty()) {
    throw Error("--device " + device.text() +
                " is no GPU of this machine: explain takes it, nothing runs on it");
  }
  if (const std::string reason = cuda::unavailable_reason(); !reason.empty()) throw Error(reason);
  return device;
}

int requested_threads(const Options& options) {
  return options.threads == 0 ? hardware_threads() : options.threads;
}

}  // namespace onepass::tool
