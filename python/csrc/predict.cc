// Predicted and measured seconds, for who chooses between this library's kernels and others.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <sstream>
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

double tensor_flops(const std::string& device) {
  return cuda::device_rates(Device::parse(device)).tensor_flops;
}

// What trees of costs compare, then the seconds that they are a factor on.
std::string convolution_features(const std::string& block, const std::vector<int64_t>& sizes,
                                 const std::string& mode, const std::string& layout,
                                 const std::string& device) {
  std::ostringstream out;
  for (const double value : cuda::convolution_features(problem_of(block, sizes, mode, layout, device, 1)))
    out << value << ' ';
  return out.str();
}

// A line for each row: its name, then its predicted seconds or why it refuses.
std::string rows(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                 const std::string& layout, const std::string& device, bool backward) {
  const Problem problem = problem_of(block, sizes, mode, layout, device, 1);
  std::ostringstream out;
  for (const Candidate& row : backward ? candidates(BackwardProblem(problem)) : candidates(problem)) {
    out << row.strategy << '\t';
    if (row.reason.empty())
      out << row.seconds << '\n';
    else
      out << "no: " << row.reason << '\n';
  }
  return out.str();
}

double measured(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                const std::string& layout, const std::string& device, const std::string& row, bool backward) {
  const Problem problem = problem_of(block, sizes, mode, layout, device, 1);
  return backward ? cuda::measured_seconds(BackwardProblem(problem), row)
                  : cuda::measured_seconds(problem, row);
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
  library.def("cuda_convolution_features(str block, int[] sizes, str mode, str layout, str device) -> str");
  library.def("cuda_bytes_per_second(str device) -> float");
  library.def("cuda_tensor_flops(str device) -> float");
  library.def("rows(str block, int[] sizes, str mode, str layout, str device, bool backward) -> str");
  library.def(
      "cuda_measured_seconds(str block, int[] sizes, str mode, str layout, str device, str row, bool "
      "backward) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("predicted_seconds", boxed<seconds>);
  library.impl("predicted_backward_seconds", boxed<backward_seconds>);
  library.impl("cuda_framework_seconds", boxed<framework_seconds>);
  library.impl("cuda_framework_backward_seconds", boxed<framework_backward_seconds>);
  library.impl("cuda_convolution_features", boxed<convolution_features>);
  library.impl("cuda_bytes_per_second", boxed<bytes_per_second>);
  library.impl("cuda_tensor_flops", boxed<tensor_flops>);
  library.impl("rows", boxed<rows>);
  library.impl("cuda_measured_seconds", boxed<measured>);
}

}  // namespace onepass::torch_binding
