// Predicted seconds, for who chooses between this library's kernels and others.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <vector>

#include "boxed.h"
#include "onepass/backward.h"
#include "onepass/cuda.h"
#include "onepass/plan.h"

namespace onepass::torch_binding {
namespace {

Problem problem_of(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                   const std::string& layout, const std::string& device, int64_t threads) {
  const Mode parsed = Mode::parse(mode);
  Problem problem(Block::parse(block), sizes, parsed.dtype, Device::parse(device, static_cast<int>(threads)),
                  parse_layout(layout));
  problem.precision = parsed.precision;
  problem.numerics = parsed.numerics;
  problem.validate();
  return problem;
}

BackwardProblem backward_of(const Problem& problem, const std::vector<bool>& wanted) {
  BackwardProblem backward(problem);
  backward.wanted = wanted;
  backward.validate();
  return backward;
}

double seconds(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
               const std::string& layout, const std::string& device, int64_t threads) {
  return predicted_seconds(problem_of(block, sizes, mode, layout, device, threads));
}

double backward_seconds(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                        const std::string& layout, const std::string& device, int64_t threads,
                        const std::vector<bool>& wanted) {
  return predicted_seconds(backward_of(problem_of(block, sizes, mode, layout, device, threads), wanted));
}

double framework_seconds(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                         const std::string& layout, const std::string& device) {
  return cuda::framework_seconds(problem_of(block, sizes, mode, layout, device, 1));
}

double framework_backward_seconds(const std::string& block, const std::vector<int64_t>& sizes,
                                  const std::string& mode, const std::string& layout,
                                  const std::string& device, const std::vector<bool>& wanted) {
  return cuda::framework_seconds(backward_of(problem_of(block, sizes, mode, layout, device, 1), wanted));
}

double bytes_per_second(const std::string& device) {
  return cuda::device_rates(Device::parse(device)).bytes_per_second;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def(
      "predicted_seconds(str block, int[] sizes, str mode, str layout, str device, int threads) -> float");
  library.def(
      "predicted_backward_seconds(str block, int[] sizes, str mode, str layout, str device, int threads, "
      "bool[] wanted) -> float");
  library.def("cuda_framework_seconds(str block, int[] sizes, str mode, str layout, str device) -> float");
  library.def(
      "cuda_framework_backward_seconds(str block, int[] sizes, str mode, str layout, str device, bool[] "
      "wanted) -> float");
  library.def("cuda_bytes_per_second(str device) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("predicted_seconds", boxed<seconds>);
  library.impl("predicted_backward_seconds", boxed<backward_seconds>);
  library.impl("cuda_framework_seconds", boxed<framework_seconds>);
  library.impl("cuda_framework_backward_seconds", boxed<framework_backward_seconds>);
  library.impl("cuda_bytes_per_second", boxed<bytes_per_second>);
}

}  // namespace onepass::torch_binding
