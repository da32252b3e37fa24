// Tuning on a GPU: runs the rows whose predictions are close, and keeps the fastest one's name on disk.
#include "plan/tuner.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cuda/runtime/cache.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/sha256.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "plan/choice.h"

namespace onepass {
namespace cuda {
namespace {

// A prediction is off by less than this: on an H200 the largest factor seen is 1.6.
constexpr double close = 3;
constexpr int repeats = 7;
constexpr size_t flushed_bytes = size_t{256} << 20;  // more than a second-level cache holds

std::vector<const Candidate*> close_candidates(const std::vector<Candidate>& candidates) {
  const double least = choose(candidates, "").seconds;
  std::vector<const Candidate*> found;
  for (const Candidate& candidate : candidates) {
    if (candidate.reason.empty() && candidate.seconds <= close * least) found.push_back(&candidate);
  }
  return found;
}

// A choice is stored in the kernel cache, with the answer in place of machine code. The cache's limits, list
// and clearing so cover it too.
CacheKey key_of(int device, const std::string& question) {
  Sha256 hash;
  hash.add_field(question).add_field(device_code_hash()).add_field(describe_device(device));
  return {"tuned", "choice", hash.hex()};
}

// The memory of a tensor, all zeros: no row takes its path for values that are not finite.
Memory cleared(const Device& device, const TensorSpec& spec) {
  Memory memory(device.index, std::max<size_t>(static_cast<size_t>(spec.byte_span()), 16));
  memory.fill(0);
  return memory;
}

struct Tensors {
  explicit Tensors(const Problem& problem)
      : input(cleared(problem.device, problem.input)), output(cleared(problem.device, problem.output)) {
    for (const TensorSpec& spec : problem.parameters) parameters.push_back(cleared(problem.device, spec));
  }
  std::vector<const void*> parameter_pointers() const {
    std::vector<const void*> pointers;
    for (const Memory& memory : parameters) pointers.push_back(memory.data());
    return pointers;
  }

  Memory input;
  Memory output;
  std::vector<Memory> parameters;
};

double median_seconds(int device, const std::function<void()>& launch) {
  Memory flushed(device, flushed_bytes);
  Timer timer(device);
  launch();  // the first one loads the kernel
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    flushed.fill(static_cast<unsigned char>(i));
    timer.start();
    launch();
    seconds.push_back(timer.stop());
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[repeats / 2];
}

// The name of the fastest row. It is the cheapest by prediction where no other is close or nothing can be
// measured: no memory is left, or the GPU is not present.
template <class Measure>
std::string fastest(const std::string& problem, const Device& device,
                    const std::vector<Candidate>& candidates, const Measure& measure) {
  std::string predicted = choose(candidates, "").strategy;
  const std::vector<const Candidate*> rows = close_candidates(candidates);
  if (rows.size() < 2 || !device.architecture.empty()) return predicted;
  try {
    std::string question = problem + ": the fastest of";
    for (const Candidate* row : rows) question += ' ' + row->strategy;
    std::string known = remembered_choice(device.index, question);
    for (const Candidate* row : rows) {
      if (row->strategy == known) return known;
    }
    const Candidate* best = nullptr;
    double least = 0;
    for (const Candidate* row : rows) {
      const double seconds = measure(row->strategy);
      if (best != nullptr && seconds >= least) continue;
      best = row;
      least = seconds;
    }
    remember_choice(device.index, question, best->strategy);
    return best->strategy;
  } catch (const Error&) {
    return predicted;
  }
}

std::string fastest_forward(const Problem& problem, const std::vector<Candidate>& candidates,
                            const PlanOptions&) {
  const auto measure = [&](const std::string& name) { return measured_seconds(problem, name); };
  return fastest(problem.text(), problem.device, candidates, measure);
}

std::string fastest_backward(const BackwardProblem& problem, const std::vector<Candidate>& candidates,
                             const PlanOptions&) {
  const auto measure = [&](const std::string& name) { return measured_seconds(problem, name); };
  return fastest(problem.text(), problem.forward.device, candidates, measure);
}

}  // namespace

double measured_seconds(const Problem& problem, const std::string& row) {
  const auto kernel = find_row(strategies(Device::Kind::cuda), row).build(problem, {});
  const Tensors tensors(problem);
  const Memory workspace(problem.device.index, std::max<size_t>(kernel->workspace_bytes(), 64));
  const Arguments arguments{tensors.input.data(), tensors.output.data(), tensors.parameter_pointers(),
                            nullptr};
  return median_seconds(problem.device.index, [&] { kernel->launch(arguments, workspace.data(), Stream{}); });
}

double measured_seconds(const BackwardProblem& problem, const std::string& row) {
  const Problem& forward = problem.forward;
  const Device& device = forward.device;
  const auto kernel = find_row(backward_strategies(Device::Kind::cuda), row).build(problem, {});
  const Tensors tensors(forward);
  const Memory output_gradient = cleared(device, problem.output_gradient);
  const Memory input_gradient =
      cleared(device, problem.wants_input() ? problem.input_gradient : TensorSpec{});
  std::vector<Memory> gradients;
  std::vector<void*> pointers;
  for (size_t i = 0; i < forward.parameters.size(); ++i) {
    const bool wanted = problem.wants_parameter(i);
    gradients.push_back(cleared(device, wanted ? problem.parameter_gradients[i] : TensorSpec{}));
    pointers.push_back(wanted ? gradients.back().data() : nullptr);
  }
  // A slab is a channel at the smallest.
  const Shape convolved = forward.block.conv_output_shape(forward.input.sizes);
  Memory statistics(device.index, 64 + static_cast<size_t>(convolved[0] * convolved[1]) * 2 * sizeof(float));
  statistics.fill(0);
  const Memory workspace(device.index, std::max<size_t>(kernel->workspace_bytes(), 64));
  const BackwardArguments arguments{tensors.input.data(),
                                    tensors.parameter_pointers(),
                                    output_gradient.data(),
                                    static_cast<const float*>(statistics.data()),
                                    problem.wants_input() ? input_gradient.data() : nullptr,
                                    pointers};
  return median_seconds(device.index, [&] { kernel->launch(arguments, workspace.data(), Stream{}); });
}

std::string remembered_choice(int device, const std::string& question) {
  const std::optional<Cubin> known = read_cached(key_of(device, question));
  return known ? known->image : "";
}

void remember_choice(int device, const std::string& question, const std::string& answer) {
  write_cached(key_of(device, question), {answer, 0, 0, 0});
}

}  // namespace cuda

extern const Tuner cuda_tuner{cuda::fastest_forward, cuda::fastest_backward};

}  // namespace onepass
