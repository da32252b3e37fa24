// Plans as JSON, for the export command: kernels' sources and the formulas of their launches.
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "boxed.h"
#include "cuda_problem.h"
#include "onepass/cuda.h"
#include "onepass/onepass.h"

namespace onepass::torch_binding {
namespace {

// A JSON string: sources have quotes, backslashes and line ends.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + '"';
}

template <class Values, class Print>
std::string list(const Values& values, Print print) {
  std::string text(1, '[');
  for (const auto& value : values) {
    if (text.size() > 1) text += ", ";
    text += print(value);
  }
  return text + ']';
}

std::string json(const cuda::ExportedKernel& kernel) {
  return "{\"name\": " + quoted(kernel.name) + ", \"source\": " + quoted(kernel.source) +
         ", \"threads\": " + std::to_string(kernel.threads) +
         ", \"cluster\": " + std::to_string(kernel.cluster) +
         ", \"shared_bytes\": " + std::to_string(kernel.shared_bytes) +
         ", \"cooperative\": " + (kernel.cooperative ? "true" : "false") +
         ", \"resident\": " + quoted(kernel.resident) + "}";
}

std::string json(const cuda::ExportedStep& step) {
  return "{\"kernel\": " + std::to_string(step.kernel) + ", \"blocks\": " + quoted(step.blocks) +
         ", \"words\": " + list(step.words, quoted) + ", \"names\": " + list(step.names, quoted) +
         ", \"memory\": " + quoted(step.memory) + ", \"bytes\": " + quoted(step.bytes) + "}";
}

std::string json(const cuda::ExportedPlan& plan, const std::string& strategy, const std::string& explained) {
  return "{\"strategy\": " + quoted(strategy) + ", \"explained\": " + quoted(explained) + ", \"kernels\": " +
         list(plan.kernels, [](const cuda::ExportedKernel& kernel) { return json(kernel); }) +
         ", \"steps\": " + list(plan.steps, [](const cuda::ExportedStep& step) { return json(step); }) +
         ", \"constants\": " +
         list(plan.constants,
              [](const cuda::ExportedConstant& constant) {
                return list(std::array{constant.name, constant.formula}, quoted);
              }) +
         ", \"workspace_bytes\": " + quoted(plan.workspace_bytes) + "}";
}

// `what`: "forward", "statistics" (a forward that writes them) or "backward", of the gradients `wanted`: the
// input's, then each parameter's.
std::string export_plan(const std::string& block, const std::vector<int64_t>& sizes, const std::string& mode,
                        const std::string& layout, const std::string& device, const std::string& what,
                        const std::vector<bool>& wanted) {
  const Problem problem = described_problem(block, sizes, mode, layout, device);
  if (what == "backward") {
    BackwardProblem gradients(problem);
    gradients.wanted = wanted;
    gradients.validate();
    const BackwardPlan made = plan_backward(gradients);
    return json(cuda::export_plan(made), made.strategy(), made.explain());
  }
  const Plan made = plan(problem);
  return json(cuda::export_plan(made, what == "statistics"), made.strategy(), made.explain());
}

std::string device_code() {
  return list(cuda::device_code(), [](const cuda::DeviceText& file) {
    return list(std::array{file.name, file.text}, quoted);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def(
      "cuda_export(str block, int[] sizes, str mode, str layout, str device, str what, "
      "bool[] wanted) -> str");
  library.def("cuda_device_code() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, library) {
  library.impl("cuda_export", boxed<export_plan>);
  library.impl("cuda_device_code", boxed<device_code>);
}

}  // namespace onepass::torch_binding
